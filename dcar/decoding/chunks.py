"""Chunk-wise decoding: the heads propose the next tokens, a schedule says how many are kept.

FAR and CAR-k keep a fixed number (DCAR paper §3.1), `RandomChunk` draws one from a range (the paper's ablation),
DCAR asks the policy (§4.2). Nothing is verified: what is kept is emitted, and the next pass reads the whole chunk.

Not the paper's: schedules after the draw see all candidates before they choose where the chunk ends: policies that
read them (heads/candidates.py), and two rules by hand, `SureLast` and `Confidence`. What is dropped is drawn again,
from another law at the same random number. Such a choice favours some tokens over others, which is its purpose: the law
of what is spoken is not the heads'.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from dcar.decoding.loop import Draft, Kept, Session
from dcar.errors import ConfigError
from dcar.sampling import sample
from heads.candidates import candidate_features
from heads.policy import ChunkPolicy


class ChunkSchedule(Protocol):
    """Decides the size of the next chunk of every row."""

    name: str
    candidates: int  # how many it sees before it decides; 0 = it decides before the draw

    def begin(self, session: Session) -> None: ...

    def choose(self, session: Session, hidden: Tensor, counts: Tensor,
               candidates: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Chunk sizes [B] in 1..K and, from a policy, their log-probabilities [B]. candidates [B, n, 3]: what
        `candidate_features` says of the tokens drawn."""

    def select(self, rows: Tensor) -> None: ...


class ChunkMethod:
    """Emit the tokens of heads 1..a for the size a that the schedule gives; heads sample independently given h."""

    def __init__(self, schedule: ChunkSchedule):
        self.schedule = schedule
        self.name = schedule.name

    def begin(self, session: Session) -> None:
        self.schedule.begin(session)

    def propose(self, session: Session) -> Draft | None:
        return None

    def keep(self, session: Session, hidden: Tensor, counts: Tensor, draft: Draft | None) -> Kept:
        candidates = None
        if seen := self.schedule.candidates:
            logits = session.model.heads(session.last_hidden, seen)
            tokens, _ = draw_chunk(session, logits)
            candidates = candidate_features(logits, tokens)
        sizes, log_probs = self.schedule.choose(session, hidden, counts, candidates)
        widest = int(sizes.max())
        if candidates is None:  # only the heads that are kept are evaluated
            tokens, _ = draw_chunk(session, session.model.heads(session.last_hidden, widest))
        return Kept(tokens[:, :widest], sizes, actions=sizes, log_probs=log_probs, candidates=candidates)

    def select(self, rows: Tensor) -> None:
        self.schedule.select(rows)


