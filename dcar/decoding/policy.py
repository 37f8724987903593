"""Chunk policy in a decoding step: a copy of its weights, and only the query of the last
position. It computes the same as heads/policy.py, which is the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dcar.decoding.backend import Backend, Decision
from dcar.decoding.columns import CausalMask, RotaryCache, columns_of
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig
from heads.candidates import GAIN, EndScores, end_features, joint_log_probs, with_dial
from heads.chunk_scorer import scored_features
from heads.layers import KVCache
from heads.policy import NEVER, ChunkPolicy

SHAPE = (
    "hidden_size",
    "num_actions",
    "layer_width",
    "num_attention_heads",
    "ffn_size",
    "reads",
    "sizes",
    "chunk_scorer_width",
    "chunk_scorer_embedding",
    "chunk_scorer_ids",
)


class FusedEnds:
    """`ChunkPolicy.score` after the draw as one matrix product: `EndScores` is linear in the
    features of all candidates, so the features of the ends need not be computed. The bias masks
    sizes. Call `load` first."""

    def __init__(self, scores: EndScores, unused: Tensor, reach: int):
        """Allocate the product. reach: candidate tokens that it reads; unused [K]: masked sizes;
        those above `reach` are masked, too."""
        self._ends, self._actions = reach, len(unused)
        blank = torch.zeros(reach, scores.num_features, device=unused.device)
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

    def __call__(self, features: Tensor) -> Tensor:
        """Return scores [B, N, K], float32, given features [B, N, reach, F]."""
        # not a matrix product, which a GPU may compute in TF32
        scores = (features.flatten(2).unsqueeze(-1) * self.weight).sum(2) + self.bias
        return nn.functional.pad(scores, (0, self._actions - self._ends), value=NEVER)


class PolicyReader:
    """Reader of a policy, which computes its next decisions.

    The weights are a copy, at addresses that never change (CUDA graphs read them); `load` copies
    those of another policy of the same shape, or of the same one after an update.
    """

    def __init__(
        self, policy: ChunkPolicy, backend: Backend, device: torch.device, dtype: torch.dtype
    ):
        # the tables are only read
        shared = {} if policy.layer is None else {id(policy.rotary): policy.rotary}
        self.policy = copy.deepcopy(policy, shared).to(device).eval().requires_grad_(False)
        self._backend, self.rotary, self._ends = backend, None, None
        # it reads hidden states; scores of candidates stay as precise as they are
        if self.policy.layer is not None:
            self.policy.to(dtype)
            self.rotary, self._causal = (
                RotaryCache(policy.rotary, device, dtype),
                CausalMask(device, dtype),
            )
            if device.type != "cpu":  # graphs read the table, so its address must not change
                self.rotary.cover(0, policy.rotary.reach - 1)
        if self.policy.scores is not None:
            self._ends = FusedEnds(
                self.policy.scores, self.policy.unused.to(device), policy.config.reach
            )
        self._prepare()

    def load(self, policy: ChunkPolicy) -> None:
        """Copy the present weights of this policy. Raises ConfigError for one of another shape."""
        mine = self.policy
        for name in SHAPE:
            if (new := getattr(policy.config, name)) != (old := getattr(mine.config, name)):
                raise ConfigError(
                    f"a policy with {name}={new} cannot replace one with {old}; build an engine "
                    "for it"
                )
        pairs = list(zip(mine.parameters(), policy.parameters(), strict=True))
        if all(
            p.device.type == q.device.type == "cpu" and torch.equal(p, q.to(p.dtype))
            for p, q in pairs
        ):
            return  # comparing is cheap on a CPU, where an utterance may be decoded alone
        with torch.no_grad():
            for p, q in pairs:
                p.copy_(q)
        if self._backend.copies:
            self._prepare()
        elif self._ends is not None and mine.scores is not None:
            self._ends.load(mine.scores)

    def cover(self, capacity: int) -> None:
        """Prepare for so many positions. Raises ValueError for more than the rotary table has."""
        assert self.rotary is not None
        self.rotary.cover(0, capacity - 1)

    def _prepare(self) -> None:
        """Prepare operations with the weights of this reader."""
        mine, backend = self.policy, self._backend
        self._chunk_scorer = (
            None if mine.chunk_scorer is None else backend.chunk_scorer(mine.chunk_scorer)
        )
        self._decide: Callable[..., Decision | None] | None = None
        if self._ends is not None and mine.scores is not None:
            self._ends.load(mine.scores)
            self._decide = backend.decision(mine.config, self._ends, mine.chunk_scorer)
        if mine.layer is not None:
            self._stack = backend.stack(
                [mine.layer], (mine.output_norm, mine.output), (mine.input_norm, mine.input)
            )

    def read(self, cache: KVCache, hidden: Tensor, counts: Tensor, real: Tensor | None) -> Tensor:
        """Read hidden states [B, m, D] that follow each row's past, of which counts [B] are new
        (with `real` of `real_positions`, padding is left out); return the action logits [B, K]
        after the last one.

        Keys and values are written; advancing the cache is left to the caller, which has called
        `cover`.
        """
        assert self.rotary is not None
        rows, new, width = hidden.shape
        offsets = torch.arange(new, device=hidden.device)
        x, positions = hidden.reshape(-1, width), (cache.lengths[:, None] + offsets).view(-1)
        if real is None:  # only the last real position decides, so only its query is needed
            ends = torch.arange(0, rows * new, new, device=hidden.device) + (counts - 1).clamp(
                min=0
            )
        else:
            x, positions = x.index_select(0, real), positions.index_select(0, real)
            ends = (counts.cumsum(0) - 1).clamp(min=0)
        columns = columns_of(cache, new, self._causal, real=real, ends=ends, counts=counts)
        return self._stack.read(x, self.rotary, positions, columns)

    def log_probs(
        self, action_logits: Tensor | None, features: Tensor | None = None, dial: float = 0.0
    ) -> Tensor:
        """See `ChunkPolicy.log_probs`."""
        if self._ends is None or features is None:
            return self.policy.log_probs(action_logits, features, dial)
        return joint_log_probs(with_dial(self._ends(features), dial), features)

    def decide(
        self,
        hidden: Tensor,
        logits: Tensor,
        u: Tensor,
        sampling: SamplingConfig,
        forbidden: Tensor | None,
        eos: int,
        dial: float,
    ) -> Decision | None:
        """Make a whole decision after the draw in one call, if the backend can: draw tokens from
        logits [B, n, V + 1] at numbers u [B, n, N]. Return None if `candidate_features` and
        `log_probs` must be called."""
        return self._decide and self._decide(hidden, logits, u, sampling, forbidden, eos, dial)

    def candidate_features(self, hidden: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """See `ChunkPolicy.candidate_features`."""
        return scored_features(self._chunk_scorer, hidden, logits, tokens)
