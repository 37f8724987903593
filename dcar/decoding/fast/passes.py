"""Fast passes for the decoding loop: the same decoder, read by few kernels and, on a GPU, by CUDA graphs.

The static engine (dcar/decoding/engine) is for methods that verify nothing. What verifies decides on the host after
every pass, so it stays in the loop; but its passes, and those of its draft model, need not be launched one kernel at
a time. `FastDecoder` stands in for a `CARDecoder` wherever the loop, a method or a draft asks for one:

    decode(FastDecoder(decoder), prompts, method, sampling)

so FAR, CAR-k, DCAR and every verifier are compared on equal passes. Tokens are those of the decoder itself, hidden
states equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dcar.decoding.fast.cpu.native import Places
from dcar.decoding.fast.graphs import StepGraphs
from dcar.decoding.fast.policy import FusedPolicy
from dcar.decoding.fast.stack import (
    CausalMask,
    FusedHeads,
    FusedStack,
    Rotation,
    additive,
    own_layers,
    round_up,
    weights_signature,
)
from dcar.decoding.loop import Decoder
from dcar.errors import ConfigError, EngineError
from dcar.model.car import CARDecoder
from heads.layers import KVCache
from heads.policy import ChunkPolicy

BLOCK = 128
"""With graphs, attention reads a multiple of so many columns: one graph for each multiple, rows, and tokens a row."""


@dataclass
class _Inputs:
    """What a captured pass reads and writes, at addresses that stay."""

    cache: KVCache  # its storage and lengths
    tokens: Tensor  # [B, m]
    layout: tuple[Tensor, Tensor] | None
    hidden: Tensor  # [B, m, D]


class FastDecoder:
    """A decoder of Transformer layers for `decode`, in eval mode; it must stay as it is. Not for several threads.

    `graphs`: None = on CUDA. With graphs all batches live in one store of keys and values, which grows as needed, so
    only the last batch that was prefilled can be extended.
    Raises ConfigError for a decoder of other layers (`fast` gives such a one back as it is).
    """

    def __init__(self, model: CARDecoder, graphs: bool | None = None):
        if (layers := own_layers(model)) is None:
            raise ConfigError(f"FastDecoder reads a CARDecoder of TransformerLayers, not a {type(model).__name__}; "
                              "use it as it is")
        self.model, self.config, self.norm = model, model.config, model.norm
        self.heads = FusedHeads(model.heads)
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        self._stack = FusedStack(layers, [model.norm])
        self._rotation: Rotation | None = None
        self._causal = CausalMask(self.device, self.dtype)
        self._weights = weights_signature(model)
        self.graphs = StepGraphs(graphs, self.device)
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None  # a cache with its keys and values
        self._store: Tensor | None = None  # keys and values of whatever is in flight
        self._batch = 0  # number of the batch that they belong to
        self._inputs: dict[Hashable, _Inputs] = {}
        self._policies: dict[int, FusedPolicy] = {}  # by id of the policy, which they hold

    def checksum(self) -> str:
        return self.model.checksum()

    # --- what the loop asks for ---------------------------------------------------------------------------------

    def prefill(self, text_ids: Tensor, text_lengths: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor,
                capacity: int) -> tuple[KVCache, Tensor]:
        """As `CARDecoder.prefill`. EngineError if a weight of the decoder was changed since."""
        if weights_signature(self.model) != self._weights:
            raise EngineError("the decoder was trained, moved or replaced after FastDecoder read its weights; build a "
                              "new FastDecoder")
        stored = self.graphs.enabled  # then the cache is only passed through
        cache, hidden = self.model.prefill(text_ids, text_lengths, prompt_ids, prompt_lengths,
                                           0 if stored else capacity)
        capacity = max(capacity, cache.capacity)
        self._reach(int(cache.origin.max()), capacity)
        return (self._adopt(cache, capacity) if stored else cache), hidden

    @torch.no_grad()
    def extend(self, cache: KVCache, tokens: Tensor, counts: Tensor,
               layout: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """As `CARDecoder.extend`."""
        if self.graphs.enabled:
            hidden = self._replay(cache, tokens, layout)
        else:
            hidden = self._pass(cache, tokens, layout)
        cache.advance(counts, tokens.shape[1])
        return hidden

    def policy(self, policy: ChunkPolicy, rows: int, capacity: int) -> FastPolicy:
        """The policy for a batch of `rows` rows; the batch before must have ended. Its weights are copied once, and
        again when their version counters say that it was trained."""
        if (fused := self._policies.get(id(policy))) is None:
            fused = self._policies[id(policy)] = FusedPolicy(policy)
        elif fused.stale:
            fused.load(policy)
        return FastPolicy(fused, rows, capacity, self.device, self.dtype)

    # --- one pass -----------------------------------------------------------------------------------------------

    def _pass(self, cache: KVCache, tokens: Tensor, layout: tuple[Tensor, Tensor] | None) -> Tensor:
        """tokens [B, m] behind each row's past -> hidden states [B, m, D]; keys and values are written."""
        assert self._rotation is not None
        turns, (rows, new) = self._rotation, tokens.shape
        tree, offsets = (None, torch.arange(new, device=tokens.device)) if layout is None else layout
        x = F.embedding(tokens.reshape(-1), self.model.speech_embedding.weight)
        angle = (cache.lengths[:, None] + offsets - cache.origin[:, None]).view(-1)
        if (own := self._stack.takes(len(x))) is not None:
            return own(x, turns.cos, turns.sin, angle, self._places(cache, new, tree), turns.first).view(rows, new, -1)
        cos, sin = turns(angle)
        if layout is None and cache.single and int(cache.prefix_lengths) == cache.prefix:
            mask = self._causal(new, cache.columns(new))
        else:
            mask = None if (seen := cache.mask(new, tree)) is None else additive(seen, self.dtype)
        for i, layer in enumerate(self._stack.layers):
            rotated = layer.project(x, cos, sin).unflatten(0, (rows, new)).permute(2, 0, 3, 1, 4)  # [3, B, H, m, D/H]
            keys, values = cache.write(i, rotated[1], rotated[2])
            y = F.scaled_dot_product_attention(rotated[0], keys, values, attn_mask=mask)
            x = layer.finish(x, y.transpose(1, 2).reshape(rows * new, -1))
        return self._stack.behind(x).view(rows, new, -1)

    def _places(self, cache: KVCache, new: int, tree: Tensor | None) -> Places:
        """`new` positions behind each row's past, for a stack that is one call."""
        columns, width = cache.columns(new), cache.kv.shape[4]
        place = cache.lengths[:, None] + torch.arange(cache.prefix, cache.prefix + new)
        if cache.batch > 1:
            place = place + torch.arange(0, cache.batch * width, width)[:, None]
        if self._seen is None or cache.kv is not self._seen[0]:  # views of a batch's cache are made once
            self._seen = cache.kv, *cache.kv.permute(1, 0, 2, 4, 3, 5)  # keys and values [layers, B, C, H, D/H]
        to = Places(*self._seen[1:], place.view(-1))
        if tree is not None and (seen := cache.mask(new, tree)) is not None:
            to.mask = additive(seen, self.dtype).view(-1, columns)
        elif cache.batch > 1 or int(cache.prefix_lengths) < cache.prefix:
            to.hole_from, to.hole_to = cache.prefix_lengths, torch.full_like(cache.prefix_lengths, cache.prefix)
        return to

    def _reach(self, origin: int, capacity: int) -> None:
        """Angles for positions from -origin to capacity. Graphs read them, so they are made anew seldom."""
        have = self._rotation
        if have is not None and -origin >= have.first and capacity <= have.last:
            return
        first, last = -round_up(origin, 512), min(round_up(capacity, 512), self.model.speech_rotary.reach - 1)
        if have is not None:
            first, last = min(first, have.first), max(last, have.last)
        if capacity > last:
            raise EngineError(f"{capacity} speech positions exceed the {last} of the rotary table; lower max_tokens")
        self._rotation = Rotation(self.model.speech_rotary, first, last, self.device, self.dtype)
        self._forget()

    # --- graphs -------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self.graphs, self._inputs = StepGraphs(self.graphs.enabled, self.device), {}

    def _adopt(self, cache: KVCache, capacity: int) -> KVCache:
        """The same cache in the store with room for `capacity` speech positions, its text padded to a multiple of 32
        columns, all of it to one of BLOCK."""
        layers, _, rows, heads, _, head_dim = cache.kv.shape
        prefix = round_up(cache.prefix, 32)
        width = round_up(prefix + capacity, BLOCK)
        self._batch += 1
        store = self.room(layers, rows, heads, width, head_dim)
        adopted = _StoredCache(cache.over(store[:, :, :rows], prefix), self, self._batch)
        adopted.kv[..., : cache.prefix, :] = cache.kv[..., : cache.prefix, :]
        speech = slice(prefix, prefix + cache.longest)
        adopted.kv[..., speech, :] = cache.kv[..., cache.prefix : cache.prefix + cache.longest, :]
        return adopted

    def room(self, layers: int, rows: int, heads: int, width: int, head_dim: int) -> Tensor:
        """The store, with at least these rows and columns; what was in a smaller one is lost, and so are graphs."""
        if self._store is not None:
            if rows <= self._store.shape[2] and width <= self._store.shape[4]:
                return self._store
            rows, width = max(rows, self._store.shape[2]), max(width, self._store.shape[4])
        self._forget()
        self._store = None  # the old and the new one need not fit side by side
        try:
            self._store = torch.zeros(layers, 2, rows, heads, width, head_dim, device=self.device, dtype=self.dtype)
        except torch.OutOfMemoryError as error:
            raise EngineError(f"out of memory for keys and values of {rows} rows of {width} positions ({error}); lower "
                              "batch_size first, then max_tokens") from error
        return self._store

    def _replay(self, cache: KVCache, tokens: Tensor, layout: tuple[Tensor, Tensor] | None) -> Tensor:
        if not isinstance(cache, _StoredCache) or cache.number != self._batch:
            raise EngineError("with graphs a FastDecoder extends the batch that it prefilled last; finish one batch "
                              "before the next, or use one FastDecoder for each")
        rows, new = tokens.shape
        columns = min(round_up(cache.columns(new), BLOCK), cache.kv.shape[4])
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
        # A warm-up writes what the pass itself writes again, so there is no state to put back.
        self.graphs.run(key, partial(self._static_pass, inputs), (), self._weights)
        return inputs.hidden.clone()

    def _make_inputs(self, cache: _StoredCache, tokens: Tensor, layout: tuple[Tensor, Tensor] | None,
                     columns: int) -> _Inputs:
        view = cache.still(columns - cache.prefix - tokens.shape[1])
        still = None if layout is None else (layout[0].clone(), layout[1].clone())
        hidden = torch.zeros(*tokens.shape, self.config.hidden_size, device=self.device, dtype=self.dtype)
        return _Inputs(view, tokens.clone(), still, hidden)

    def _static_pass(self, inputs: _Inputs) -> None:
        cache = inputs.cache.over(inputs.cache.kv)  # which knows nothing of the lengths of the pass before
        inputs.hidden.copy_(self._pass(cache, inputs.tokens, inputs.layout))


