"""Oracle: every decoding method implemented again, slowly and plainly, to compare
`dcar.decoding.decode` with.

It shares no code with `dcar.decoding`, `dcar.sampling` and `eval.verifiers`. One utterance is
decoded at a time, in float64 and Python lists; the decoder is its training forward, without a
cache, recomputed at every step. A rule is a function of an `Utterance` that returns a `Round`: the
result of one pass of the decoder.

Decisions that rounding could change are measured: `Spoken.margin` is the smallest distance between
a number and the bound that it was compared with. If it is below the rounding of what is tested,
both results are right.
"""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_decoders import states
from torch import Tensor

Probs = list[float]

# --- random numbers -------------------------------------------------------------------------------

STREAMS = {
    "token": 1,
    "accept": 2,
    "residual": 3,
    "group": 4,
    "policy": 5,
    "tau": 6,
    "chunk": 7,
    "shuffle": 8,
}
ACTIONS = ("policy", "chunk", "shuffle")  # streams that members of a group never share
BITS = 2**64 - 1


def mix(x: int) -> int:
    """Apply the finaliser of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & BITS
    return x ^ x >> 31


def uniform(key: int, stream: str, position: int, draw: int = 0) -> float:
    """Return the number in [0, 1) at an address."""
    for step in (STREAMS[stream], position + 1, draw + 1):
        key = mix(key + step * 0x9E3779B97F4A7C15 & BITS)
    return (key >> 11) * 2.0**-53


def key_of(seed: int, utterance_id: str, member: int = 0) -> int:
    """Return 64 bits for a member of an utterance's group. Member 0 is the utterance itself,
    unless its id looks like a member's."""
    _, mark, number = utterance_id.rpartition("#")
    looks = bool(mark) and number != "" and set(number) <= set("0123456789")
    name = f"{utterance_id}#{member}" if member or looks else utterance_id
    return int.from_bytes(
        hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little"
    )


# --- one utterance --------------------------------------------------------------------------------


@dataclass
class Round:
    """Result of one pass of the decoder: tokens to be emitted, up to the first end of speech or
    the limit."""

    tokens: list[int]
    action: int | None = None  # size of the chunk
    log_prob: float | None = None  # of the action
    chosen: int | None = None  # index of the candidate
    features: Tensor | None = None  # [N, n, F] features of the candidates
    proposed: int = 0  # drafted tokens that were verified
    accepted: int = 0
    draft_passes: int = 0


@dataclass
class Spoken:
    """Decoded utterance: the fields of `DecodeResult` with the same names, and the margin of the
    closest decision."""

    tokens: list[int]
    truncated: bool
    emitted: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    decision_positions: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    passes: int = 0
    draft_passes: int = 0
    prompt_length: int = 0
    hidden: Tensor | None = None  # [S, D]
    features: Tensor | None = None  # [decisions, N, n, F]
    margin: float = math.inf


