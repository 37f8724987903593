"""The learned policy of DCAR as a chunk rule (DCAR paper §4.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from dcar.decoding.chunks import ChunkRule, check_size
from dcar.decoding.records import Decision
from dcar.decoding.state import BatchState
from dcar.decoding.step import Admitted
from dcar.errors import ConfigError
from dcar.sampling import sample, shifted
from heads.candidates import select_candidate
from heads.layers import KVCache
from heads.policy import ChunkPolicy


class PolicyChunk(ChunkRule):
    """Learned policy of DCAR: argmax ("greedy") or draw ("sample").

    `forced` fixes the size for some members of a group (utterance id -> a size for every member, 0
    = the policy decides), as the chase half of DCPO needs; their log-probabilities under the policy
    are recorded nevertheless. Other utterances follow the policy. `dial` shifts a trained policy to
    longer (above 0) or shorter chunks: nats added to the score of a size for each of its tokens.
    `num_candidates`: number of candidates, for a policy with a chunk scorer; candidate and size are
    chosen together (`heads.candidates.joint_log_probs`).
    """

    def __init__(
        self,
        policy: ChunkPolicy,
        mode: Literal["greedy", "sample"] = "greedy",
        name: str | None = None,
        forced: Mapping[str, Sequence[int]] | None = None,
        dial: float = 0.0,
        num_candidates: int = 1,
    ):
        if mode not in ("greedy", "sample"):
            raise ConfigError(f"policy mode must be 'greedy' or 'sample', not '{mode}'")
        if not math.isfinite(dial):
            raise ConfigError(f"dial must be a finite number, not {dial}")
        check_num_candidates(policy, num_candidates)
        self.policy = policy
        self.mode = mode
        self.forced = forced
        self.dial = dial
        self.num_candidates = num_candidates
        self.after_draw = policy.config.after_draw
        self.longest = policy.config.reach if self.after_draw else 0
        self.name = name or ("dcar" if mode == "greedy" else "dcar-sampled")
        self.num_features = policy.config.num_features
        self.streams = ("token",) if mode == "greedy" else ("token", "policy")
        self.logged = ("sizes", "log_probs", *(["chosen"] if num_candidates > 1 else []))

    def width(self, heads: int) -> int:
        check_policy(self.policy, heads)
        for size in {size for sizes in (self.forced or {}).values() for size in sizes} - {0}:
            check_size(size, heads)
        return super().width(heads)

    def start(self, state: BatchState) -> None:
        super().start(state)
        if self.forced is not None:
            state.own["forced"] = torch.zeros_like(state.generated)
        # it has keys and values of its own, of what the decoder has read
        if self.policy.layer is not None:
            state.caches["policy"] = self._new_cache(state, state.rows, state.cache.capacity)
            state.caches["policy"].lengths = state.cache.lengths
            state.own["action_logits"] = state.states.new_zeros(
                state.rows, self.policy.config.num_actions
            )

    def _new_cache(self, state: BatchState, rows: int, capacity: int) -> KVCache:
        config = self.policy.config
        heads = config.num_attention_heads
        cache = KVCache(
            1,
            rows,
            heads,
            capacity,
            config.layer_width // heads,
            device=state.states.device,
            dtype=state.states.dtype,
        )
        cache.exact = state.exact
        return cache

    def refresh(self, state: BatchState) -> None:
        if "policy" in state.shared:
            state.shared["policy"].load(self.policy)
        else:
            state.shared["policy"] = state.reader.policy(self.policy)
        if self.policy.layer is not None:
            state.shared["policy"].cover(state.cache.capacity)

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

    def admit(self, state: BatchState, rows: Tensor, admitted: Admitted) -> None:
        if self.forced is not None:
            members = zip(admitted.prompts, admitted.members, strict=True)
            state.own["forced"][rows] = torch.tensor(
                [self.forced_size(p.utterance_id, g) for p, g in members], device=rows.device
            )
        if self.policy.layer is not None:
            hidden, lengths = admitted.hidden, admitted.lengths
            cache = self._new_cache(state, *hidden.shape[:2])
            logits = state.shared["policy"].read(cache, hidden, lengths, None)
            cache.lengths, cache.longest = lengths, hidden.shape[1]
            state.caches["policy"].copy_rows(rows, cache, admitted.origins)
            state.own["action_logits"][rows] = logits[admitted.origins]

    def observe(
        self, state: BatchState, hidden: Tensor, counts: Tensor, real: Tensor | None
    ) -> None:
        if self.policy.layer is not None:
            started = state.clock()
            state.own["action_logits"].copy_(
                state.shared["policy"].read(
                    state.bound(state.caches["policy"], 0), hidden, counts, real
                )
            )
            state.seconds["policy"] += state.clock() - started

    def draw_and_choose(self, state: BatchState, logits: Tensor) -> Decision:
        started = state.clock()
        position = state.next_positions(logits.shape[1])
        decision = None
        if not state.sampling.repetition_window:
            u = shifted(state.uniform("token", position), self.num_candidates)
            decision = state.shared["policy"].decide(
                state.last_hidden,
                logits,
                u,
                state.sampling,
                state.forbidden(position),
                state.eos,
                self.dial,
            )
        if decision is None:
            return super().draw_and_choose(state, logits)
        if decision.likeliest is None or self.mode != "greedy" or "forced" in state.own:
            sizes, log_probs, chosen = choose_end(decision.log_probs, *self._how(state))
        else:
            sizes, log_probs, chosen = decision.likeliest
        state.seconds["policy"] += state.clock() - started
        if self.num_candidates == 1:
            chosen = None
        tokens = select_candidate(decision.tokens, chosen)
        return Decision(sizes, tokens, None, None, chosen, log_probs, decision.features)

    def candidate_features(self, state: BatchState, logits: Tensor, tokens: Tensor) -> Tensor:
        return state.shared["policy"].candidate_features(state.last_hidden, logits, tokens)

    def choose(self, state: BatchState, features: Tensor | None) -> Decision:
        started = state.clock()
        log_probs = state.shared["policy"].log_probs(
            state.own.get("action_logits"), features, self.dial
        )
        sizes, taken, chosen = choose_end(log_probs, *self._how(state))
        state.seconds["policy"] += state.clock() - started
        return Decision(sizes, chosen=chosen, log_probs=taken)

    def _how(self, state: BatchState) -> tuple[Tensor | None, Tensor | None, int]:
        """Return the arguments of `choose_end`: numbers, forced sizes and the largest size."""
        u = None if self.mode == "greedy" else state.uniform("policy", state.generated)
        return u, state.own.get("forced"), self.policy.config.num_actions


def choose_end(
    log_probs: Tensor, u: Tensor | None, forced: Tensor | None, k: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return sizes [B] in 1..k, their log-probabilities [B], and the candidate kept [B], None for a
    single one.

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
    return (
        index % k + 1,
        log_probs.gather(-1, index[:, None])[:, 0],
        index // k if several else None,
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
    if num_candidates < 1:
        raise ConfigError(f"num_candidates must be at least 1, not {num_candidates}")
    if num_candidates > 1 and policy.chunk_scorer is None:
        raise ConfigError(
            f"num_candidates={num_candidates}: this policy cannot choose among candidates; train "
            "one with chunk_scorer=…"
        )