class FastPolicy:
    """Reads the hidden states of a batch with a policy and gives its law behind each row's last one: what
    `ChunkPolicy.extend` does, without the queries of the other positions."""

    def __init__(self, policy: FusedPolicy, rows: int, capacity: int, device: torch.device, dtype: torch.dtype):
        """`capacity`: most positions of a row, padding included."""
        self.policy = policy
        policy.allocate(rows, capacity, device, dtype)
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)

    def read(self, hidden: Tensor, counts: Tensor) -> Tensor:
        """hidden [B, m, D], of which counts [B] are new -> log-law [B, K] of the next size."""
        rows, new, width = hidden.shape
        row = torch.arange(rows, device=hidden.device)
        position = self._lengths[:, None] + torch.arange(new, device=hidden.device)
        self._lengths = self._lengths + counts
        alone = rows == 1 and hidden.device.type == "cpu"  # then the columns end where the row does
        return self.policy.read(hidden.reshape(-1, width), position.view(-1), row.repeat_interleave(new),
                                row * new + (counts - 1).clamp(min=0), int(self._lengths.max()),
                                None if alone else self._lengths)

    def select(self, rows: Tensor) -> None:
        """Only these rows go on."""
        kv = self.policy.cache.kv
        kv[:, : len(rows)] = kv.index_select(1, rows)
        self._lengths = self._lengths[rows]