class Utterance:
    """Utterance that is being decoded, with the functions that a rule needs."""

    def __init__(
        self,
        model: Any,
        prompt: Any,
        sampling: Any,
        seed: int,
        member: int = 0,
        common_random_numbers: bool = False,
    ):
        self.model, self.prompt, self.sampling = model, prompt, sampling
        self.seed, self.member = seed, member
        self.eos = model.config.eos
        self.action_key = key_of(seed, prompt.utterance_id, member)
        self.token_key = (
            key_of(seed, prompt.utterance_id) if common_random_numbers else self.action_key
        )
        self.limit = min(
            sampling.max_tokens, math.ceil(sampling.max_tokens_per_text_unit * len(prompt.text_ids))
        )
        self.tokens: list[int] = []
        self.rounds = 0
        self.sizes: list[int] = []  # plan that a rule makes at the beginning
        self.margin = math.inf

    def states(self, behind: Sequence[int] = ()) -> Tensor:
        """Return the hidden states [S, D] of the prompt, all tokens, and the tokens `behind`
        after them."""
        return states(self.model, self.prompt, [*self.tokens, *behind])

    def number(self, stream: str, position: int | None = None, draw: int = 0) -> float:
        """Return the random number of a position, by default that of the next token."""
        key = self.action_key if stream in ACTIONS else self.token_key
        return uniform(key, stream, len(self.tokens) if position is None else position, draw)

    def close(self, a: float, b: float) -> None:
        """Update the margin with the distance of two compared numbers. Equal numbers are no
        accident: the lowest id wins there."""
        if a != b:
            self.margin = min(self.margin, abs(a - b))

    def below(self, number: float, bound: float) -> bool:
        self.close(number, bound)
        return number < bound

    def draw(self, weights: Probs, number: float) -> int:
        """Return the first id whose cumulative weight is above number * total; never one of
        weight 0 if any has weight."""
        possible = [token for token, weight in enumerate(weights) if weight] or [0]
        at, cumulative, drawn = number * math.fsum(weights), 0.0, possible[-1]
        for token in reversed(possible[:-1]):
            cumulative = math.fsum(weights[: token + 1])
            self.close(cumulative, at)
            drawn = token if cumulative > at else drawn
        return drawn

    def best(self, values: Sequence[float], labels: Sequence[Any] | None = None) -> int:
        """Return the index of the largest value, the first of equals; entries of equal labels
        are the same choice."""
        labels = range(len(values)) if labels is None else labels
        index = max(range(len(values)), key=lambda i: values[i])
        pairs = zip(values, labels, strict=True)
        others = [value for value, label in pairs if label != labels[index]]
        self.close(values[index], max(others, default=-math.inf))
        return index

    def likeliest(self, values: Sequence[float], count: int, ordered: bool = False) -> list[int]:
        """Return the `count` ids of the largest values, the lowest first among equals.
        `ordered`: their order matters."""
        order = sorted(range(len(values)), key=lambda i: -values[i])
        for a, b in itertools.pairwise(order[0 if ordered else count - 1 : count + 1]):
            self.close(values[a], values[b])
        return order[:count]

    def logits(self, state: Tensor, head: int, position: int) -> list[float]:
        """Return the logits of one head; the end of speech is impossible before min_tokens."""
        logits = self.model.heads.logits(state, head)[..., -1, :].double().tolist()
        if position < self.sampling.min_tokens:
            logits[self.eos] = -math.inf
        return logits

    def probs(self, state: Tensor, head: int, before: Sequence[int]) -> Probs:
        """Return the distribution of the token after `before`, all tokens of the utterance so
        far."""
        how, logits = self.sampling, self.logits(state, head, len(before))
        if how.temperature == 0:
            best = self.best(logits)
            return [float(token == best) for token in range(len(logits))]
        logits = [x / how.temperature for x in logits]
        if how.repetition_window:
            return self._repetition_aware(softmax(logits), before[-how.repetition_window :])
        if 0 < how.top_k < len(logits):
            kept = self.likeliest(logits, how.top_k)
            logits = [x if token in kept else -math.inf for token, x in enumerate(logits)]
        return self._nucleus(softmax(logits), len(logits))

    def _nucleus(self, probs: Probs, most: int) -> Probs:
        """Keep the likeliest tokens, at most `most`, whose predecessors hold less than top_p."""
        count, mass, top_p = 0, 0.0, self.sampling.top_p
        for p in sorted(probs, reverse=True)[:most]:
            if mass >= top_p:
                break
            count, mass = count + 1, mass + p
            self.close(mass, top_p if top_p < 1 else math.inf)
        kept = self.likeliest(probs, count)
        return normalised([p if token in kept else 0.0 for token, p in enumerate(probs)])

    def _repetition_aware(self, full: Probs, window: Sequence[int]) -> Probs:
        """Return the distribution of repetition-aware sampling: draw from the nucleus; a
        repeated token is drawn again from all (without itself if masked)."""
        how, count, size = self.sampling, Counter(window), len(full)
        nucleus = self._nucleus(full, how.top_k or size)
        out = [0.0] * size
        for u, p in enumerate(nucleus):
            if not p:
                continue
            if count[u] < how.repetition_window * how.repetition_share - 1e-9:
                out[u] += p
                continue
            again = list(full)
            if how.repetition_mask:
                again[u] = 0.0
            if not any(again):
                again[u] = 1.0
            for v, f in enumerate(normalised(again)):
                out[v] += p * f
        return out

    def chunk(
        self, state: Tensor, heads: Sequence[int], turn: float = 0.0
    ) -> tuple[list[int], list[Probs]]:
        """Return the next tokens, each drawn from its own head of one state, and their
        distributions. `turn`: share of the circle by which the random numbers are rotated."""
        tokens: list[int] = []
        all_probs: list[Probs] = []
        for head in heads:
            before = self.tokens + tokens
            all_probs.append(self.probs(state, head, before))
            tokens.append(self.draw(all_probs[-1], (self.number("token", len(before)) + turn) % 1))
        return tokens, all_probs


