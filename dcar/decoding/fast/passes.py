"""`FastDecoder`: a decoder for the decoding loop with few kernels a pass and, on a GPU, CUDA graphs.

The static engine (dcar/decoding/engine) is for methods without verification. Verifiers decide on the host after every
pass, so they stay in the loop, but their passes and those of a draft model can be fast, too. A `FastDecoder` replaces a
`CARDecoder` in the loop, in a method or as a draft:

    decode(FastDecoder(decoder), prompts, method, sampling)

so FAR, CAR-k, DCAR and every verifier are compared on equal passes. Tokens are those of the decoder itself, hidden
states equal up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dcar.decoding.fast.chunk_scorer import fused_chunk_scorer
from dcar.decoding.fast.columns import CausalMask, RotaryCache, columns_of, real_positions, round_up
from dcar.decoding.fast.graphs import StepGraphs
from dcar.decoding.fast.policy import FastPolicyReader, FusedPolicy
from dcar.decoding.fast.stack import FusedHeads, Stack, has_own_layers, same_weights, weights_signature
from dcar.errors import ConfigError, EngineError
from dcar.model.base import Decoder
from dcar.model.draft import AnyDecoder
from heads.chunk_scorer import ChunkScorer, LogRatios
from heads.layers import KVCache
from heads.policy import ChunkPolicy

BLOCK = 128
"""With graphs, attention reads a multiple of so many columns: one graph for each multiple, rows and tokens a row."""


class Passes:
    """Forward passes of a `CARDecoder` in few kernels, for `FastDecoder` and the static engine. ConfigError for a
    decoder of other layers."""

    def __init__(self, model: AnyDecoder):
        if not has_own_layers(model):
            raise ConfigError(f"fast passes read a CARDecoder of TransformerLayers, not a {type(model).__name__}; use "
                              "it as it is")
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        self.stack = Stack(list(model.layers), [model.norm])  # type: ignore[arg-type]
        self.heads = FusedHeads(model.heads)
        self.rotary = RotaryCache(model.speech_rotary, self.device, self.dtype)
        self._text_rotary = RotaryCache(model.text_rotary, self.device, self.dtype)
        self._text_embedding, self._embedding = (
            table.weight.detach() for table in (model.text_embedding, model.speech_embedding))
        self._model, self._causal = model, CausalMask(self.device, self.dtype)

    @torch.no_grad()
    def prefill(self, text_ids: Tensor, text_lengths: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor,
                capacity: int) -> tuple[KVCache, Tensor]:
        """As `CARDecoder.prefill`, for positions that `rotary` covers. The CPU kernels read the text in one pass and
        the prompt in another, as no text position sees speech; long prompts are left to the decoder."""
        (rows, text), prompt = text_ids.shape, prompt_ids.shape[1]
        if self.stack.native is None or rows * max(text, prompt) > self.stack.native.prompt_rows:
            return self._model.prefill(text_ids, text_lengths, prompt_ids, prompt_lengths, capacity)
        cache = self._model.new_cache(text, text_lengths, prompt_lengths, max(capacity, prompt))
        self._read_text(cache, text_ids)
        hidden = self.read(cache, prompt_ids, real=real_positions(prompt_lengths, prompt))
        cache.advance(prompt_lengths, prompt)
        return cache, hidden

    def _read_text(self, cache: KVCache, text_ids: Tensor) -> None:
        """Write keys and values of text_ids [B, N], with full attention within a row, to an empty cache."""
        rows, text = text_ids.shape
        lengths, position = cache.prefix_lengths, torch.arange(text)
        flat, positions, real = text_ids.reshape(-1), position.repeat(rows), real_positions(lengths, text)
        if real is not None:
            flat, positions = flat.index_select(0, real), positions.index_select(0, real)
        self._text_rotary.cover(0, text - 1)
        as_speech = cache.over(cache.kv, 0)
        as_speech.prefix_lengths = torch.zeros_like(lengths)
        # Only keys and values of the text are needed, so one position (not none) has a query in the last layer.
        columns = columns_of(as_speech, text, self._causal, real=real, ends=torch.zeros(1, dtype=torch.long),
                             tree=(position < lengths[:, None])[:, None].expand(-1, text, -1))
        self.stack.read(F.embedding(flat, self._text_embedding), self._text_rotary, positions, columns)

    def read(self, cache: KVCache, tokens: Tensor, layout: tuple[Tensor, Tensor] | None = None,
             real: Tensor | None = None) -> Tensor:
        """tokens [B, m] behind each row's past -> hidden states [B, m, D]; keys and values are written. The caller
        advances the cache; `rotary` must cover the positions.

        `layout` as for `CARDecoder.extend`. `real` (`real_positions`): the positions of a chain that are not padding;
        the others are skipped, their hidden states are 0.
        """
        rows, new = tokens.shape
        tree, offsets = (None, torch.arange(new, device=tokens.device)) if layout is None else layout
        flat, positions = tokens.reshape(-1), (cache.lengths[:, None] + offsets - cache.origin[:, None]).view(-1)
        if real is not None:
            flat, positions = flat.index_select(0, real), positions.index_select(0, real)
        columns = columns_of(cache, new, self._causal, tree=tree, real=real)
        x = self.stack.read(F.embedding(flat, self._embedding), self.rotary, positions, columns)
        if real is not None:
            x = x.new_zeros(rows * new, x.shape[1]).index_copy_(0, real, x)
        return x.view(rows, new, -1)


@dataclass
class _Inputs:
    """The fixed buffers of a captured pass."""

    cache: KVCache  # its storage and lengths
    tokens: Tensor  # [B, m]
    layout: tuple[Tensor, Tensor] | None
    hidden: Tensor  # [B, m, D]


class FastDecoder:
    """A `CARDecoder` in eval mode for `decode`; its weights must not change. Not thread-safe.

    `graphs`: None = on CUDA. With graphs all batches share one buffer of keys and values, which grows as needed, so
    only the last batch that was prefilled can be extended.
    Raises ConfigError for a decoder of other layers (`fast` returns such a decoder unchanged).
    """

    def __init__(self, model: AnyDecoder, graphs: bool | None = None):
        self._passes = Passes(model)
        self.model, self.config, self.norm, self.heads = model, model.config, model.norm, self._passes.heads
        self.device, self.dtype = self._passes.device, self._passes.dtype
        self._weights = weights_signature(model)
        self.graphs = StepGraphs(graphs, self.device)
        self._store: Tensor | None = None  # keys and values of the present batch
        self._batch = 0  # number of that batch
        self._inputs: dict[Hashable, _Inputs] = {}
        self._policies: dict[int, FusedPolicy] = {}  # by id of the policy
        # by id of the chunk scorer: a copy of it, and what computes with that copy
        self._chunk_scorers: dict[int, tuple[ChunkScorer, LogRatios]] = {}

    def checksum(self) -> str:
        return self.model.checksum()

    # --- what the loop asks for ---------------------------------------------------------------------------------

    def prefill(self, text_ids: Tensor, text_lengths: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor,
                capacity: int) -> tuple[KVCache, Tensor]:
        """As `CARDecoder.prefill`. EngineError if a weight of the decoder was changed, or for more positions than its
        rotary table has."""
        if weights_signature(self.model) != self._weights:
            raise EngineError("the decoder was trained, moved or replaced after FastDecoder read its weights; build a "
                              "new FastDecoder")
        stored = self.graphs.enabled  # then `_store_cache` copies the cache
        prompt = prompt_ids.shape[1]
        capacity = max(capacity, prompt)
        try:
            moved = self._passes.rotary.cover(-prompt if self.config.bos else 0, capacity)
        except ValueError as error:
            raise EngineError(f"{error}; lower max_tokens") from error
        if moved:
            self._reset_graphs()
        cache, hidden = self._passes.prefill(text_ids, text_lengths, prompt_ids, prompt_lengths,
                                             0 if stored else capacity)
        return (self._store_cache(cache, capacity) if stored else cache), hidden

    @torch.no_grad()
    def extend(self, cache: KVCache, tokens: Tensor, counts: Tensor,
               layout: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """As `CARDecoder.extend`; hidden states of padding may be 0."""
        if self.graphs.enabled:
            hidden = self._replay(cache, tokens, layout)
        else:
            real = real_positions(counts, tokens.shape[1]) if layout is None else None
            hidden = self._passes.read(cache, tokens, layout, real)
        cache.advance(counts, tokens.shape[1])
        return hidden

    def policy_reader(self, policy: ChunkPolicy, hidden: Tensor, capacity: int) -> FastPolicyReader:
        """A policy for the batch whose hidden states [B, …] are given, with the weights that it has now."""
        if (fused := self._policies.get(id(policy))) is None:
            fused = self._policies[id(policy)] = FusedPolicy(policy, self.device, self.dtype)
        else:
            fused.load(policy)  # always: not every way of training moves the version counters of weights
        return FastPolicyReader(fused, hidden, capacity)

    def log_ratios(self, chunk_scorer: ChunkScorer) -> LogRatios:
        """A chunk scorer with the weights that it has now."""
        known = self._chunk_scorers.get(id(chunk_scorer))
        if known is None or not same_weights(known[0], chunk_scorer):
            frozen = copy.deepcopy(chunk_scorer)
            known = self._chunk_scorers[id(chunk_scorer)] = frozen, fused_chunk_scorer(frozen)
        return known[1]

    # --- graphs -------------------------------------------------------------------------------------------------

    def _reset_graphs(self) -> None:
        self.graphs, self._inputs = StepGraphs(self.graphs.enabled, self.device), {}

    def _store_cache(self, cache: KVCache, capacity: int) -> KVCache:
        """Copy the cache to the store with room for `capacity` speech positions, the text padded to a multiple of 32
        columns, the whole to one of BLOCK."""
        layers, rows, _, _, heads, head_dim = cache.kv.shape
        prefix = round_up(cache.prefix, 32)
        self._batch += 1
        store = self.reserve(layers, rows, round_up(prefix + capacity, BLOCK), heads, head_dim)
        stored = _StoredCache(cache.over(store[:, :rows], prefix), self, self._batch)
        every = torch.arange(rows, device=self.device)
        stored.copy_rows(every, cache, every)
        return stored

    def reserve(self, layers: int, rows: int, width: int, heads: int, head_dim: int) -> Tensor:
        """The store, with at least these rows and columns; growing it drops its content and the graphs."""
        if self._store is not None:
            if rows <= self._store.shape[1] and width <= self._store.shape[2]:
                return self._store
            rows, width = max(rows, self._store.shape[1]), max(width, self._store.shape[2])
        self._reset_graphs()
        self._store = None  # the old and the new one need not fit side by side
        try:
            self._store = torch.zeros(layers, rows, width, 2, heads, head_dim, device=self.device, dtype=self.dtype)
        except torch.OutOfMemoryError as error:
            raise EngineError(f"out of memory for keys and values of {rows} rows of {width} positions ({error}); lower "
                              "batch_size first, then max_tokens") from error
        return self._store

    def _replay(self, cache: KVCache, tokens: Tensor, layout: tuple[Tensor, Tensor] | None) -> Tensor:
        if not isinstance(cache, _StoredCache) or cache.number != self._batch:
            raise EngineError("with graphs a FastDecoder extends the batch that it prefilled last; finish one batch "
                              "before the next, or use one FastDecoder for each")
        rows, new = tokens.shape
        columns = min(round_up(cache.columns(new), BLOCK), cache.kv.shape[2])
        key = rows, new, cache.prefix, columns, layout is not None
        if key not in self._inputs:
            self._inputs[key] = self._make_inputs(cache, tokens, layout, columns)
        inputs = self._inputs[key]
        inputs.tokens.copy_(tokens)
        for name in ("lengths", "origin", "prefix_lengths"):
            getattr(inputs.cache, name).copy_(getattr(cache, name))
        if layout is not None and inputs.layout is not None:
            for target, source in zip(inputs.layout, layout, strict=True):
                target.copy_(source)
        # A warm-up writes what the pass itself writes again, so there is no state to restore.
        self.graphs.run(key, partial(self._static_pass, inputs), (), self._weights)
        return inputs.hidden.clone()

    def _make_inputs(self, cache: _StoredCache, tokens: Tensor, layout: tuple[Tensor, Tensor] | None,
                     columns: int) -> _Inputs:
        view = cache.over(cache.kv)  # with lengths at addresses of their own
        view.lengths, view.origin, view.prefix_lengths = (
            x.clone() for x in (cache.lengths, cache.origin, cache.prefix_lengths))
        view.longest = columns - cache.prefix - tokens.shape[1]
        static = None if layout is None else (layout[0].clone(), layout[1].clone())
        hidden = torch.zeros(*tokens.shape, self.config.hidden_size, device=self.device, dtype=self.dtype)
        return _Inputs(view, tokens.clone(), static, hidden)

    def _static_pass(self, inputs: _Inputs) -> None:
        cache = inputs.cache.over(inputs.cache.kv)  # without the scatter index of the previous pass
        inputs.hidden.copy_(self._passes.read(cache, inputs.tokens, inputs.layout))


class _StoredCache(KVCache):
    """A cache in the store of a FastDecoder: rows are selected in place, so that its address does not change."""

    def __init__(self, cache: KVCache, owner: FastDecoder, number: int):
        """cache: over the first rows of the owner's store. number: of the batch; a later one overwrites its rows."""
        vars(self).update(vars(cache))
        self.owner, self.number = owner, number

    def take(self, rows: Tensor) -> Tensor:
        layers, _, width, _, heads, head_dim = self.kv.shape
        kept = self.kv.index_select(1, rows)
        out = self.owner.reserve(layers, len(rows), width, heads, head_dim)[:, : len(rows)]
        out[:, :, :width] = kept
        return out


def fast(model: Decoder) -> Decoder:
    """A FastDecoder of the model; other models (a language model of `transformers`, a FastDecoder) unchanged."""
    return FastDecoder(model) if has_own_layers(model) else model
