"""PCG: speculative decoding verified by groups of acoustically similar tokens (arXiv 2511.13732).

The drafted token x represents one of its groups, K ~ w(., x). The group, instead of the token, is
tested as in SD:

    accept x iff u < min(1, Q_c(K) / P_c(K)),
    Q_c(k) = sum over t in G_k of q(t) w(k, t),   P_c likewise,

with weights w(k, t) = 1 / N(t). A rejected token is replaced by one of a group drawn from
norm(max(0, Q_c - P_c)), by thinning: draw y ~ q and K' ~ w(., y) until K' passes with probability 1
- P_c(K') / Q_c(K'). Given its group, that y already has the distribution of equation 10, so no
second draw is needed.

The emitted group has the distribution Q_c. The token inside it does not follow q, unless every
group is a singleton, which is SD.

The groups (section 2.1): G(t) = {t' : cos(E_t, E_t') > theta}, where E are the target's input
embeddings of the speech codes; the distinct sets among them are the groups. A token may be in
several: S(t) are its groups, N(t) is their number, and 1 / N(t) is its weight in each. EOS, like
every id that is not a speech code, is a group of its own.

`pcg-mel-θ` groups by sound (Table 3): E_t is the mean log-mel frame of the recordings at the
positions of t, centred on the mean over all codes. A code that never occurred is a group of its
own.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dcar.decoding import BatchState
from dcar.decoding.declare import Style, decoding_method, option, unlisted
from dcar.errors import ConfigError
from dcar.model.draft import AnyDecoder
from dcar.model.models import Borrowed
from dcar.sampling import sample, sample_several
from eval.verifiers import sd
from eval.verifiers.chain import ChainVerifier, Uniforms

logger = logging.getLogger(__name__)

# thinning gives way to enumeration after TRIALS; the paper saw 3 on average
TRIALS, TRIALS_AT_ONCE = 32, 8
MEMORY_BYTES = 256 << 20  # of working memory while groups are made
# of a block of similarities: float32, bool, and two int64 indices where it is true
BYTES_PER_CELL = 4 + 1 + 2 * 8


@dataclass
class TokenGroups:
    """Similarity groups of a vocabulary of V ids in M groups with E memberships, on one device.

    group_start [M + 1], group_tokens [E]: the ids of group k are group_tokens[group_start[k] :
    group_start[k + 1]]. token_start [V + 1], token_groups [E]: the groups of id t, likewise. Starts
    are int64, entries int32.
    """

    group_start: Tensor
    group_tokens: Tensor
    token_start: Tensor
    token_groups: Tensor

    def __post_init__(self) -> None:
        self.sizes, self.ids = self.group_start.diff(), self.group_tokens.long()
        self.largest = int(self.sizes.max())
        # 1 / N(t), the weight of each id in its groups: [V]
        self.share = 1 / self.token_start.diff().double()
        self.weight = self.share[self.ids]  # [E] of each entry
        # [E] its group
        self.owner = torch.arange(self.count, device=self.ids.device).repeat_interleave(self.sizes)
        # indices of the random numbers of all trials, three for each
        self.trial_numbers = torch.arange(3 * TRIALS, device=self.ids.device)

    @property
    def count(self) -> int:
        return len(self.group_start) - 1

    def most(self, group: Tensor, state: BatchState) -> int:
        """Return an upper bound of the sizes of these groups."""
        return state.most(self.sizes[group], self.largest) if state.eager else self.largest

    def to(self, device: torch.device) -> TokenGroups:
        """Return the groups on a device."""
        if self.group_start.device == device:
            return self
        return TokenGroups(
            self.group_start.to(device),
            self.group_tokens.to(device),
            self.token_start.to(device),
            self.token_groups.to(device),
        )


def code_vectors(decoder: AnyDecoder) -> Tensor:
    """Return the decoder's embeddings [codes, D] of the speech codes."""
    return decoder.speech_embedding.weight[: decoder.config.speech_vocab_size]


