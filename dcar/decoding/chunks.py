"""Chunk-wise decoding: the heads propose the next tokens, a schedule says how many are kept.

FAR and CAR-k keep a fixed number (DCAR paper §3.1), `RandomChunk` draws one from a range (the paper's ablation),
DCAR asks the policy (§4.2). Nothing is verified: what is kept is emitted, and the next pass reads the whole chunk.

Not the paper's: schedules after the draw see all candidates before they choose where the chunk ends: policies that
read them (heads/candidates.py), and rule-based ones such as `EndOnConfident`. Dropped tokens are drawn again from
another distribution at the same random number. So the emitted tokens do not follow the heads' distribution, on purpose.

Several chunks may be drawn side by side from the same distributions, of which the one with the best joint score is kept
(heads/chunk_scorer.py): importance resampling from the product of the heads' distributions towards their joint
distribution.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dcar.decoding.fast.policy import FastPolicyReader, FusedDecision
from dcar.decoding.loop import Draft, Kept, Session, decode
from dcar.decoding.records import batch_of
from dcar.errors import ConfigError
from dcar.model.base import Decoder, pad
from dcar.sampling import sample
from heads.candidates import candidate_features, resampling_log_weights, select_draw
from heads.chunk_scorer import ChunkScorer, scored_features
from heads.policy import ChunkPolicy


class Choice(NamedTuple):
    """What a schedule chose for every row."""

    sizes: Tensor  # [B] in 1..K
    log_probs: Tensor | None = None  # [B] of what was chosen, from a policy
    draw: Tensor | None = None  # [B] which candidate is kept, where there are several


class ChunkRule:
    """Decides how many of the heads' next tokens are kept: the schedule of a `ChunkMethod`. Override `choose`.

    `candidates`: tokens that are drawn before it decides; 0 = it decides first, and only the kept ones are drawn.
    `num_candidates`: N, chunks drawn side by side.
    """

    name = "rule"
    candidates = 0
    num_candidates = 1

    def begin(self, session: Session) -> None:
        """Called once before decoding. ConfigError where the decoder has fewer heads than `candidates`."""
        if self.candidates:
            check_size(self.candidates, session.model)

    def candidate_features(self, session: Session, logits: Tensor, tokens: Tensor) -> Tensor:
        """The features [B, N, n, F] that `choose` gets of chunks [B, N, n] drawn from logits [B, n, V + 1]."""
        return candidate_features(logits, tokens)

    def choose(self, session: Session, hidden: Tensor, counts: Tensor, candidates: Tensor | None) -> Choice:
        """Sizes [B] in 1..K of the next chunk of every row.

        candidates [B, N, n, 3]: of each drawn token its log-probability, that of the likeliest token, and the entropy
        in nats, all at temperature 1; None where it decides first. session.last_hidden [B, D]: the decoder's state.
        """
        raise NotImplementedError

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the rule's state; others have finished."""


class ChunkMethod:
    """Emit the tokens of heads 1..a for the size a that the schedule gives; heads sample independently given h."""

    def __init__(self, schedule: ChunkRule):
        self.schedule = schedule
        self.name = schedule.name

    def begin(self, session: Session) -> None:
        self.schedule.begin(session)

    def propose(self, session: Session) -> Draft | None:
        return None

    def keep(self, session: Session, hidden: Tensor, counts: Tensor, draft: Draft | None) -> Kept:
        if self.schedule.candidates:
            return self._keep_after_draw(session, hidden, counts)
        sizes, log_probs, _ = self.schedule.choose(session, hidden, counts, None)
        widest = int(sizes.max())  # only the heads that are kept are evaluated
        tokens = draw_chunks(session, session.model.heads(session.last_hidden, widest), 1)[:, 0]
        return Kept(tokens, sizes, actions=sizes, log_probs=log_probs)

    def _keep_after_draw(self, session: Session, hidden: Tensor, counts: Tensor) -> Kept:
        schedule = self.schedule
        logits = session.model.heads(session.last_hidden, schedule.candidates)
        if type(schedule) is PolicyChunk and (kept := schedule.fused_choice(session, logits)) is not None:
            return kept
        chunks = draw_chunks(session, logits, schedule.num_candidates)
        candidates = schedule.candidate_features(session, logits, chunks)
        sizes, log_probs, draw = schedule.choose(session, hidden, counts, candidates)
        tokens = select_draw(chunks, draw)[:, : int(sizes.max())]
        return Kept(tokens, sizes, actions=sizes, chosen=draw, log_probs=log_probs, candidates=candidates)

    def select(self, rows: Tensor) -> None:
        self.schedule.select(rows)