def softmax(logits: Sequence[float]) -> Probs:
    return torch.tensor(logits, dtype=torch.float64).softmax(-1).tolist()


def normalised(weights: Probs) -> Probs:
    total = math.fsum(weights)
    return [w / total for w in weights]


Rule = Callable[[Utterance], Round]


@torch.inference_mode()
def speak(
    model: Any,
    prompt: Any,
    rule: Rule,
    sampling: Any,
    seed: int = 0,
    member: int = 0,
    common_random_numbers: bool = False,
) -> Spoken:
    """Apply the rule until the end of speech or the length limit."""
    u = Utterance(model, prompt, sampling, seed, member, common_random_numbers)
    out = Spoken([], False)
    out.prompt_length = len(prompt.prompt_ids) + bool(model.config.bos)
    features: list[Tensor] = []
    while True:
        made = rule(u)
        u.rounds += 1
        within = made.tokens[: u.limit - len(u.tokens)]
        ended = u.eos in within
        kept = within[: within.index(u.eos)] if ended else within
        out.decision_positions.append(out.prompt_length + len(u.tokens) - 1)
        out.emitted.append(len(kept))
        for records, value in (
            (out.sizes, made.action),
            (out.log_probs, made.log_prob),
            (out.chosen, made.chosen),
            (features, made.features),
        ):
            if value is not None:
                records.append(value)
        if made.proposed:
            out.proposed.append(made.proposed)
            out.accepted.append(made.accepted)
        out.draft_passes += made.draft_passes
        u.tokens += kept
        if ended or len(u.tokens) >= u.limit:
            break
    out.tokens, out.truncated = u.tokens, not ended
    out.passes, out.margin = u.rounds, u.margin
    out.hidden = u.states()[: out.decision_positions[-1] + 1]
    out.features = torch.stack(features) if features else None
    return out


# --- chunks ---------------------------------------------------------------------------------------


def heads_up_to(size: int) -> range:
    return range(1, size + 1)


def fixed(size: int) -> Rule:
    """Return the rule of FAR and CAR-k."""

    def rule(u: Utterance) -> Round:
        return Round(u.chunk(u.states()[-1], heads_up_to(size))[0], size)

    return rule


def random_size(sizes: Sequence[int]) -> Rule:
    def rule(u: Utterance) -> Round:
        return fixed(sizes[int(u.number("chunk") * len(sizes))])(u)

    return rule


def end_on_confident(sizes: Sequence[int]) -> Rule:
    """Return the rule by which the chunk ends on the likeliest of its tokens."""

    def rule(u: Utterance) -> Round:
        (chunk,), seen = candidates_of(u, u.states()[-1], max(sizes))
        ends = sorted(set(sizes))
        size = ends[u.best([float(seen[0, a - 1, 0]) for a in ends])]
        return Round(chunk[:size], size, features=seen)

    return rule


def best_of(size: int, several: int, scorer: Any) -> Rule:
    """Return the rule that keeps, of several candidates, the one with the best score."""

    def rule(u: Utterance) -> Round:
        chunks, seen = candidates_of(u, u.states()[-1], size, several, scorer)
        chosen = u.best(seen[..., 3].sum(-1).tolist(), chunks)
        return Round(chunks[chosen], size, chosen=chosen, features=seen)

    return rule


def entropy(threshold: float) -> Rule:
    """Return the rule by which the chunk ends before the first additional head whose entropy is
    above the threshold."""

    def rule(u: Utterance) -> Round:
        (chunk,), seen = candidates_of(u, u.states()[-1], u.model.config.num_prediction_heads)
        size = 1
        while size < len(chunk) and not u.below(threshold, float(seen[0, size, 2])):
            size += 1
        return Round(chunk[:size], size, features=seen)

    return rule


