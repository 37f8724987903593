"""The chunk policy in a decoding step: weights of its own, the query of the last position only.

The mathematics is that of heads/policy.py, which stays the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import Tensor

from dcar.decoding.fast.stack import FusedStack, Rotation, StaticCache, weights_signature
from dcar.errors import ConfigError
from heads.policy import ChunkPolicy

SHAPE = ("hidden_size", "num_actions", "layer_width", "num_attention_heads", "ffn_size")


class FusedPolicy:
    """A policy's next decisions, row by row.

    The weights are a copy, at addresses that never change (CUDA graphs read them): `load` takes those of another
    policy of the same shape, or of the same one after an update.
    """

    def __init__(self, policy: ChunkPolicy):
        # the rotary tables are only read
        self._own = copy.deepcopy(policy, {id(policy.rotary): policy.rotary}).eval().requires_grad_(False)
        self.load(policy)

    def load(self, policy: ChunkPolicy) -> None:
        """Decide with the present weights of this policy. ConfigError for another shape."""
        for name in SHAPE:
            if (new := getattr(policy.config, name)) != (own := getattr(self._own.config, name)):
                raise ConfigError(f"a policy with {name}={new} cannot take the place of one with {own}; build an "
                                  "engine for it")
        self._own.load_state_dict(policy.state_dict())
        own = self._own
        self._stack = FusedStack([own.layer], (own.output_norm, own.output), (own.input_norm, own.input))
        self.source, self._signature = policy, weights_signature(policy)

    @property
    def stale(self) -> bool:
        """Whether the policy was changed after `load`, as far as its version counters say (writes to `.data` do not
        count)."""
        return weights_signature(self.source) != self._signature

    def signature(self) -> Hashable:
        """Addresses of the own weights; they are the same after `load`."""
        return tuple(p.data_ptr() for p in self._own.parameters())

    def allocate(self, rows: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make the caches of so many rows and positions."""
        rotary, heads = self._own.rotary, self._own.config.num_attention_heads
        self.cache = StaticCache(1, rows, 0, capacity, heads, rotary.head_dim, device, dtype)
        self._rotation = Rotation(rotary, 0, capacity - 1, device, dtype)
        self._columns = torch.arange(capacity, device=device)

    def read(self, x: Tensor, position: Tensor, row: Tensor | None, ends: Tensor, last: int,
             seen: Tensor | None) -> Tensor:
        """Log-law [n, K] of the next sizes, from the normed hidden states x [N, D] at speech positions [N] of rows
        [N] (None: the first one). ends [n]: which of them is each row's last; `last`: positions that attention reads;
        seen [n]: how many of these belong to the row, None = all."""
        index, turns = self.cache.index(row, position), self._rotation
        # Only the last real position decides, so only its query is needed.
        if (own := self._stack.takes(len(x))) is not None:
            logits = own(x, turns.cos, turns.sin, position, self.cache.places(index), kept=ends)
            return logits.log_softmax(-1, dtype=torch.float32)
        layer, z = self._stack.layers[0], self._stack.before(x)
        rotated = layer.project(z, *turns(position))
        self.cache.write(0, index, rotated[:, 1:])
        keys, values = self.cache.read(0, len(ends), 0, last)
        mask = None if seen is None else (self._columns[:last] < seen[:, None])[:, None, None]
        query = rotated[:, 0].index_select(0, ends)[:, :, None]  # [n, H, 1, D/H]
        y = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        z = layer.finish(z.index_select(0, ends), y.reshape(len(ends), -1))
        return self._stack.behind(z).log_softmax(-1, dtype=torch.float32)
