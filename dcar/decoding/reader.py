"""`Reader` decodes with the weights of a decoder. It reads a prompt and then tokens that follow it.

    reader = reader_of(decoder)
    cache, hidden = reader.prefill(*batch_of(prompts, config, device))
    # [B, m] -> [B, m, D]; the caller moves cache.lengths on
    hidden = reader.read(cache, tokens, int(cache.lengths.max()))
    logits = reader.heads(hidden[:, -1], k)         # [B, k, V + 1]

The layers are run on the ragged cache of heads/layers.py, with the operations of one backend.
`CARReader` is the reader of this project's own layers, `LanguageReader` (dcar/decoding/language.py)
that of language models; `readers.py` makes them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcar.decoding.backend import Backend
from dcar.decoding.columns import (
    CausalMask,
    JoinedRotary,
    RotaryCache,
    columns_of,
    real_positions,
    round_up,
)
from dcar.decoding.storage import CacheStorage
from dcar.model.base import DecoderConfig
from dcar.model.car import CARDecoder
from heads.layers import KVCache

Layout = tuple[Tensor, Tensor]
"""Attention among the tokens of a tree, bool [B or 1, m, m], and their positions [B or 1, m]
counted from the end of the past (`DraftTree.layout`)."""


class Reader:
    """Decoder in eval mode, prepared for decoding. Its weights must not change (see
    `readers.reader_of`). Methods that raise here are implemented by `CARReader` and
    `LanguageReader`.

    device, dtype: of the layers, and so of keys and values. hidden_dtype: of the hidden states that
    the heads read.
    """

    config: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    hidden_dtype: torch.dtype
    backend: Backend
    heads: Callable[..., Tensor]
    """Return logits of hidden states; see `PredictionHeads.logits`."""

    def new_cache(
        self, rows: int, text: int, capacity: int, storage: CacheStorage | None = None
    ) -> KVCache:
        """Make an empty cache with room for `text` columns of text and `capacity` speech
        positions in each row, in this storage or its own."""
        raise NotImplementedError

    def text_room(self, units: int) -> int:
        """Return the number of columns that a text of so many units occupies in the cache. It is
        a multiple of the vectors of a CPU, so that sums over the columns of a row are rounded
        alike whatever the texts of the others."""
        return round_up(units, 16)

    def cover(self, cache: KVCache) -> None:
        """Prepare for all positions of a cache. Raises ValueError for more than the tables have."""
        raise NotImplementedError

    def prefill(
        self, text_ids: Tensor, text_lengths: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor
    ) -> tuple[KVCache, Tensor]:
        """Read text [B, N] and speech prompt [B, P]. Return a cache with their keys and values,
        and the hidden states [B, P, D] of the prompt."""
        raise NotImplementedError

    def read(
        self,
        cache: KVCache,
        tokens: Tensor,
        longest: int,
        layout: Layout | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """Read tokens [B, m] that follow each row's past, of at most `longest` positions. Return
        hidden states [B, m, D]; keys and values are written. The caller advances the cache, and has
        called `cover`.

        `layout` makes the tokens a tree. `real` (`real_positions`): the positions that are not
        padding; the others may be skipped, and their hidden states are undefined.
        """
        raise NotImplementedError

    def part(self, cache: KVCache) -> Callable[..., Any]:
        """Return `Backend.part`, which has no effect where shapes follow the data."""
        return (lambda function: function) if cache.eager else self.backend.part


class CARReader(Reader):
    """Reader of a `CARDecoder`."""

    def __init__(self, model: CARDecoder, backend: Backend):
        self.config = model.config
        self._text_embedding = model.text_embedding
        self._embedding = model.speech_embedding
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        self.hidden_dtype, self.backend = self.dtype, backend
        self.heads = self.backend.heads(model.heads)
        self.stack = self.backend.stack(list(model.layers), [model.norm])  # type: ignore[arg-type]
        self.rotary, self._text_rotary = (
            RotaryCache(table, self.device, self.dtype)
            for table in (model.speech_rotary, model.text_rotary)
        )
        if self.device.type != "cpu":  # graphs read the tables, so their addresses must not change
            for rotary in (self.rotary, self._text_rotary):
                rotary.cover(-model.speech_rotary.reach, model.speech_rotary.reach - 1)
            self._both = JoinedRotary(self._text_rotary, self.rotary)
        self._causal = CausalMask(self.device, self.dtype)

    def new_cache(
        self, rows: int, text: int, capacity: int, storage: CacheStorage | None = None
    ) -> KVCache:
        heads = self.config.num_attention_heads
        return KVCache(
            len(self.stack.layers),
            rows,
            heads,
            capacity,
            self.config.hidden_size // heads,
            prefix=text,
            device=self.device,
            dtype=self.dtype,
            allocate=partial(storage.tensors, self.device, self.dtype) if storage else None,
        )

    @torch.no_grad()
    def prefill(
        self, text_ids: Tensor, text_lengths: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor
    ) -> tuple[KVCache, Tensor]:
        rows, prompt = prompt_ids.shape
        cache = self.new_cache(rows, self.text_room(text_ids.shape[1]), prompt)
        cache.prefix_lengths = text_lengths
        # With BOS the target's own positions start at 0 (BOS), so that the alignment does not
        # depend on the prompt.
        cache.origin = prompt_lengths - 1 if self.config.bos else torch.zeros_like(prompt_lengths)
        self.cover(cache)
        if self.device.type == "cpu":
            self._read_text(cache, text_ids)
            hidden = self.read(cache, prompt_ids, 0, real=self._real(prompt_lengths, prompt))
        else:
            hidden = self._read_together(cache, text_ids, prompt_ids)
        cache.lengths = prompt_lengths
        return cache, hidden

    def _read_together(self, cache: KVCache, text_ids: Tensor, prompt_ids: Tensor) -> Tensor:
        """Write keys and values of text [B, N] and prompt [B, P] to an empty cache, in one pass as
        a tree. Return the hidden states [B, P, D] of the prompt. On a CPU two passes are cheaper:
        the last layer of the text ends with its keys and values."""
        rows, text, total = len(text_ids), cache.prefix, cache.row_columns
        column = torch.arange(total, device=self.device)
        spoken = column >= text
        # [B, S, S]: text sees text, speech also the speech before it; every row sees column 0
        visible = (column < cache.prefix_lengths[:, None])[:, None] | (
            spoken & spoken[:, None] & (column <= column[:, None])
        )
        speech = self._both.second_of(column[text:] - text - cache.origin[:, None])
        positions = torch.cat((self._both.first_of(column[:text]).expand(rows, -1), speech), 1)
        x = torch.cat(
            (
                F.embedding(
                    F.pad(text_ids, (0, text - text_ids.shape[1])), self._text_embedding.weight
                ),
                F.embedding(prompt_ids, self._embedding.weight),
            ),
            1,
        )
        columns = columns_of(cache.without_prefix(), 0, total, self._causal, tree=visible)
        hidden = self.stack.read(x.flatten(0, 1), self._both, positions.view(-1), columns)
        return hidden.view(x.shape)[:, text:]

    def cover(self, cache: KVCache) -> None:
        self.rotary.cover(-cache.capacity if self.config.bos else 0, cache.capacity)

    def _real(self, counts: Tensor, new: int) -> Tensor | None:
        return (
            real_positions(counts, new) if self.device.type == "cpu" and len(counts) > 1 else None
        )

    def _read_text(self, cache: KVCache, text_ids: Tensor) -> None:
        """Write keys and values of text_ids [B, N], with full attention within a row, to an
        empty cache."""
        rows, text = text_ids.shape
        position = torch.arange(text, device=self.device)
        flat = text_ids.reshape(-1)
        positions = position.repeat(rows)
        real = self._real(cache.prefix_lengths, text)
        if real is not None:
            flat, positions = flat.index_select(0, real), positions.index_select(0, real)
        self._text_rotary.cover(0, text - 1)
        visible = (position < cache.prefix_lengths[:, None])[:, None]  # [B, 1, N]
        columns = columns_of(
            cache.without_prefix(),
            0,
            text,
            self._causal,
            real=real,
            tree=visible.expand(rows, text, text),
        )
        columns.writes_only = True
        self.stack.read(
            F.embedding(flat, self._text_embedding.weight), self._text_rotary, positions, columns
        )

    def read(
        self,
        cache: KVCache,
        tokens: Tensor,
        longest: int,
        layout: Layout | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        rows, new = tokens.shape
        part = self.part(cache)
        x, positions = part(place)(cache, self._embedding.weight, tokens, layout)
        tree = None if layout is None else layout[0]
        columns = columns_of(cache, longest, new, self._causal, tree=tree, real=real, part=part)
        if real is not None:
            x, positions = x.index_select(0, real), positions.index_select(0, real)
        x = self.stack.read(x, self.rotary, positions, columns)
        if real is not None:
            x = x.new_zeros(rows * new, x.shape[1]).index_copy_(0, real, x)
        return x.view(rows, new, -1)


def place(
    cache: KVCache, embedding: Tensor, tokens: Tensor, layout: Layout | None
) -> tuple[Tensor, Tensor]:
    """Return embeddings [N, D] and positions [N] of tokens [B, m] that follow each row's past."""
    offsets = torch.arange(tokens.shape[1], device=tokens.device) if layout is None else layout[1]
    positions = cache.lengths[:, None] + offsets - cache.origin[:, None]
    return F.embedding(tokens.reshape(-1), embedding), positions.view(-1)