def candidates_of(
    u: Utterance, state: Tensor, size: int, several: int = 1, scorer: Any = None
) -> tuple[list[list[int]], Tensor]:
    """Return candidates drawn side by side, and features of each of their tokens [N, n, F]:
    log-probability, that of the likeliest token, and entropy, all at temperature 1, and the
    scorer's score if there is one."""
    chunks = [u.chunk(state, heads_up_to(size), n / several)[0] for n in range(several)]
    seen = []
    for head in heads_up_to(size):
        log_probs = u.model.heads.logits(state, head)[..., -1, :].double().log_softmax(-1)
        impurity = float(-(log_probs.exp() * log_probs).sum())
        seen.append(
            [
                [max(float(log_probs[chunk[head - 1]]), -8.0), float(log_probs.max()), impurity]
                for chunk in chunks
            ]
        )
    features = torch.tensor(seen, dtype=torch.float64).transpose(0, 1)
    if scorer is not None:
        added = scorer(state.expand(several, -1), torch.tensor(chunks), features)
        features = torch.cat((features, added.double()[..., None]), -1)
    return chunks, features


def policy(
    chooser: Any,
    mode: str = "greedy",
    dial: float = 0.0,
    several: int = 1,
    forced: dict[str, Sequence[int]] | None = None,
) -> Rule:
    """Return the rule of DCAR: the policy chooses a size, and after the draw a candidate
    together with it."""

    def rule(u: Utterance) -> Round:
        size = u.sizes[u.rounds % len(u.sizes)] if u.sizes else 0
        if forced and u.prompt.utterance_id in forced:
            size = forced[u.prompt.utterance_id][u.member]
        hidden, chunks, seen = u.states(), [], None
        if chooser.after_draw:
            reach = max(chooser.config.sizes, default=chooser.config.num_actions)
            chunks, seen = candidates_of(u, hidden[-1], reach, several, chooser.chunk_scorer)
        last = torch.tensor([[len(hidden) - 1]])
        given = (hidden[None], last) if seen is None else (seen[None, None],)
        log_probs = chooser(*given).double().flatten()
        ends = [(n, a) for n in range(several) for a in heads_up_to(chooser.config.num_actions)]
        log_probs = (log_probs + dial * torch.tensor([a for _, a in ends])).log_softmax(-1)
        index = choose(u, log_probs.tolist(), ends, chunks, mode, size)
        n, size = ends[index]
        tokens = chunks[n][:size] if chunks else u.chunk(hidden[-1], heads_up_to(size))[0]
        return Round(tokens, size, float(log_probs[index]), n if several > 1 else None, seen)

    return rule


def choose(
    u: Utterance,
    log_probs: list[float],
    ends: list[tuple[int, int]],
    chunks: list[list[int]],
    mode: str,
    forced: int,
) -> int:
    """Return the index of the likeliest end, or of one that is drawn; a forced size leaves the
    choice of the candidate open."""
    open_to = [
        lp if a == forced or not forced else -math.inf
        for lp, (_, a) in zip(log_probs, ends, strict=True)
    ]
    if mode == "greedy":
        return u.best(open_to, [(a, chunks[n] if chunks else None) for n, a in ends])
    return u.draw(softmax(open_to), u.number("policy"))


def shuffled(rule: Rule) -> Rule:
    """Return a rule with the sizes of a policy in random order."""

    def again(u: Utterance) -> Round:
        if not u.sizes:
            first = speak(u.model, u.prompt, rule, u.sampling, u.seed)
            u.margin = min(u.margin, first.margin)
            place = sorted(range(len(first.sizes)), key=lambda i: u.number("shuffle", i))
            u.sizes = [first.sizes[i] for i in place]
        return rule(u)

    return again


# --- drafts and their verification ----------------------------------------------------------------

Draft = Callable[[Utterance, int], tuple[list[int], list[Probs]]]


def draft_of_heads(u: Utterance, count: int) -> tuple[list[int], list[Probs]]:
    """Draft from heads 2, 3, … of the state that the last token was drawn from."""
    return u.chunk(u.states()[-2], range(2, count + 2))


