"""The learned policy of DCAR as a chunk rule (DCAR paper §4.2)."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from dcar.decoding.chunks import ChunkRule, check_size
from dcar.decoding.declare import Style, decoding_method, option, unlisted
from dcar.decoding.policy import CandidateReader, HiddenReader
from dcar.decoding.records import Choice
from dcar.decoding.state import BatchState
from dcar.decoding.step import Admitted, Prefilled
from dcar.decoding.transfers import to_device
from dcar.errors import ConfigError
from dcar.model.models import Borrowed
from dcar.sampling import sample
from heads.policy import CandidatePolicy, ChunkPolicy, HiddenPolicy


@decoding_method("dcar", Style("DCAR", "#d1361c", "D"))
class PolicyChunk(ChunkRule):
    """Learned policy of DCAR: argmax ("greedy") or draw ("sample").

    `forced` fixes the size for some members of a group (utterance id -> a size for every member, 0
    = the policy decides), as the chase half of DCPO needs; their log-probabilities under the policy
    are recorded nevertheless. Other utterances follow the policy. `dial` shifts a trained policy to
    longer (above 0) or shorter chunks: nats added to the score of a size for each of its tokens.
    `num_candidates`: number of candidates, for a policy with a chunk scorer; candidate and size are
    chosen together (`heads.candidates.joint_log_probs`).
    """

    policy: ChunkPolicy = unlisted()
    mode: Literal["greedy", "sample"] = unlisted("greedy")
    forced: Mapping[str, Sequence[int]] | None = unlisted()
    policy_name: str | None = option(None, "@", key="policy", word="{}")
    num_candidates: int = option(1, "@n", word="{} candidates", minimum=1)
    dial: float = option(0.0, "@d")

    def __post_init__(self) -> None:
        if self.policy is not None:
            self.use(self.policy)

    def bind(self, models: Borrowed) -> None:
        self.use(models.policy(self.policy_name or ""))

    def use(self, policy: ChunkPolicy) -> None:
        """Set what depends on the policy."""
        check_num_candidates(policy, self.num_candidates)
        self.policy, self.after_draw = policy, policy.after_draw
        if isinstance(policy, CandidatePolicy):
            self.longest = policy.config.reach
            self.num_features = policy.config.num_features
        self.streams = ("token",) if self.mode == "greedy" else ("token", "policy")
        self.logged = ("sizes", "log_probs", *(["chosen"] if self.num_candidates > 1 else []))

    def width(self, heads: int) -> int:
        check_policy(self.policy, heads)
        for size in {size for sizes in (self.forced or {}).values() for size in sizes} - {0}:
            check_size(size, heads)
        return super().width(heads)

    def start(self, state: BatchState) -> None:
        super().start(state)
        if self.forced is not None:
            state.own["forced"] = torch.zeros_like(state.generated)
        if isinstance(self.policy, CandidatePolicy):
            state.shared["policy"] = CandidateReader(self.policy, state.reader)
        elif isinstance(self.policy, HiddenPolicy):
            reader = HiddenReader(self.policy, state.reader, state.cache.capacity)
            cache = reader.new_cache(state, state.rows, state.cache.capacity)
            cache.lengths = state.cache.lengths
            state.shared["policy"] = reader
            state.caches["policy"] = cache
            state.own["action_logits"] = state.states.new_zeros(
                state.rows, self.policy.config.num_actions
            )

    def refresh(self, state: BatchState) -> None:
        state.shared["policy"].load(self.policy)

    def forced_size(self, utterance_id: str, member: int) -> int:
        """Return the forced size of a member of a group, 0 if the policy decides."""
        sizes = (self.forced or {}).get(utterance_id)
        if sizes is None:
            return 0
        if member >= len(sizes):
            raise ConfigError(
                f"{utterance_id}: {len(sizes)} forced sizes for a larger group; give one for each "
                "member"
            )
        return sizes[member]

    def prefill(self, state: BatchState, rows: Tensor, read: Prefilled) -> None:
        if not self.after_draw:
            hidden, lengths = read.hidden, read.lengths
            cache = state.shared["policy"].new_cache(state, *hidden.shape[:2])
            logits = state.shared["policy"].read(cache, hidden, 0, lengths, None)
            cache.lengths = lengths
            state.caches["policy"].copy_rows(rows, cache, read.origins)
            state.own["action_logits"][rows] = logits[read.origins]

    def admit(self, state: BatchState, rows: Tensor, admitted: Admitted) -> None:
        if self.forced is not None:
            members = zip(admitted.prompts, admitted.members, strict=True)
            sizes = [self.forced_size(p.utterance_id, g) for p, g in members]
            state.own["forced"][rows] = to_device(sizes, rows.device)

    def observe(
        self, state: BatchState, hidden: Tensor, counts: Tensor, real: Tensor | None
    ) -> None:
        if not self.after_draw:
            cache = state.caches["policy"]
            longest = state.longest_of(cache, 0)
            logits = state.shared["policy"].read(cache, hidden, longest, counts, real)
            state.own["action_logits"].copy_(logits)

    def draw_and_choose(self, state: BatchState, logits: Tensor) -> tuple[Tensor, Tensor, Choice]:
        policy = state.shared["policy"]
        chunks, features, log_probs = policy.decide(state, logits, self.num_candidates, self.dial)
        return chunks, features, self.end(state, log_probs)

    def choose(self, state: BatchState, features: Tensor | None) -> Choice:
        # before the draw, by the logits that `observe` has left
        policy = state.shared["policy"].policy
        return self.end(state, policy.log_probs(state.own["action_logits"], self.dial))

    def end(self, state: BatchState, log_probs: Tensor) -> Choice:
        """Choose candidate and size by their log-probabilities [B, N K]."""
        u = None if self.mode == "greedy" else state.uniform("policy", state.generated)
        return choose_end(log_probs, u, state.own.get("forced"), self.policy.config.num_actions)


@decoding_method("dcar-sampled", Style("DCAR sampled", "#ee8866", "d"))
class SampledPolicyChunk(PolicyChunk):
    """Learned policy whose choice is drawn."""

    mode: Literal["greedy", "sample"] = unlisted("sample")


def choose_end(log_probs: Tensor, u: Tensor | None, forced: Tensor | None, k: int) -> Choice:
    """Return the choice: sizes [B] in 1..k, their log-probabilities [B], and, of several
    candidates, the chosen one [B].

    log_probs: [B, N k] of candidate and size (`joint_log_probs`), from which one is drawn at u [B];
    without u, the most likely is taken. If a size is `forced` [B] (0 = none), only the candidate is
    chosen.
    """
    several, open_to = log_probs.shape[1] > k, log_probs
    if forced is not None and several:
        size = torch.arange(log_probs.shape[1], device=log_probs.device) % k + 1
        other = (forced[:, None] > 0) & (size != forced[:, None])
        open_to = log_probs.masked_fill(other, -math.inf).log_softmax(-1)
    # where there is no distribution any end is taken: its log-probability says so
    index = (
        open_to.argmax(-1)
        if u is None
        else sample(open_to.exp(), u).clamp(max=log_probs.shape[1] - 1)
    )
    if forced is not None and not several:
        index = torch.where(forced > 0, forced - 1, index)
    return Choice(
        index % k + 1,
        chosen=index // k if several else None,
        log_probs=log_probs.gather(-1, index[:, None])[:, 0],
    )


def check_policy(policy: ChunkPolicy, heads: int) -> None:
    """Raise ConfigError for a policy that may choose more tokens than a decoder's `heads`
    predict."""
    if policy.config.num_actions > heads:
        raise ConfigError(
            f"the policy chooses among 1..{policy.config.num_actions} tokens, but the decoder has "
            f"{heads} heads; use the decoder that it was trained for"
        )


def check_num_candidates(policy: ChunkPolicy, num_candidates: int) -> None:
    """Raise ConfigError for a number of candidates that this policy cannot choose among."""
    if num_candidates > 1 and policy.chunk_scorer is None:
        raise ConfigError(
            f"num_candidates={num_candidates}: this policy cannot choose among candidates; train "
            "one with chunk_scorer=…"
        )
