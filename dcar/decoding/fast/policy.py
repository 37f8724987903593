"""The chunk policy in a decoding step: a copy of its weights, the query of the last position only, and on the CPU a
whole decision after the draw in one call. It computes what heads/policy.py does, which stays the reference."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dcar.decoding.fast.chunk_scorer import NativeChunkScorer, fused_chunk_scorer
from dcar.decoding.fast.columns import CausalMask, RotaryCache, columns_of, real_positions
from dcar.decoding.fast.cpu.native import LONG, POINTER, address, members
from dcar.decoding.fast.distributions import kernels_of, warping
from dcar.decoding.fast.stack import Stack, same_weights, weights_signature
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig
from heads.candidates import GAIN, MIN_LOG_PROB, EndScores, end_features, joint_log_probs, with_dial
from heads.chunk_scorer import scored_features
from heads.layers import KVCache
from heads.policy import NEVER, ChunkPolicy, PolicyReader

SHAPE = ("hidden_size", "num_actions", "layer_width", "num_attention_heads", "ffn_size", "reads", "sizes",
         "chunk_scorer_width", "chunk_scorer_embedding", "chunk_scorer_ids")


class FusedDecision(NamedTuple):
    """Chunks drawn side by side, the policy's distribution over their ends, and its likeliest end."""

    tokens: Tensor  # [B, N, n]
    candidates: Tensor  # [B, N, n, F], as `ChunkPolicy.candidate_features`
    log_probs: Tensor  # [B, N K], as `ChunkPolicy.log_probs`
    sizes: Tensor  # [B] of the likeliest end
    chosen: Tensor  # [B] its chunk, 0..N-1
    best_log_probs: Tensor  # [B] its log-probability
    best_tokens: Tensor  # [B, longest of the sizes]


class _Decision(ctypes.Structure):
    _fields_ = [*members(POINTER, "weight bias scorer scorer_weights"),
                *members(LONG, "width reach features actions"), *members(ctypes.c_float, "unlikely never")]


class FusedEnds:
    """`ChunkPolicy.score` after the draw as one matrix product: `EndScores` is linear in the features of all
    candidates, so the features of the ends need not be computed. The bias masks sizes. Call `load` first."""

    def __init__(self, scores: EndScores, unused: Tensor, reach: int):
        """reach: candidates that it reads. unused [K]: masked sizes; those above `reach` are masked, too."""
        self._ends, self._actions = reach, len(unused)
        blank = torch.zeros(reach, scores.features, device=unused.device)
        self._constant = end_features(blank)  # [reach, 4F + 3]
        every = torch.eye(blank.numel(), device=unused.device).view(-1, *blank.shape)
        self._linear = end_features(every) - self._constant  # [F reach, reach, 4F + 3]
        self._never = torch.where(unused[:reach], NEVER, 0.0)
        self.weight, self.bias = blank.new_empty(blank.numel(), reach), blank.new_empty(reach)

    def load(self, scores: EndScores) -> None:
        """Copy the present weights, in place."""
        with torch.no_grad():
            weight = GAIN * scores.linear.weight.float().T
            self.weight.copy_((self._linear @ weight).flatten(1))
            self.bias.copy_((self._never.unsqueeze(-1) + self._constant @ weight).flatten())

    def __call__(self, candidates: Tensor) -> Tensor:
        """candidates [B, N, reach, F] -> scores [B, N, K], float32."""
        rows, several = candidates.shape[:2]
        scores = torch.addmm(self.bias, candidates.reshape(rows * several, -1), self.weight)
        scores = scores.view(rows, several, self._ends)
        return nn.functional.pad(scores, (0, self._actions - self._ends), value=NEVER)