def draft_of_model(draft: Any) -> Draft:
    def propose(u: Utterance, count: int) -> tuple[list[int], list[Probs]]:
        drafting = Utterance(draft, u.prompt, u.sampling, u.seed)
        drafting.token_key, drafting.tokens = u.token_key, list(u.tokens)
        all_probs: list[Probs] = []
        while len(all_probs) < count and drafting.tokens[-1] != u.eos:
            (token,), (probs,) = drafting.chunk(drafting.states()[-1], [1])
            drafting.tokens.append(token)
            all_probs.append(probs)
        u.margin = min(u.margin, drafting.margin)
        return drafting.tokens[len(u.tokens) :], all_probs

    return propose


Accept = Callable[[Utterance, Probs, Probs, int, int], bool]
Replace = Callable[[Utterance, Probs, Probs, int, int], int]


def verify(accept: Accept, replace: Replace, draft: Any = None, length: int = 3) -> Rule:
    """Return the rule that verifies from the left a chain of `length` tokens, drafted by the heads
    or by a draft model.

    accept, replace (utterance, q, p, token, position): q of the target, p of the draft.
    """
    propose = draft_of_heads if draft is None else draft_of_model(draft)

    def rule(u: Utterance) -> Round:
        room = min(length, u.limit - len(u.tokens) - 1) if u.tokens else 0
        drafted, p = propose(u, room) if room else ([], [])
        if u.eos in drafted:
            drafted = drafted[: drafted.index(u.eos) + 1]
        cost = 0 if draft is None else len(drafted) + (not u.tokens)
        hidden = u.states(drafted)[-1 - len(drafted) :]
        q = [u.probs(state, 1, u.tokens + drafted[:i]) for i, state in enumerate(hidden)]
        for i, token in enumerate(drafted):
            position = len(u.tokens) + i
            if not accept(u, q[i], p[i], token, position):
                tokens = [*drafted[:i], replace(u, q[i], p[i], token, position)]
                return Round(tokens, proposed=len(drafted), accepted=i, draft_passes=cost)
        tokens = list(drafted)
        if u.eos not in drafted:
            tokens.append(u.draw(q[-1], u.number("token", len(u.tokens) + len(drafted))))
        return Round(tokens, proposed=len(drafted), accepted=len(drafted), draft_passes=cost)

    return rule


def residual(q: Probs, p: Probs) -> Probs:
    excess = [max(0.0, a - b) for a, b in zip(q, p, strict=True)]
    return excess if any(excess) else q


def draw_residual(u: Utterance, q: Probs, p: Probs, token: int, position: int) -> int:
    return u.draw(residual(q, p), u.number("residual", position))


def tolerant(beta: float = 0.0, eos_strict: bool = True, **how: Any) -> Rule:
    """Return the rule of SSD; beta = 0 is SD."""

    def accept(u: Utterance, q: Probs, p: Probs, token: int, position: int) -> bool:
        extra = 0.0 if token == u.eos and eos_strict else beta
        return u.below(u.number("accept", position), min(1.0, q[token] / p[token]) + extra)

    return verify(accept, draw_residual, **how)


def relaxed(
    plausible: Callable[[Utterance, Probs, int], bool], eos_strict: bool, **how: Any
) -> Rule:
    """Return the rule that accepts plausible tokens; an end of speech is verified as by SD if
    `eos_strict`."""

    def accept(u: Utterance, q: Probs, p: Probs, token: int, position: int) -> bool:
        if token == u.eos and eos_strict:
            return u.below(u.number("accept", position), q[token] / p[token])
        return plausible(u, q, token)

    def replace(u: Utterance, q: Probs, p: Probs, token: int, position: int) -> int:
        strict = token == u.eos and eos_strict
        return u.draw(residual(q, p) if strict else q, u.number("residual", position))

    return verify(accept, replace, **how)


def typical(epsilon: float = 0.09, delta: float = 0.3, eos_strict: bool = True, **how: Any) -> Rule:
    def plausible(u: Utterance, q: Probs, token: int) -> bool:
        impurity = -math.fsum(x * math.log(x) for x in q if x)
        return u.below(min(epsilon, delta * math.exp(-impurity)), q[token])

    return relaxed(plausible, eos_strict, **how)