def build_groups(
    embedding: Tensor, theta: float, specials: int = 1, memory_bytes: int = MEMORY_BYTES
) -> TokenGroups:
    """Build the groups of the codes with embeddings [codes, D]. Ids codes .. codes + specials - 1
    are singletons, as are codes whose embedding is NaN.

    Similarities are computed for as many codes at a time as fit into `memory_bytes` of working
    memory, against all others; only the distinct groups are kept. float32 embeddings are read in
    place, others are converted as a whole.

    Raises ConfigError if the groups themselves need more than `memory_bytes`.
    """
    codes = len(embedding)
    digests: set[bytes] = set()  # digests of the sets of ids so far
    members: list[Tensor] = []  # of each distinct group, int32, ascending
    stored = 0
    for done, block in similar_codes(embedding, theta, memory_bytes):
        for ids in block:
            digest = hashlib.blake2b(ids.numpy().tobytes(), digest_size=16).digest()
            if digest not in digests:
                digests.add(digest)
                members.append(ids.clone())
                stored += 4 * len(ids)
        # while the two CSR halves are made, each entry takes 24 bytes
        if 6 * stored > memory_bytes:
            raise ConfigError(
                f"pcg: groups at theta = {theta} are too large: over {stored >> 20} MiB of "
                f"memberships after {done} of {codes} codes; raise theta, or memory_bytes "
                f"({memory_bytes >> 20} MiB)"
            )
    members += [torch.tensor([codes + i], dtype=torch.int32) for i in range(specials)]
    sizes, group_tokens = torch.tensor([len(ids) for ids in members]), torch.cat(members)
    owner = torch.arange(len(members), dtype=torch.int32).repeat_interleave(sizes)
    token_groups = owner[group_tokens.argsort(stable=True)]  # by id, then by group
    group_start, token_start = (
        F.pad(counts.cumsum(0), (1, 0))
        for counts in (sizes, group_tokens.bincount(minlength=codes + specials))
    )
    logger.info(
        "%d similarity groups at theta = %g, %.1f ids each on average",
        len(members),
        theta,
        len(group_tokens) / len(members),
    )
    device = embedding.device
    return TokenGroups(
        group_start.to(device),
        group_tokens.to(device),
        token_start.to(device),
        token_groups.to(device),
    )


def similar_codes(
    embedding: Tensor, theta: float, memory_bytes: int = MEMORY_BYTES
) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Iterate over blocks of codes in order: the number of codes done so far, and the ids of
    G(t), ascending, for each code of the block."""
    table = embedding.detach().to(torch.float32)
    rows = max(1, memory_bytes // (len(table) * BYTES_PER_CELL))
    scale = torch.cat([1 / block.norm(dim=1).clamp(min=1e-30) for block in table.split(rows)])
    for start in range(0, len(table), rows):
        block = table[start : start + rows] * scale[start : start + rows, None]
        cosine = (block @ table.T).mul_(scale).clamp_(max=1)
        similar = cosine > theta
        own = torch.arange(len(block), device=table.device)
        similar[own, start + own] = True  # a token is similar to itself, in spite of rounding
        columns = similar.nonzero()[:, 1].to(torch.int32).cpu()
        yield start + len(block), columns.split(similar.sum(1).tolist())


def group_share(probs: Tensor, groups: TokenGroups) -> Tensor:
    """Return probs(t) w(k, t) = probs(t) / N(t), the share of t's mass that each of its groups
    receives: [..., V], float64."""
    return probs * groups.share


def pick_group(tokens: Tensor, u: Tensor, groups: TokenGroups) -> Tensor:
    """Draw K ~ w(., x), one of the groups of each token with equal probability: tokens, u [...]
    -> [...]."""
    start = groups.token_start[tokens]
    size = groups.token_start[tokens + 1] - start
    return groups.token_groups[start + (u * size).long()].long()


def group_mass(
    probs: Sequence[Tensor], group: Tensor, groups: TokenGroups, most: int
) -> list[Tensor]:
    """Return Q_c(k) = sum over t in G_k of probs[b, t] / N(t), [B, n] float64, for each [B, V]
    of probs and the groups k [B, n] of its rows, none of them larger than `most`."""
    member = torch.arange(most, device=group.device)
    # [B, n, most]
    place = (groups.group_start[group][..., None] + member).clamp(max=len(groups.ids) - 1)
    weight = groups.weight[place] * (member < groups.sizes[group][..., None])
    ids = groups.ids[place].flatten(1)
    return [(of.gather(1, ids).view(place.shape) * weight).sum(-1) for of in probs]


def coarse(share: Tensor, groups: TokenGroups) -> Tensor:
    """Return the probabilities [B, M] of all groups, Q_c or P_c, given `group_share`s [B, V]."""
    out = torch.zeros(len(share), groups.count, dtype=torch.float64, device=share.device)
    return out.index_add(1, groups.owner, share.index_select(1, groups.ids))


def enumerated_residual(q: Tensor, p: Tensor, groups: TokenGroups) -> Tensor:
    """Return the probabilities of the token after a rejection: sum over k of R(k) q(t) w(k, t) /
    Q_c(k), with R = norm(max(0, Q_c - P_c)).

    q, p [B, V] -> [B, V], by one product over all memberships. A GPU adds them in any order, so
    the last bit may differ between runs.
    """
    q_share = group_share(q, groups)
    q_coarse, p_coarse = coarse(q_share, groups), coarse(group_share(p, groups), groups)
    # R(k) / Q_c(k)
    rate = sd.residual(q_coarse, p_coarse) / q_coarse.clamp(min=torch.finfo(torch.float64).tiny)
    rates = torch.zeros_like(q_share).index_add(1, groups.ids, rate.index_select(1, groups.owner))
    return q_share * rates


def thinned_residual(
    q: Tensor, p: Tensor, groups: TokenGroups, uniform: Uniforms, refused: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw from `enumerated_residual` by thinning. Return tokens [B] and the number of trials
    [B], TRIALS + 1 if none of TRIALS passed (the token is then undefined). The tokens of rows
    that are not `refused` [B] are arbitrary."""
    tokens = torch.zeros(len(q), dtype=torch.long, device=q.device)
    trials = torch.full_like(tokens, TRIALS + 1)
    numbers = uniform.several("residual", groups.trial_numbers)
    at_once = TRIALS_AT_ONCE if uniform.state.eager else TRIALS
    for first in range(0, TRIALS, at_once):
        some = numbers[:, 3 * first : 3 * (first + at_once)]
        y = sample_several(q, some[:, ::3]).clamp(max=q.shape[-1] - 1)
        k = pick_group(y, some[:, 1::3], groups)
        q_k, p_k = group_mass([q, p], k, groups, groups.most(k, uniform.state))
        passed = some[:, 2::3] < 1 - p_k / q_k
        best = passed.to(torch.uint8).argmax(-1)
        done = passed.any(-1) & (trials > TRIALS)
        tokens = torch.where(done, y.gather(1, best[:, None])[:, 0], tokens)
        trials = torch.where(done, first + best + 1, trials)
        if uniform.state.eager and not bool(((trials > TRIALS) & refused).any()):
            break
    return tokens, trials