def draw_chunk(session: Session, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the next tokens [B, k] from the heads' logits [B, k, V + 1]; also the laws [B, k, V + 1] they came from."""
    if not session.sampling.repetition_window:
        law, position = head_laws(session, logits)
        return sample(law, session.uniform("token", position)), law
    position = session.generated[:, None] + torch.arange(logits.shape[1], device=logits.device)
    u = session.uniform("token", position)
    tokens, laws = position[:, :0], []
    for j in range(logits.shape[1]):  # what is a repetition depends on the tokens before in the same chunk
        history = session.histories(tokens)
        assert history is not None
        laws.append(session.law(logits[:, j], position[:, j], history[:, -1]))
        tokens = torch.cat((tokens, sample(laws[-1], u[:, j])[:, None]), dim=1)
    return tokens, torch.stack(laws, dim=1)


class FixedChunk:
    """Always k tokens: CAR-k; k = 1 is next-token decoding (on a model trained with one head, FAR)."""

    candidates = 0

    def __init__(self, size: int, name: str | None = None):
        self.size = size
        self.name = name or f"car-{size}"

    def begin(self, session: Session) -> None:
        check_size(self.size, session)
        self._sizes = torch.full_like(session.rows, self.size)

    def choose(self, session: Session, hidden: Tensor, counts: Tensor,
               candidates: Tensor | None) -> tuple[Tensor, None]:
        return self._sizes, None

    def select(self, rows: Tensor) -> None:
        self._sizes = self._sizes[rows]


class _AmongSizes:
    """A schedule that chooses among certain sizes and keeps nothing of a row."""

    def __init__(self, sizes: Sequence[int], name: str):
        self.sizes, self.name = tuple(sizes), name

    def begin(self, session: Session) -> None:
        for size in self.sizes:
            check_size(size, session)
        self._table = torch.tensor(self.sizes, device=session.rows.device)

    def select(self, rows: Tensor) -> None:
        pass


class RandomChunk(_AmongSizes):
    """A size drawn uniformly from a list at every step: what a policy must beat. A size that stands there twice is
    drawn twice as often, so that the shares can be those of a policy."""

    candidates = 0

    def __init__(self, sizes: Sequence[int], name: str | None = None):
        super().__init__(sizes, name or f"random-{'-'.join(map(str, sizes))}")

    def choose(self, session: Session, hidden: Tensor, counts: Tensor,
               candidates: Tensor | None) -> tuple[Tensor, None]:
        u = session.uniform("chunk", session.generated)
        return self._table[(u * len(self.sizes)).long()], None


class _Ruled(_AmongSizes):
    """After the draw, by a rule."""

    def __init__(self, sizes: Sequence[int], name: str):
        if not sizes:
            raise ConfigError("a schedule by rule needs the sizes that it chooses among")
        super().__init__(sorted(set(sizes)), name)
        self.candidates = max(sizes)


class SureLast(_Ruled):
    """End the chunk on the likeliest of the tokens drawn: argmax over the sizes a of log p_a(x_a). By hand, not a
    paper's; what a policy after the draw must beat."""

    def __init__(self, sizes: Sequence[int], name: str | None = None):
        super().__init__(sizes, name or f"sure-last-{'-'.join(map(str, sizes))}")

    def choose(self, session: Session, hidden: Tensor, counts: Tensor,
               candidates: Tensor | None) -> tuple[Tensor, None]:
        assert candidates is not None
        return self._table[candidates[:, self._table - 1, 0].argmax(-1)], None


class Confidence(_Ruled):
    """Keep while the heads are sure: the longest of the sizes whose summed log-probability of the best tokens,
    sum_{j <= a} max log p_j, is at least -`nats`; the shortest where none is. By hand, not a paper's."""

    def __init__(self, sizes: Sequence[int], nats: float, name: str | None = None):
        super().__init__(sizes, name or f"confidence-{nats:g}")
        if not nats > 0:
            raise ConfigError(f"confidence is given in nats above 0, not {nats}")
        self.nats = nats

    def choose(self, session: Session, hidden: Tensor, counts: Tensor,
               candidates: Tensor | None) -> tuple[Tensor, None]:
        assert candidates is not None
        sums = candidates[..., 1].cumsum(-1)[:, self._table - 1]  # it only falls
        return self._table[((sums >= -self.nats).sum(-1) - 1).clamp(min=0)], None


class PolicyChunk:
    """The learned policy of DCAR: argmax ("greedy") or drawn ("sample").

    `forced` gives a fixed size to some members of a group (utterance id -> a size for every member, 0 = ask the
    policy), as the chase half of DCPO needs; their log-probabilities under the policy are recorded all the same.
    Utterances that it does not name follow the policy. `dial` turns a trained policy to longer (above 0) or shorter
    chunks: nats added to the score of a size for each of its tokens.
    """

    def __init__(self, policy: ChunkPolicy, mode: Literal["greedy", "sample"] = "greedy", name: str | None = None,
                 forced: Mapping[str, Sequence[int]] | None = None, dial: float = 0.0):
        if mode not in ("greedy", "sample"):
            raise ConfigError(f"policy mode must be 'greedy' or 'sample', not '{mode}'")
        if not math.isfinite(dial):
            raise ConfigError(f"the dial of a policy is a finite number, not {dial}")
        self.policy, self.mode, self.forced, self.dial = policy, mode, forced, dial
        self.candidates = policy.config.reach if policy.config.after_draw else 0
        self.name = name or ("dcar" if mode == "greedy" else "dcar-sampled")

    def begin(self, session: Session) -> None:
        check_policy(self.policy, session.model.config.num_prediction_heads)
        hidden = session.last_hidden
        self._reader = session.model.policy_reader(self.policy, hidden, session.cache.capacity)
        self._forced: Tensor | None = None
        if self.forced is not None:
            rows = zip(session.prompts, session.members, strict=True)
            table = [self.forced_size(prompt.utterance_id, member) for prompt, member in rows]
            for size in set(table) - {0}:
                check_size(size, session)
            self._forced = torch.tensor(table, device=hidden.device)

    def forced_size(self, utterance_id: str, member: int) -> int:
        """The size that a member of a group must take, 0 where it may ask the policy."""
        sizes = self.forced.get(utterance_id) if self.forced is not None else None
        if sizes is None:
            return 0
        if member >= len(sizes):
            raise ConfigError(f"{utterance_id}: {len(sizes)} forced sizes for a larger group; give one per member")
        return sizes[member]

    def choose(self, session: Session, hidden: Tensor, counts: Tensor,
               candidates: Tensor | None) -> tuple[Tensor, Tensor]:
        started = time.perf_counter()
        log_law = dialled(self._reader.law(self._reader.read(hidden, counts), candidates), self.dial)  # [B, K]
        session.check(log_law.exp())
        draws = None if self.mode == "greedy" else session.uniform("policy", session.generated)
        sizes, log_probs = choose_size(log_law, draws, self._forced)
        session.policy_seconds += time.perf_counter() - started
        return sizes, log_probs

    def select(self, rows: Tensor) -> None:
        self._reader.select(rows)
        if self._forced is not None:
            self._forced = self._forced[rows]


def dialled(log_law: Tensor, dial: float) -> Tensor:
    """The law [B, K] with `dial` nats added for each token of a size: the same policy, faster or more careful."""
    if not dial:
        return log_law
    return (log_law + dial * torch.arange(1, log_law.shape[-1] + 1, device=log_law.device)).log_softmax(-1)


def choose_size(log_law: Tensor, draws: Tensor | None, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sizes [B] in 1..K and their log-probabilities [B]: those that are `forced` [B] (0 = none), else drawn from
    log_law [B, K] at draws [B], or the likeliest without draws."""
    index = log_law.argmax(-1) if draws is None else sample(log_law.exp(), draws)
    if forced is not None:
        index = torch.where(forced > 0, forced - 1, index)
    return index + 1, log_law.gather(-1, index[:, None])[:, 0]


def head_laws(session: Session, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Warped laws of the next k tokens from the heads' logits [B, k, V + 1], and the tokens' positions [B, k]."""
    position = session.generated[:, None] + torch.arange(logits.shape[1], device=logits.device)
    return session.law(logits, position), position


def check_policy(policy: ChunkPolicy, heads: int) -> None:
    """ConfigError for a policy that may ask for more tokens than a decoder's `heads` predict."""
    if policy.config.num_actions > heads:
        raise ConfigError(f"the policy chooses among 1..{policy.config.num_actions} tokens, but the decoder has "
                          f"{heads} heads; use the decoder that it was trained for")


def check_size(size: int, session: Session) -> None:
    heads = session.model.config.num_prediction_heads
    if not 1 <= size <= heads:
        raise ConfigError(f"chunk size {size} needs {size} heads, but this decoder predicts 1..{heads} tokens a step")