def top_k_verify(k: int, eos_strict: bool = True, **how: Any) -> Rule:
    def plausible(u: Utterance, q: Probs, token: int) -> bool:
        return q[token] > 0 and token in u.likeliest(q, k)

    return relaxed(plausible, eos_strict, **how)


def groups_of(model: Any, theta: float) -> list[list[int]]:
    """Return the groups of similar codes, in the order of the codes that they are neighbourhoods
    of; the end of speech is alone."""
    codes = model.config.speech_vocab_size
    table = model.speech_embedding.weight[:codes].double()
    unit = table / table.norm(dim=1, keepdim=True)
    similar = (unit @ unit.T > theta) | torch.eye(codes, dtype=torch.bool)
    found: list[list[int]] = []
    for row in similar.tolist():
        ids = [i for i, inside in enumerate(row) if inside]
        if ids not in found:
            found.append(ids)
    return [*found, [codes]]


def coarse(groups: list[list[int]], trials: int = 32, **how: Any) -> Rule:
    """Return the rule of PCG: a group of the token is verified, and if it is refused, one of the
    residual's groups is drawn."""
    mine = [
        [k for k, ids in enumerate(groups) if token in ids] for token in range(groups[-1][0] + 1)
    ]

    def mass(probs: Probs, k: int) -> float:
        return math.fsum(probs[token] / len(mine[token]) for token in groups[k])

    def group(u: Utterance, token: int, number: float) -> int:
        return mine[token][int(number * len(mine[token]))]

    def accept(u: Utterance, q: Probs, p: Probs, token: int, position: int) -> bool:
        k = group(u, token, u.number("group", position))
        return u.below(u.number("accept", position), mass(q, k) / mass(p, k))

    def replace(u: Utterance, q: Probs, p: Probs, token: int, position: int) -> int:
        for trial in range(trials):
            y, k, passes = (u.number("residual", position, 3 * trial + i) for i in range(3))
            found = u.draw(q, y)
            k = group(u, found, k)
            if u.below(passes, 1 - mass(p, k) / mass(q, k)):
                return found
        q_groups, p_groups = ([mass(probs, k) for k in range(len(groups))] for probs in (q, p))
        wanted = normalised(residual(q_groups, p_groups))
        weights = [
            math.fsum(wanted[k] * q[t] / len(mine[t]) / q_groups[k] for k in mine[t] if q_groups[k])
            for t in range(len(q))
        ]
        return u.draw(weights, u.number("residual", position, 3 * trials))

    return verify(accept, replace, **how)


# --- a tree of drafts -----------------------------------------------------------------------------


def vadusa(tau: int, paths: Sequence[tuple[int, ...]]) -> Rule:
    """Return the rule of VADUSA: candidates of the heads, by their ranks, accepted if they are
    among tau samples of the base head."""
    parents = [paths.index(path[:-1]) if path[:-1] else -1 for path in paths]

    def rule(u: Utterance) -> Round:
        if not u.tokens:
            return Round(u.chunk(u.states()[-1], [1])[0])
        before_root = u.states()[-2]
        ranked = [
            u.likeliest(
                u.logits(before_root, depth + 2, len(u.tokens) + depth),
                max(path[-1] for path in paths if len(path) == depth + 1) + 1,
                ordered=True,
            )
            for depth in range(max(map(len, paths)))
        ]
        token_of = {path: ranked[len(path) - 1][path[-1]] for path in paths}
        behind = {
            path: [token_of[path[: i + 1]] for i in range(len(path))] for path in [(), *paths]
        }
        state_at: dict[tuple[int, ...], Tensor] = {}
        # the states of a path include those of its prefixes
        for path in sorted(behind, key=len, reverse=True):
            if path not in state_at:
                read = u.states(behind[path])
                state_at |= {path[:i]: read[i - len(path) - 1] for i in range(len(path) + 1)}
        samples, unended = [], []
        for node, path in enumerate(behind):
            before = u.tokens + behind[path]
            q, position = u.probs(state_at[path], 1, before), len(before)
            numbers = [u.number("tau", position, node * (tau - 1) + j) for j in range(tau - 1)]
            first = u.number("token", position, node if tau > 1 else 0)
            samples.append([u.draw(q, number) for number in (first, *numbers)])
            spare = u.number("tau", position, (1 + len(paths)) * (tau - 1) + node)
            unended.append(u.draw(q[: u.eos], spare) if tau > 1 else 0)
        nodes = accepted_path([token_of[path] for path in paths], samples, parents, u.eos, unended)
        tokens = [token_of[paths[node]] for node in nodes]
        own = samples[nodes[-1] + 1 if nodes else 0][0]
        return Round([*tokens, own], proposed=max(map(len, paths)), accepted=len(nodes))

    return rule


