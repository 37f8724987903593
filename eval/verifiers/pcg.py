"""PCG: speculative decoding verified by groups of acoustically similar tokens (arXiv 2511.13732, section 2.2).

The drafted token x stands for one of its groups, K ~ w(., x). The group, not the token, is tested as in SD:

    accept x iff u < min(1, Q_c(K) / P_c(K)),   Q_c(k) = sum over t in G_k of q(t) w(k, t),   P_c likewise,

with weights w(k, t) = 1 / N(t). A refused token gives way to one of a group drawn from norm(max(0, Q_c - P_c)), by
thinning: draw y ~ q and K' ~ w(., y) until K' passes with 1 - P_c(K') / Q_c(K'). Given its group, that y already has
the distribution of equation 10, so no second draw is needed.

The emitted group has the distribution Q_c. The token inside it does not follow q, unless every group is a singleton:
then this is SD.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcar.model.draft import AnyDecoder
from dcar.sampling import sample
from eval.verifiers import sd
from eval.verifiers.chain import ChainVerifier, Uniforms
from eval.verifiers.drafters import Drafter
from eval.verifiers.groups import TokenGroups, cached_groups

TRIALS, TRIALS_AT_ONCE = 32, 8  # thinning gives way to enumeration after TRIALS; the paper saw 3 on average


def weighted(probs: Tensor, groups: TokenGroups) -> Tensor:
    """probs(t) w(k, t) = probs(t) / N(t), the share of t's mass that each of its groups gets: [..., V], float64."""
    return probs.double() / groups.memberships()


def pick_group(tokens: Tensor, u: Tensor, groups: TokenGroups) -> Tensor:
    """K ~ w(., x): one of the groups of each token, all alike: tokens, u [...] -> [...]."""
    start = groups.token_start[tokens]
    size = groups.token_start[tokens + 1] - start
    return groups.token_groups[start + (u * size).long()].long()


def group_mass(probs: list[Tensor], row: Tensor, group: Tensor, groups: TokenGroups) -> list[Tensor]:
    """Q_c(k) = sum over t in G_k of probs[row, t] / N(t), for each [R, V] of probs and each pair (row [n],
    group [n]): [n], float64."""
    start = groups.group_start[group]
    sizes = groups.group_start[group + 1] - start
    pair = torch.arange(len(group), device=group.device).repeat_interleave(sizes)
    inside = torch.arange(len(pair), device=group.device) - (sizes.cumsum(0) - sizes)[pair]
    member = groups.group_tokens[start[pair] + inside].long()
    weight = 1 / groups.memberships()[member].double()
    zero = torch.zeros(len(group), dtype=torch.float64, device=group.device)
    return [zero.index_add(0, pair, given[row[pair], member] * weight) for given in probs]


def coarse(share: Tensor, groups: TokenGroups) -> Tensor:
    """Probabilities of all groups, Q_c or P_c, from `weighted` shares: [R, V] -> [R, M]."""
    owner = torch.arange(groups.count, device=share.device).repeat_interleave(groups.group_start.diff())
    out = torch.zeros(len(share), groups.count, dtype=torch.float64, device=share.device)
    return out.index_add(1, owner, share[:, groups.group_tokens.long()])


def enumerated_residual(q: Tensor, p: Tensor, groups: TokenGroups) -> Tensor:
    """Probabilities of the token behind a refusal: sum over k of R(k) q(t) w(k, t) / Q_c(k), with
    R = norm(max(0, Q_c - P_c)).

    q, p [R, V] -> [R, V], by one product over all memberships.
    """
    q_share = weighted(q, groups)
    q_coarse, p_coarse = coarse(q_share, groups), coarse(weighted(p, groups), groups)
    rate = sd.residual(q_coarse, p_coarse) / q_coarse.clamp(min=torch.finfo(torch.float64).tiny)  # R(k) / Q_c(k)
    rates = torch.zeros_like(q_share).index_add(
        1, groups.group_tokens.long(), rate.repeat_interleave(groups.group_start.diff(), 1))
    return q_share * rates


def thinned_residual(q: Tensor, p: Tensor, groups: TokenGroups, uniform: Uniforms) -> tuple[Tensor, Tensor]:
    """Draw from `enumerated_residual` by thinning: tokens [R], and the trials [R] that it took, TRIALS + 1 where none
    of TRIALS passed (the token then is undefined)."""
    cumulative = q.double().cumsum(-1)
    tokens = torch.zeros(len(q), dtype=torch.long, device=q.device)
    trials = torch.full_like(tokens, TRIALS + 1)
    for first in range(0, TRIALS, TRIALS_AT_ONCE):
        rows = (trials > TRIALS).nonzero()[:, 0]
        if not len(rows):
            break
        mine = Uniforms(uniform.keys[rows], uniform.positions[rows])
        u = mine.several("residual", range(3 * first, 3 * (first + TRIALS_AT_ONCE)))  # three numbers a trial
        u_token, u_group, u_pass = (u[:, i::3].contiguous() for i in range(3))
        last = cumulative[rows]
        y = torch.searchsorted(last, u_token * last[:, -1:], right=True)
        y = torch.minimum(y, (last < last[:, -1:]).sum(-1, keepdim=True))  # as `sample`: never an id of zero mass
        k = pick_group(y, u_group, groups)
        q_k, p_k = group_mass([q, p], rows.repeat_interleave(TRIALS_AT_ONCE), k.flatten(), groups)
        passed = u_pass < (1 - p_k / q_k).view_as(u_pass)
        done = passed.any(-1)
        best = passed.to(torch.uint8).argmax(-1)
        tokens[rows[done]] = y[done, best[done]]
        trials[rows[done]] = first + best[done] + 1
    return tokens, trials


class GroupVerifier(ChainVerifier):
    """`pcg-θ`."""

    numbers = (1,)

    def __init__(self, name: str, drafter: Drafter, groups: TokenGroups):
        super().__init__(name, drafter)
        self.groups = groups
        self.identity = {"groups": f"{groups.theta!r} of {groups.embedding_checksum}"}

    @classmethod
    def arguments(cls, decoder: AnyDecoder, numbers: tuple[float, ...]) -> tuple[TokenGroups]:
        (theta,), codes = numbers, decoder.config.speech_vocab_size
        return (cached_groups(decoder.speech_embedding.weight[:codes], theta, decoder.config.output_size - codes),)

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        group = pick_group(tokens, uniform("group"), self.groups)
        row = torch.arange(tokens.numel(), device=tokens.device)
        q_group, p_group = group_mass([q.flatten(0, 1), p.flatten(0, 1)], row, group.flatten(), self.groups)
        return uniform("accept") < sd.acceptance(q_group, p_group).view_as(group)

    def replace(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        replaced, trials = thinned_residual(q, p, self.groups, uniform)
        rows = (trials > TRIALS).nonzero()[:, 0]
        if len(rows):
            mine = Uniforms(uniform.keys[rows], uniform.positions[rows])
            replaced[rows] = sample(enumerated_residual(q[rows], p[rows], self.groups), mine("residual", 3 * TRIALS))
        return replaced