class _StoredCache(KVCache):
    """A cache in the store of a FastDecoder: rows are selected in place, so that addresses stay."""

    def __init__(self, cache: KVCache, owner: FastDecoder, number: int):
        """cache: over the first rows of the owner's store. number: of the batch; a later one overwrites its rows."""
        vars(self).update(vars(cache))
        self.owner, self.number = owner, number

    def still(self, longest: int) -> KVCache:
        """A view for a captured pass: lengths at addresses of their own, `longest` as the bound that it is made for."""
        out = self.over(self.kv)
        out.lengths, out.origin, out.prefix_lengths = (
            x.clone() for x in (self.lengths, self.origin, self.prefix_lengths))
        out.longest = longest
        return out

    def take(self, rows: Tensor) -> Tensor:
        layers, _, _, heads, width, head_dim = self.kv.shape
        kept = self.kv.index_select(2, rows)
        out = self.owner.room(layers, len(rows), heads, width, head_dim)[:, :, : len(rows)]
        out[..., :width, :] = kept
        return out


def fast(model: Decoder) -> Decoder:
    """A FastDecoder of the model; the model itself where it is none of a CARDecoder's layers (a language model of
    `transformers`) or was made fast already."""
    return FastDecoder(model) if isinstance(model, CARDecoder) and own_layers(model) is not None else model