def accepted_path(
    candidates: Sequence[int],
    samples: Sequence[Sequence[int]],
    parents: Sequence[int],
    eos: int,
    unended: Sequence[int],
) -> list[int]:
    """Return the accepted nodes from the root on.

    Each is among the samples at its parent (samples[0] is the root's). Of siblings, the one that
    leads furthest is taken, determined as if nothing ended, then the one of the earliest sample.
    """
    as_if = [[u, *s[1:]] if s[0] == eos else s for s, u in zip(samples, unended, strict=True)]

    def hits(node: int, samples: Sequence[Sequence[int]]) -> list[int]:
        drawn = samples[node + 1]  # node -1 is the root
        if node >= 0 and candidates[node] == eos:
            return []
        found = [
            child
            for child, parent in enumerate(parents)
            if parent == node
            and candidates[child] in drawn
            and (candidates[child] == eos) == (drawn[0] == eos)
        ]
        return sorted(found, key=lambda child: list(drawn).index(candidates[child]))

    def reach(node: int) -> int:
        return max((1 + reach(child) for child in hits(node, as_if)), default=0)

    def walk(node: int) -> list[int]:
        options = hits(node, samples)
        if not options:
            return []
        chosen = max(options, key=reach)  # the first of the longest
        return [chosen, *walk(chosen)]

    return walk(-1)


# --- one path through the heads' candidates -------------------------------------------------------


def transitions(utterances: Sequence[Sequence[int]], codes: int, alpha: float) -> list[list[float]]:
    """Return Q(j | i) among codes and the end of speech."""
    pairs = Counter(
        itertools.chain.from_iterable(itertools.pairwise([*line, codes]) for line in utterances)
    )
    total = Counter(i for i, _ in pairs.elements())
    table = [
        [(pairs[i, j] + alpha) / (total[i] + alpha * (codes + 1)) for j in range(codes + 1)]
        for i in range(codes)
    ]
    return [*table, [float(j == codes) for j in range(codes + 1)]]


def best_path(
    probs: Sequence[Probs], table: Sequence[Sequence[float]], proposed: Sequence[Sequence[int]]
) -> tuple[list[int], float, float]:
    """Find the best path over the union of the heads' proposals by trying all; return the path,
    its weight, and that of the second best."""
    end, ranked = len(table) - 1, []
    union = sorted(set(itertools.chain.from_iterable(proposed)))
    for path in itertools.product(union, repeat=len(probs)):
        weight = probs[0][path[0]]
        for t in range(1, len(path)):
            # after the end only the end can follow, at its largest probability in any head so far
            if end in path[:t]:
                weight *= max(row[end] for row in probs[: t + 1]) * (path[t] == end)
            else:
                weight *= probs[t][path[t]] * table[path[t - 1]][path[t]]
        ranked.append((weight, path))
    (weight, path), (second, _) = ([*sorted(ranked, key=lambda found: -found[0]), (0.0, ())])[:2]
    return list(path), weight, second


def viterbi(heads: int, k: int, table: Sequence[Sequence[float]]) -> Rule:
    def rule(u: Utterance) -> Round:
        state = u.states()[-1]
        probs = [
            u.probs(state, head, [0] * (len(u.tokens) + head - 1)) for head in heads_up_to(heads)
        ]
        path, weight, second = best_path(probs, table, [u.likeliest(row, k) for row in probs])
        u.close(second / weight, 1)
        return Round(path, heads)

    return rule
