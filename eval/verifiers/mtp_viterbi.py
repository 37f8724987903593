"""MTP with Viterbi (arXiv 2410.13839): one path through the candidates of n heads, weighed by token transitions.

Head t proposes its k best ids; C is the union over the n heads. With S_t(j) the law of head t and Q(j | i) the
transitions of the training tokens,

    delta_1(j) = S_1(j) [Q(j | previous token)],    delta_t(j) = S_t(j) max_i delta_{t-1}(i) Q(j | i),

and the best path is emitted whole: n tokens a pass, nothing is verified. S is the warped law that every method here
samples from (at temperature 0 it is one-hot, and the path is each head's best id).

Modes: "argmax", the paper's; "ffbs" draws a path from the law proportional to prod_t S_t Q (forward filtering, backward
sampling); "sampled_candidates" lets each head draw k ids without replacement, then takes the best path.

A path is cut at its first end of speech e. Nothing but e follows it, and there S_t(e) counts as at least what an
earlier head gave e: speech that has ended by one position has ended by the next. So an end is never made impossible by
a later head whose law was cut by top-k or temperature.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dcar.decoding import Draft, Kept, Method, Session
from dcar.decoding.chunks import check_size, head_laws
from dcar.errors import ConfigError, DataError
from dcar.model.draft import AnyDecoder
from dcar.sampling import likeliest, sample, uniform, utterance_keys
from eval.verifiers.statistics import VerifierStatistics, needed
from eval.verifiers.transitions import Transitions

CANDIDATES = 3  # k; the value of the paper's main table
ALPHA = 0.01  # smoothing of the transitions

Mode = Literal["argmax", "ffbs", "sampled_candidates"]
MODES = ("argmax", "ffbs", "sampled_candidates")


def best_path(emission: Tensor, transition: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Viterbi: delta_t(j) = log S_t(j) + max_i [delta_{t-1}(i) + log Q(j | i)], then backtracking.

    emission [B, n, m] log S, transition [B, m, m] log Q (from row to column), start [B, m] log Q behind the previous
    token. Returns states [B, n] and the path's score [B]; among equals the lowest state wins.
    """
    delta = emission[:, 0] if start is None else emission[:, 0] + start
    origins: list[Tensor] = []
    for t in range(1, emission.shape[1]):
        scores = delta[:, :, None] + transition
        origins.append(scores.argmax(1))
        delta = emission[:, t] + scores.amax(1)
    states = [delta.argmax(-1)]
    for origin in reversed(origins):
        states.append(origin.gather(1, states[-1][:, None])[:, 0])
    return torch.stack(states[::-1], dim=1), delta.amax(-1)


