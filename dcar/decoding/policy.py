"""Policies in a decoding step: copies of their weights, the layer of a `HiddenPolicy` on its cache,
and the one call in which a backend may draw and decide. The decision itself is `log_probs` of
heads/policy.py."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from dcar.decoding.backend import Decided
from dcar.decoding.chunks import draw_chunks
from dcar.decoding.columns import CausalMask, RotaryCache, columns_of
from dcar.decoding.reader import Reader
from dcar.decoding.state import BatchState
from dcar.errors import ConfigError
from heads.layers import KVCache
from heads.policy import CandidatePolicy, ChunkPolicy, ChunkPolicyConfig, HiddenPolicy


class PolicyReader:
    """Copy of a policy's weights, at addresses that never change (CUDA graphs read them)."""

    policy: ChunkPolicy

    def __init__(self, policy: ChunkPolicy, reader: Reader):
        self.backend = reader.backend
        self.policy = copy.deepcopy(policy).to(reader.device).eval().requires_grad_(False)

    def prepare(self) -> None:
        """Prepare operations with the present weights."""
        raise NotImplementedError

    def load(self, policy: ChunkPolicy) -> None:
        """Copy the present weights of this policy. Raises ConfigError for one of another shape."""
        if (new := _shape(policy.config)) != (own := _shape(self.policy.config)):
            raise ConfigError(f"{new} cannot replace {own}; build an engine for it")
        pairs = list(zip(self.policy.parameters(), policy.parameters(), strict=True))
        if all(
            p.device.type == q.device.type == "cpu" and torch.equal(p, q.to(p.dtype))
            for p, q in pairs
        ):
            return  # comparing is cheap on a CPU, where an utterance may be decoded alone
        with torch.no_grad():
            torch._foreach_copy_([p for p, _ in pairs], [q for _, q in pairs])
        if self.backend.copies:
            self.prepare()


def _shape(config: ChunkPolicyConfig) -> ChunkPolicyConfig:
    return replace(config, chunk_range=(), base_checksum="", tokenizer="")


class HiddenReader(PolicyReader):
    """Reader of hidden states, which computes only the query of the last position."""

    policy: HiddenPolicy

    def __init__(self, policy: HiddenPolicy, reader: Reader, capacity: int):
        """Prepare the policy for so many positions. Raises ValueError for more than the rotary
        table has."""
        super().__init__(policy, reader)
        self.policy.to(reader.hidden_dtype)
        self._rotary = RotaryCache(policy.rotary, reader.device, reader.hidden_dtype)
        self._rotary.cover(0, capacity - 1)
        self._causal = CausalMask(reader.device, reader.hidden_dtype)
        self.prepare()

    def prepare(self) -> None:
        own = self.policy
        self._stack = self.backend.stack(
            [own.layer], (own.output_norm, own.output), (own.input_norm, own.input)
        )

    def new_cache(self, state: BatchState, rows: int, capacity: int) -> KVCache:
        """Make an empty cache of the policy's own keys and values."""
        heads, hidden = self.policy.config.num_attention_heads, state.states
        size = self.policy.config.layer_width // heads
        cache = KVCache(1, rows, heads, capacity, size, device=hidden.device, dtype=hidden.dtype)
        cache.eager = state.eager
        return cache

    def read(
        self, cache: KVCache, hidden: Tensor, longest: int, counts: Tensor, real: Tensor | None
    ) -> Tensor:
        """Read hidden states [B, m, D] that follow each row's past of at most `longest`, of which
        counts [B] are new (with `real` of `real_positions`, padding is left out); return the action
        logits [B, K] after the last one. Keys and values are written; the caller advances the
        cache."""
        # how many positions are real depends on the data: that is not compiled
        run = HiddenReader._run if real is not None else self.backend.part(HiddenReader._run)
        return run(self, cache, hidden, longest, counts, real)

    def _run(
        self, cache: KVCache, hidden: Tensor, longest: int, counts: Tensor, real: Tensor | None
    ) -> Tensor:
        """See `read`."""
        rows, new, width = hidden.shape
        offsets = torch.arange(new, device=hidden.device)
        x, positions = hidden.reshape(-1, width), (cache.lengths[:, None] + offsets).view(-1)
        if real is None:
            ends = torch.arange(0, rows * new, new, device=hidden.device)
            ends = ends + (counts - 1).clamp(min=0)
        else:
            x, positions = x.index_select(0, real), positions.index_select(0, real)
            ends = (counts.cumsum(0) - 1).clamp(min=0)
        columns = columns_of(cache, longest, new, self._causal, real=real, ends=ends, counts=counts)
        return self._stack.read(x, self._rotary, positions, columns)


class CandidateReader(PolicyReader):
    """Reader of candidates."""

    policy: CandidatePolicy

    def __init__(self, policy: CandidatePolicy, reader: Reader):
        super().__init__(policy, reader)
        self.prepare()

    def prepare(self) -> None:
        self._decision = self.backend.decision(self.policy)

    def decide(
        self, state: BatchState, logits: Tensor, num_candidates: int, dial: float
    ) -> Decided:
        """Draw candidates [B, N, n] from logits [B, n, V + 1]; return them, their features and the
        log-probabilities [B, N K] of candidate and size. A backend may do it in one call."""
        decided = None
        if self._decision is not None and not state.sampling.repetition_window:
            positions = state.next_positions(logits.shape[1])
            decided = self._decision(
                state.last_hidden,
                logits,
                state.uniform("token", positions),
                num_candidates,
                state.sampling,
                state.forbidden(positions),
                state.eos,
                dial,
            )
        if decided is not None:
            return decided
        chunks = draw_chunks(state, logits, num_candidates)
        features = self.policy.candidate_features(state.last_hidden, logits, chunks)
        return chunks, features, self.policy.log_probs(features, dial)