@decoding_method("pcg", Style("PCG", "#c4318c", "<", "θ"), example="pcg-0.42")
class GroupVerifier(ChainVerifier):
    """Verifier `pcg-θ`."""

    theta: float = option(above=-1, maximum=1)
    groups: TokenGroups = unlisted()
    streams = ("token", "accept", "group")

    def bind(self, models: Borrowed) -> None:
        super().bind(models)
        vectors = self.vectors(models)
        specials = models.decoder.config.output_size - len(vectors)
        self.groups = build_groups(vectors, self.theta, specials)

    @staticmethod
    def vectors(models: Borrowed) -> Tensor:
        """Return the vectors [codes, D] whose cosines define the groups."""
        return code_vectors(models.decoder)

    def start(self, state: BatchState) -> None:
        super().start(state)
        state.shared["groups"] = self.groups.to(state.tokens.device)

    def accept(self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms) -> Tensor:
        groups = uniform.state.shared["groups"]
        group = pick_group(tokens, uniform("group"), groups)
        most = groups.most(group, uniform.state)
        masses = group_mass([q.flatten(0, 1), p.flatten(0, 1)], group.view(-1, 1), groups, most)
        return uniform("accept") < sd.acceptance(*(mass.view_as(group) for mass in masses))

    def following(
        self, q: Tensor, p: Tensor, tokens: Tensor, eos: int, uniform: Uniforms, refused: Tensor
    ) -> Tensor:
        state = uniform.state
        groups = state.shared["groups"]
        bonus = state.sample(q, uniform("token"))
        if state.eager and not bool(refused.any()):
            return bonus
        token, trials = thinned_residual(q, p, groups, uniform, refused)
        left = (trials > TRIALS) & refused
        if not state.eager or bool(left.any()):
            enumerated = sample(enumerated_residual(q, p, groups), uniform("residual", 3 * TRIALS))
            token = torch.where(left, enumerated.clamp(max=eos), token)
        return torch.where(refused, token, bonus)


@decoding_method("pcg-mel", Style("PCG by mel", "#8f1f5c", "8", "θ"), example="pcg-mel-0.9")
class MelGroupVerifier(GroupVerifier):
    """Verifier `pcg-mel-θ`: groups by sound."""

    @staticmethod
    def vectors(models: Borrowed) -> Tensor:
        return models.statistics("mel_means", "mel_counts").centred_mel()