def sampled_path(emission: Tensor, transition: Tensor, u: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A path from the law proportional to prod_t S_t(x_t) Q(x_t | x_{t-1}): forward filtering, backward sampling.

    Arguments as in `best_path`; u [B, n] uniform numbers, one a position. Returns states [B, n] and the log of the
    normaliser [B].
    """
    forward = [emission[:, 0] if start is None else emission[:, 0] + start]
    for t in range(1, emission.shape[1]):
        forward.append(emission[:, t] + torch.logsumexp(forward[-1][:, :, None] + transition, dim=1))
    total = torch.logsumexp(forward[-1], dim=-1)
    states: list[Tensor] = []
    for t in reversed(range(len(forward))):
        weight = forward[t]
        if states:
            weight = weight + transition.gather(2, states[-1][:, None, None].expand(-1, weight.shape[1], 1))[:, :, 0]
        weight = weight - weight.amax(-1, keepdim=True)
        states.append(sample(weight.exp(), u[:, t]))
    return torch.stack(states[::-1], dim=1), total


def candidate_ids(proposed: Tensor) -> tuple[Tensor, Tensor]:
    """The union of the heads' candidates: proposed [B, n, k] -> ids [B, n k] ascending, and which are repetitions."""
    ids = proposed.flatten(1).sort(dim=-1).values
    return ids, F.pad(ids[:, 1:] == ids[:, :-1], (1, 0))


def choose(law: Tensor, proposed: Tensor, transitions: Transitions, previous: Tensor | None = None,
           u: Tensor | None = None, own: bool = False) -> tuple[Tensor, Tensor]:
    """Tokens of the best path (with u [B, n] of a sampled one) through the candidates, [B, n], and its score [B].

    law [B, n, V + 1]; proposed [B, n, k] ids; previous [B] the token before, if it shall count. own: a head's law is
    confined to its own candidates. DataError where no path has positive probability.
    """
    ended = law[:, :, transitions.end].cummax(-1).values.double().log()  # [B, n] of the state behind an end
    if own:
        law = torch.zeros_like(law).scatter(-1, proposed, law.gather(-1, proposed))
    ids, repeated = candidate_ids(proposed)
    emission = law.gather(2, ids[:, None].expand(-1, law.shape[1], -1)).double().log()
    emission = emission.masked_fill(repeated[:, None], -torch.inf)
    transition = transitions.log_prob(ids, ids).double()
    start = None if previous is None else transitions.log_prob(previous[:, None], ids)[:, 0].double()
    ids, emission, transition, start = _with_ended(ids, emission, transition, start, ended, transitions.end)
    if u is None:
        states, score = best_path(emission, transition, start)
    else:
        states, score = sampled_path(emission, transition, u, start)
    if bool((score == -torch.inf).any()):
        raise DataError("no path through the heads' candidates has positive probability: smooth the transitions "
                        "(alpha > 0) or take more candidates")
    return ids.gather(1, states), score


def _with_ended(ids: Tensor, emission: Tensor, transition: Tensor, start: Tensor | None, ended: Tensor,
                end: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The lattice with one more state, "has ended": it follows the end and itself, and nothing else follows the end."""
    never = -torch.inf
    is_end = ids == end  # [B, m]
    into = torch.where(is_end, 0.0, never).to(transition.dtype)[:, :, None]
    transition = torch.cat((transition.masked_fill(is_end[:, :, None], never), into), dim=2)
    stay = F.pad(transition.new_zeros(len(ids), 1, 1), (ids.shape[1], 0), value=never)
    transition = torch.cat((transition, stay), dim=1)
    ended = F.pad(ended[:, 1:], (1, 0), value=never)  # no path begins there
    emission = torch.cat((emission, ended[:, :, None]), dim=2)
    start = None if start is None else F.pad(start, (0, 1))
    return F.pad(ids, (0, 1), value=end), emission, transition, start


class MTPViterbi:
    """Decoding method: n tokens a pass, chosen together by `choose`."""

    def __init__(self, heads: int, transitions: Transitions, k: int = CANDIDATES, mode: Mode = "argmax",
                 use_previous: bool = False, own: bool = False, name: str | None = None):
        if mode not in MODES:
            raise ConfigError(f"Viterbi over the heads' candidates: the mode is one of {', '.join(MODES)}, "
                              f"not '{mode}'")
        if k < 1:
            raise ConfigError(f"Viterbi over the heads' candidates needs at least one from each head, not {k}")
        self.heads, self.transitions, self.k, self.mode = heads, transitions, k, mode
        self.use_previous, self.own = use_previous, own
        self.name = name or f"mtp-viterbi-{heads}-{k}"

    def begin(self, session: Session) -> None:
        config = session.model.config
        check_size(self.heads, session)
        check_tables(self.k, self.transitions, config.output_size)
        self.transitions.to(session.rows.device)
        self._sizes = torch.full_like(session.rows, self.heads)
        before = [self.transitions.start if config.bos else p.prompt_ids[-1] for p in session.prompts]
        self._previous = torch.tensor(before, device=session.rows.device)

    def propose(self, session: Session) -> Draft | None:
        return None

    def keep(self, session: Session, hidden: Tensor, counts: Tensor, draft: Draft | None) -> Kept:
        law, position = head_laws(session, session.model.heads(session.last_hidden, self.heads))
        u = uniform(session.token_keys, "token", position) if self.mode == "ffbs" else None
        tokens, _ = choose(law, self._candidates(session, law, position), self.transitions,
                           self._previous if self.use_previous else None, u, self.own)
        ended = tokens[:, -1] == session.model.config.eos  # this row is finished and idles from now on
        self._previous = torch.where(ended, self._previous, tokens[:, -1])
        return Kept(tokens, self._sizes, actions=self._sizes)

    def _candidates(self, session: Session, law: Tensor, position: Tensor) -> Tensor:
        """k ids of each head [B, n, k]: the best, or drawn without replacement (the largest log S + Gumbel noise)."""
        if self.mode != "sampled_candidates":
            return likeliest(law, self.k)[1]
        vocabulary = law.shape[-1]
        ids = torch.arange(vocabulary, device=law.device)
        address = position.repeat_interleave(vocabulary, dim=1)  # a draw for every id at every position
        u = uniform(session.token_keys, "token", address, 1 + ids.repeat(position.shape[1])).view(law.shape)
        gumbel = -(-u.clamp(min=1e-300).log()).log()
        return likeliest(law.double().log() + gumbel, self.k)[1]

    def select(self, rows: Tensor) -> None:
        self._sizes, self._previous = self._sizes[rows], self._previous[rows]


def check_tables(k: int, transitions: Transitions, vocabulary: int) -> None:
    """ConfigError where candidates or transitions do not fit the decoder's vocabulary (codes and end of speech)."""
    if k > vocabulary:
        raise ConfigError(f"{k} candidates of each head, but the vocabulary has {vocabulary} tokens; ask for fewer")
    if transitions.states != vocabulary + 1:
        raise ConfigError(f"transitions among {transitions.states - 2} codes for a decoder with {vocabulary - 1}; "
                          "count them in speech of the decoder's own tokenizer")


def from_name(name: str, rest: str, decoder: AnyDecoder,
              statistics: VerifierStatistics | None) -> tuple[Callable[[], Method], dict[str, str]]:
    """`mtp-viterbi-HEADS[-K][-MODE][-prev][-own]` -> how to build it, and what its tokens depend on."""
    words = rest.split("-")[1:]
    numbers = [int(w) for w in words if w.isdigit()]
    flags = [w for w in words if not w.isdigit()]
    modes = [w for w in flags if w in MODES]
    in_order = re.fullmatch(r"(-\d+){1,2}(-[a-z_]+)*", rest)
    if not in_order or len(modes) > 1 or len(set(flags)) < len(flags) or set(flags) - {*MODES, "prev", "own"}:
        raise ConfigError(f"method '{name}': write mtp-viterbi-4 (heads), mtp-viterbi-4-5 (heads, candidates of each), "
                          f"then if wanted a mode ({', '.join(MODES)}), prev (the previous token counts), own (a head "
                          "may only give its own candidates)")
    k = numbers[1] if len(numbers) > 1 else CANDIDATES
    heads, limit = numbers[0], decoder.config.num_prediction_heads
    if not 1 <= heads <= limit:
        raise ConfigError(f"method '{name}': this decoder has 1..{limit} heads")
    table = needed(statistics, name)
    transitions = Transitions(table.bigram_keys, table.bigram_counts, table.states, ALPHA)
    check_tables(k, transitions, decoder.config.output_size)
    mode: Mode = modes[0] if modes else "argmax"  # type: ignore[assignment]
    method = MTPViterbi(heads, transitions, k, mode, "prev" in flags, "own" in flags, name)  # refuses what is wrong now
    return (lambda: MTPViterbi(heads, transitions, k, method.mode, method.use_previous, method.own, name)), {
        "transitions": table.checksum("bigram_keys", "bigram_counts"), "alpha": str(ALPHA)}


def bookkeeping_case(heads: int = 7, k: int = 10, vocabulary: int = 2049, batch: int = 1, mode: str = "argmax",
                     sparse: bool = False) -> Callable[[], tuple[Tensor, Tensor]]:
    """All that a round of `mtp-viterbi` does beyond a CAR step: best ids of each head, their transitions, the path.

    Returns a function without arguments; its laws and transitions are random and fixed.
    """
    rng = torch.Generator().manual_seed(0)
    law = (3 * torch.randn(batch, heads, vocabulary, generator=rng)).softmax(-1)
    states = vocabulary + 1
    keys = torch.randint(0, states * states, (50 * vocabulary,), generator=rng).unique()
    keys = keys[keys % states < vocabulary]  # nothing leads to the start
    transitions = Transitions(keys, torch.ones_like(keys), states, ALPHA, dense=not sparse)
    address = utterance_keys(0, [str(b) for b in range(batch)])
    position = torch.arange(heads).expand(batch, -1)

    def case() -> tuple[Tensor, Tensor]:
        u = uniform(address, "token", position) if mode == "ffbs" else None
        return choose(law, likeliest(law, k)[1], transitions, u=u)

    return case