class FusedPolicy:
    """A policy's next decisions.

    The weights are a copy, at addresses that never change (CUDA graphs read them): `load` takes those of another
    policy of the same shape, or of the same one after an update.
    """

    def __init__(self, policy: ChunkPolicy, device: torch.device, dtype: torch.dtype):
        shared = {} if policy.layer is None else {id(policy.rotary): policy.rotary}  # the tables are only read
        self._copy = copy.deepcopy(policy, shared).eval().requires_grad_(False)
        self.rotary: RotaryCache | None = None
        if policy.layer is not None:
            self.rotary, self._causal = RotaryCache(policy.rotary, device, dtype), CausalMask(device, dtype)
        self._ends: FusedEnds | None = None
        if self._copy.scores is not None:
            self._ends = FusedEnds(self._copy.scores, self._copy.unused, policy.config.reach)
        self._loaded = False
        self.load(policy)

    def load(self, policy: ChunkPolicy) -> None:
        """Decide with the present weights of this policy. ConfigError for another shape."""
        for name in SHAPE:
            if (new := getattr(policy.config, name)) != (old := getattr(self._copy.config, name)):
                raise ConfigError(f"a policy with {name}={new} cannot take the place of one with {old}; build an "
                                  "engine for it")
        loaded, self.source, self._signature = self._copy, policy, weights_signature(policy)
        if self._loaded and same_weights(loaded, policy):  # as for every utterance that is spoken alone
            return
        loaded.load_state_dict(policy.state_dict())
        self._loaded = True
        if self._ends is not None and loaded.scores is not None:
            self._ends.load(loaded.scores)
        self._chunk_scorer = scorer = None if loaded.chunk_scorer is None else fused_chunk_scorer(loaded.chunk_scorer)
        native = scorer if isinstance(scorer, NativeChunkScorer) else None
        self._decision: _Decision | None = None
        if self._ends is not None and (scorer is None) == (native is None):
            shape, addresses = policy.config, (None, None) if native is None else native.addresses()
            self._decision = _Decision(
                self._ends.weight.data_ptr(), self._ends.bias.data_ptr(), *addresses, shape.hidden_size, shape.reach,
                shape.features, shape.num_actions, MIN_LOG_PROB, NEVER)
        if loaded.layer is not None:
            self._stack = Stack([loaded.layer], (loaded.output_norm, loaded.output), (loaded.input_norm, loaded.input))

    @property
    def stale(self) -> bool:
        """Whether the policy was changed after `load`, as far as its version counters say (writes to `.data` do not
        count)."""
        return weights_signature(self.source) != self._signature

    def signature(self) -> Hashable:
        """Addresses of the copied weights; `load` does not change them."""
        return tuple(p.data_ptr() for p in self._copy.parameters())

    @property
    def num_action_logits(self) -> int:
        """K; 0 where it reads no hidden states."""
        return 0 if self._copy.layer is None else self._copy.output.out_features

    def read(self, cache: KVCache, hidden: Tensor, counts: Tensor, real: Tensor | None) -> Tensor:
        """hidden [B, m, D] behind each row's past, of which counts [B] are new (where `real_positions` leaves padding
        out, the `real` ones) -> action logits [B, K] of the last.

        Keys and values are written; advancing the cache is left to the caller. `rotary` must cover the positions.
        """
        assert self.rotary is not None
        rows, new, width = hidden.shape
        offsets = torch.arange(new, device=hidden.device)
        x, positions = hidden.reshape(-1, width), (cache.lengths[:, None] + offsets).view(-1)
        if real is None:  # only the last real position decides, so only its query is needed
            ends = torch.arange(0, rows * new, new, device=hidden.device) + (counts - 1).clamp(min=0)
        else:
            x, positions = x.index_select(0, real), positions.index_select(0, real)
            ends = (counts.cumsum(0) - 1).clamp(min=0)
        columns = columns_of(cache, new, self._causal, real=real, ends=ends, counts=counts)
        return self._stack.read(x, self.rotary, positions, columns)

    def candidate_features(self, hidden: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """As `ChunkPolicy.candidate_features`."""
        return scored_features(self._chunk_scorer, hidden, logits, tokens)

    def log_probs(self, action_logits: Tensor | None, candidates: Tensor | None = None, dial: float = 0.0) -> Tensor:
        """As `ChunkPolicy.log_probs`."""
        if self._ends is None or candidates is None:
            return self._copy.log_probs(action_logits, candidates, dial)
        return joint_log_probs(with_dial(self._ends(candidates), dial), candidates)

    def decide(self, hidden: Tensor, logits: Tensor, u: Tensor, config: SamplingConfig, forbidden: Tensor | None,
               eos: int, dial: float) -> FusedDecision | None:
        """A whole decision after the draw in one call: tokens drawn from logits [B, n, V + 1] at numbers u [B, n, N] as
        `tokens_of` draws them, their `candidate_features` and `log_probs`, and the likeliest end.

        None where these have to be called one by one: elsewhere than on the CPU, for samplings and chunk scorers that
        the kernels do not support, and where a row has no distribution.
        """
        native, decision = kernels_of(logits, config), self._decision
        if native is None or decision is None:
            return None
        (rows, n, size), several = logits.shape, u.shape[-1]
        if n != decision.reach or hidden.shape != (rows, decision.width) or hidden.dtype != logits.dtype:
            raise ValueError(f"hidden states {tuple(hidden.shape)} and logits {tuple(logits.shape)} do not fit a "
                             f"policy of {decision.reach} ends")
        hidden, logits, u = hidden.contiguous(), logits.contiguous(), u.contiguous()
        banned = None if forbidden is None else forbidden.contiguous()
        tokens, best = u.new_empty(rows, several, n, dtype=torch.long), u.new_empty(rows, n, dtype=torch.long)
        features = u.new_empty(rows, several, n, decision.features, dtype=torch.float32)
        log_probs, best_log_probs = (features.new_empty(rows, several * decision.actions), features.new_empty(rows))
        sizes, chosen = tokens.new_empty(rows), tokens.new_empty(rows)
        longest = native.library.run_decision(
            ctypes.addressof(decision), logits.data_ptr(), hidden.data_ptr(),
            ctypes.addressof(warping(config.temperature, config.top_k, eos)), address(banned), u.data_ptr(),
            *(t.data_ptr() for t in (tokens, features, log_probs, sizes, chosen, best_log_probs, best)), rows, several,
            size, torch.get_num_threads(), dial)
        if longest < 0:
            raise RuntimeError(f"could not allocate memory for a decision among {rows * several} chunks")
        if not longest:
            return None
        return FusedDecision(tokens, features, log_probs, sizes, chosen, best_log_probs, best[:, :longest])


class FastPolicyReader(PolicyReader):
    """`heads.policy.PolicyReader` of a `FusedPolicy`: only the last position of each row has a query."""

    policy: FusedPolicy  # type: ignore[assignment]

    def __init__(self, policy: FusedPolicy, hidden: Tensor, capacity: int):
        self.policy = policy
        if policy.rotary is not None:
            policy.rotary.cover(0, capacity - 1)
        self.cache = policy.source.new_cache(len(hidden), capacity, device=hidden.device, dtype=hidden.dtype)

    def read(self, hidden: Tensor, counts: Tensor) -> Tensor | None:
        if self.cache is None:
            return None
        new = hidden.shape[1]
        action_logits = self.policy.read(self.cache, hidden, counts, real_positions(counts, new))
        self.cache.advance(counts, new)
        return action_logits