def draw_chunk(session: Session, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the next tokens [B, k] from the heads' logits [B, k, V + 1]; also returns their distributions [B, k, V +
    1]."""
    position = session.next_positions(logits.shape[1])
    u = session.uniform("token", position)
    if session.sampling.repetition_window:
        return _without_repetition(session, logits, position, u)
    probs = session.probs(logits, position)
    return sample(probs, u), probs


def draw_chunks(session: Session, logits: Tensor, num_candidates: int) -> Tensor:
    """Several chunks [B, N, k] from the same logits [B, k, V + 1]. The first is that of `draw_chunk`; the others use
    random numbers `shifted` from its own, so the marginal distribution of each is the heads', too."""
    if not session.sampling.repetition_window:
        return session.draw(logits, num_candidates).mT
    k = logits.shape[1]
    position, u = session.next_positions(k), session.next_numbers(k, num_candidates)
    return torch.stack([_without_repetition(session, logits, position, one)[0] for one in u.unbind(-1)], 1)


def _without_repetition(session: Session, logits: Tensor, position: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and distributions at random numbers u [B, k] in repetition-aware sampling, where the distribution of a
    token depends on those before it in the chunk."""
    tokens, probs = position[:, :0], []
    for j in range(logits.shape[1]):
        history = session.histories(tokens)
        assert history is not None
        probs.append(session.probs(logits[:, j], position[:, j], history[:, -1]))
        tokens = torch.cat((tokens, sample(probs[-1], u[:, j])[:, None]), dim=1)
    return tokens, torch.stack(probs, dim=1)


class FixedChunk(ChunkRule):
    """Always k tokens: CAR-k; k = 1 is next-token decoding (on a model trained with one head, FAR)."""

    def __init__(self, size: int, name: str | None = None):
        self.size = size
        self.name = name or f"car-{size}"

    def begin(self, session: Session) -> None:
        check_size(self.size, session.model)

    def choose(self, session: Session, hidden: Tensor, counts: Tensor, candidates: Tensor | None) -> Choice:
        return Choice(torch.full_like(session.rows, self.size))


class _ListedSizes(ChunkRule):
    """A rule that chooses among the sizes of a list."""

    def __init__(self, sizes: Sequence[int], name: str):
        self.sizes, self.name = tuple(sizes), name

    def begin(self, session: Session) -> None:
        for size in self.sizes:
            check_size(size, session.model)
        self._table = torch.tensor(self.sizes, device=session.rows.device)


class RandomChunk(_ListedSizes):
    """A size drawn uniformly from a list at every step: what a policy must beat. A size that is listed twice is drawn
    twice as often, so that the shares can be those of a policy."""

    def __init__(self, sizes: Sequence[int], name: str | None = None):
        super().__init__(sizes, name or f"random-{'-'.join(map(str, sizes))}")

    def choose(self, session: Session, hidden: Tensor, counts: Tensor, candidates: Tensor | None) -> Choice:
        u = session.uniform("chunk", session.generated)
        return Choice(self._table[(u * len(self.sizes)).long()])


class EndOnConfident(_ListedSizes):
    """End the chunk on the likeliest of the tokens drawn: argmax over the sizes a of log p_a(x_a). Rule-based, not a
    paper's; what a policy after the draw must beat."""

    def __init__(self, sizes: Sequence[int], name: str | None = None):
        if not sizes:
            raise ConfigError("a schedule by rule needs the sizes that it chooses among")
        super().__init__(sorted(set(sizes)), name or f"end-on-confident-{'-'.join(map(str, sizes))}")
        self.candidates = max(sizes)

    def choose(self, session: Session, hidden: Tensor, counts: Tensor, candidates: Tensor | None) -> Choice:
        assert candidates is not None
        return Choice(self._table[candidates[:, 0, self._table - 1, 0].argmax(-1)])


class BestOfChunk(ChunkRule):
    """Always k tokens, of the candidate chunk with the highest joint score: argmax over them of r_k. What a policy with
    as many candidates must beat; not a paper's."""

    def __init__(self, size: int, num_candidates: int, chunk_scorer: ChunkScorer, name: str | None = None):
        self.name = name or f"best-of-{size}-{num_candidates}"
        if num_candidates < 2:
            raise ConfigError(f"{self.name}: the best of {num_candidates} candidates is no choice; give at least 2")
        self.candidates, self.num_candidates, self.chunk_scorer = size, num_candidates, chunk_scorer

    def begin(self, session: Session) -> None:
        super().begin(session)
        if self.chunk_scorer.config.num_heads < self.candidates:
            raise ConfigError(f"{self.name}: this chunk scorer reads chunks of at most "
                              f"{self.chunk_scorer.config.num_heads} tokens")
        self._log_ratios = session.model.log_ratios(self.chunk_scorer)

    def candidate_features(self, session: Session, logits: Tensor, tokens: Tensor) -> Tensor:
        return scored_features(self._log_ratios, session.last_hidden, logits, tokens)

    def choose(self, session: Session, hidden: Tensor, counts: Tensor, candidates: Tensor | None) -> Choice:
        assert candidates is not None
        draw = resampling_log_weights(candidates)[..., -1].argmax(1)
        return Choice(torch.full_like(draw, self.candidates), None, draw)


class PolicyChunk(ChunkRule):
    """The learned policy of DCAR: argmax ("greedy") or drawn ("sample").

    `forced` fixes the size of some members of a group (utterance id -> a size for every member, 0 = the policy
    decides), as the chase half of DCPO needs; their log-probabilities under the policy are recorded all the same. Other
    utterances follow the policy. `dial` shifts a trained policy to longer (above 0) or shorter chunks: nats added to
    the score of a size for each of its tokens. `num_candidates`: chunks drawn side by side, for a
    policy that holds a chunk scorer; candidate and size are chosen together (`heads.candidates.joint_log_probs`).
    """

    def __init__(self, policy: ChunkPolicy, mode: Literal["greedy", "sample"] = "greedy", name: str | None = None,
                 forced: Mapping[str, Sequence[int]] | None = None, dial: float = 0.0, num_candidates: int = 1):
        if mode not in ("greedy", "sample"):
            raise ConfigError(f"policy mode must be 'greedy' or 'sample', not '{mode}'")
        if not math.isfinite(dial):
            raise ConfigError(f"the dial of a policy is a finite number, not {dial}")
        check_num_candidates(policy, num_candidates)
        self.policy, self.mode, self.forced, self.dial, self.num_candidates = policy, mode, forced, dial, num_candidates
        self.candidates = policy.config.reach if policy.config.after_draw else 0
        self.name = name or ("dcar" if mode == "greedy" else "dcar-sampled")

    def begin(self, session: Session) -> None:
        check_policy(self.policy, session.model.config.num_prediction_heads)
        hidden = session.last_hidden
        self._reader = session.model.policy_reader(self.policy, hidden, session.cache.capacity)
        self.next_sizes: Tensor | None = None  # [B] the size that a row must take next, 0 where the policy decides
        if self.forced is not None:
            rows = zip(session.prompts, session.members, strict=True)
            table = [self.forced_size(prompt.utterance_id, member) for prompt, member in rows]
            for size in set(table) - {0}:
                check_size(size, session.model)
            self.next_sizes = torch.tensor(table, device=hidden.device)

    def forced_size(self, utterance_id: str, member: int) -> int:
        """The forced size of a member of a group, 0 where the policy decides."""
        sizes = (self.forced or {}).get(utterance_id)
        if sizes is None:
            return 0
        if member >= len(sizes):
            raise ConfigError(f"{utterance_id}: {len(sizes)} forced sizes for a larger group; give one per member")
        return sizes[member]

    def fused_choice(self, session: Session, logits: Tensor) -> Kept | None:
        """Draw chunks from logits [B, n, V + 1] and choose among them in one call; None where there is no kernel."""
        if not isinstance(self._reader, FastPolicyReader):
            return None
        started = time.perf_counter()
        n = logits.shape[1]
        fused = self._reader.policy.decide(session.last_hidden, logits, session.next_numbers(n, self.num_candidates),
                                           session.sampling, session.next_forbidden(n), session.model.config.eos,
                                           self.dial)
        if fused is None:
            return None
        sizes, log_probs, chosen, tokens = fused_end(fused, *self._how(session))
        session.policy_seconds += time.perf_counter() - started
        return Kept(tokens, sizes, actions=sizes, chosen=chosen, log_probs=log_probs, candidates=fused.candidates)

    def _how(self, session: Session) -> tuple[Tensor | None, Tensor | None, int]:
        """How `choose_end` chooses now."""
        u = None if self.mode == "greedy" else session.uniform("policy", session.generated)
        return u, self.next_sizes, self.policy.config.num_actions

    def candidate_features(self, session: Session, logits: Tensor, tokens: Tensor) -> Tensor:
        started = time.perf_counter()
        candidates = self._reader.policy.candidate_features(session.last_hidden, logits, tokens)
        session.policy_seconds += time.perf_counter() - started
        return candidates

    def choose(self, session: Session, hidden: Tensor, counts: Tensor, candidates: Tensor | None) -> Choice:
        started = time.perf_counter()
        log_probs = self._reader.policy.log_probs(self._reader.read(hidden, counts), candidates, self.dial)
        sizes, taken, draw = choose_end(log_probs, *self._how(session))
        session.note(taken.isnan())  # one NaN score makes the whole distribution NaN
        session.policy_seconds += time.perf_counter() - started
        return Choice(sizes, taken, draw)

    def select(self, rows: Tensor) -> None:
        self._reader.select(rows)
        if self.next_sizes is not None:
            self.next_sizes = self.next_sizes[rows]


class ShuffledChunk(ChunkRule):
    """The sizes that a policy chose, in random order: a control that keeps how often chunks are long, but not when.

    Every utterance is decoded with the policy, then again with the same sizes shuffled (starting over if it has become
    longer); the policy still chooses among several chunks drawn side by side, given the size. It takes twice the passes
    that are counted.
    """

    def __init__(self, schedule: PolicyChunk, name: str | None = None):
        self.schedule = schedule
        self.candidates, self.num_candidates = schedule.candidates, schedule.num_candidates
        self.name = name or f"{schedule.name}-shuffled"

    def begin(self, session: Session) -> None:
        if any(session.members):
            raise ConfigError(f"{self.name}: speaks every utterance once; groups are for policies")
        results = decode(session.model, session.prompts, ChunkMethod(self.schedule), session.sampling,
                        seed=session.seed, batch_size=len(session.prompts))
        device = session.rows.device
        # A FastDecoder with graphs holds one batch at a time, so this session's batch is prefilled again.
        batch = batch_of(session.prompts, session.model.config, device)
        session.cache, _ = session.model.prefill(*batch, session.cache.capacity)
        sizes, self._counts = pad([result.actions for result in results], device)
        place = torch.arange(sizes.shape[1], device=device).expand_as(sizes)
        order = session.uniform("shuffle", place).masked_fill(place >= self._counts[:, None], 2.0)  # padding stays last
        self._sizes = sizes.gather(1, order.argsort(-1))
        self.schedule.begin(session)

    def candidate_features(self, session: Session, logits: Tensor, tokens: Tensor) -> Tensor:
        return self.schedule.candidate_features(session, logits, tokens)

    def choose(self, session: Session, hidden: Tensor, counts: Tensor, candidates: Tensor | None) -> Choice:
        step = session.passes[session.rows]
        self.schedule.next_sizes = self._sizes[session.rows, step % self._counts[session.rows]]
        return self.schedule.choose(session, hidden, counts, candidates)

    def select(self, rows: Tensor) -> None:
        self.schedule.select(rows)


def choose_end(log_probs: Tensor, u: Tensor | None, forced: Tensor | None,
               k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sizes [B] in 1..k, their log-probabilities [B], and which of N candidates is kept [B], None of one.

    log_probs [B, N k] of candidate and size (`joint_log_probs`), from which one is drawn at u [B], or the likeliest
    taken without them. Where a size is `forced` [B] (0 = none), the candidate alone is chosen.
    """
    several, open_to = log_probs.shape[1] > k, log_probs
    if forced is not None and several:
        size = torch.arange(log_probs.shape[1], device=log_probs.device) % k + 1
        other = (forced[:, None] > 0) & (size != forced[:, None])
        open_to = log_probs.masked_fill(other, -math.inf).log_softmax(-1)
    index = open_to.argmax(-1) if u is None else sample(open_to.exp(), u)
    if forced is not None and not several:
        index = torch.where(forced > 0, forced - 1, index)
    return index % k + 1, log_probs.gather(-1, index[:, None])[:, 0], index // k if several else None


def fused_end(fused: FusedDecision, u: Tensor | None, forced: Tensor | None,
              k: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`choose_end` of a fused decision, and the tokens [B, longest of the sizes] of the chosen candidates."""
    if u is None and forced is None:  # it holds the likeliest end
        draw = fused.chosen if fused.tokens.shape[1] > 1 else None
        return fused.sizes, fused.best_log_probs, draw, fused.best_tokens
    sizes, log_probs, draw = choose_end(fused.log_probs, u, forced, k)
    return sizes, log_probs, draw, select_draw(fused.tokens, draw)[:, : int(sizes.max())]


def check_policy(policy: ChunkPolicy, heads: int) -> None:
    """ConfigError for a policy that may ask for more tokens than a decoder's `heads` predict."""
    if policy.config.num_actions > heads:
        raise ConfigError(f"the policy chooses among 1..{policy.config.num_actions} tokens, but the decoder has "
                          f"{heads} heads; use the decoder that it was trained for")


def check_num_candidates(policy: ChunkPolicy, num_candidates: int) -> None:
    """ConfigError for a number of chunks that this policy cannot choose among."""
    if num_candidates < 1:
        raise ConfigError(f"a policy chooses among 1 candidate or more, not {num_candidates}")
    if num_candidates > 1 and policy.chunk_scorer is None:
        raise ConfigError(f"{num_candidates} candidates: this policy cannot choose among them; train one with "
                          "chunk_scorer=…")


def check_size(size: int, model: Decoder) -> None:
    """ConfigError for a chunk of more tokens than the decoder's heads predict."""
    heads = model.config.num_prediction_heads
    if not 1 <= size <= heads:
        raise ConfigError(f"chunk size {size} needs {size} heads, but this decoder predicts 1..{heads} tokens a step")
