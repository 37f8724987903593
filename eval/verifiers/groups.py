"""Groups of acoustically similar tokens (PCG, arXiv 2511.13732, section 2.1): built by blocks, kept as CSR both ways.

G(t) = {t' : cos(E_t, E_t') > theta} with E the target's input embeddings of the speech codes; the distinct sets among
them are the groups. A token may be in several: S(t) are its groups, N(t) their number, 1 / N(t) its weight in each.
EOS, like every id that is no speech code, is a group of its own.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dcar.errors import CheckpointError, ConfigError
from dcar.sources.packages import dcar_cache_dir
from dcar.storage import replacing
from heads.checkpoint import tensors_checksum

logger = logging.getLogger(__name__)

TABLES = ("group_start", "group_tokens", "token_start", "token_groups")
BYTES_PER_CELL = 4 + 1 + 2 * 8  # of a block of similarities: float32, bool, and two int64 indices where it is true


@dataclass
class TokenGroups:
    """Similarity groups of a vocabulary of V ids in M groups with E memberships, on one device.

    group_start [M + 1], group_tokens [E]: the ids of group k are group_tokens[group_start[k] : group_start[k + 1]].
    token_start [V + 1], token_groups [E]: the groups of id t, likewise. Starts are int64, entries int32.
    """

    group_start: Tensor
    group_tokens: Tensor
    token_start: Tensor
    token_groups: Tensor
    theta: float
    embedding_checksum: str

    @property
    def vocabulary(self) -> int:
        return len(self.token_start) - 1

    @property
    def count(self) -> int:
        return len(self.group_start) - 1

    def memberships(self) -> Tensor:
        """N(t), the number of groups that each id is in: [V]."""
        return self.token_start.diff()

    def to(self, device: str | torch.device) -> TokenGroups:
        return replace(self, **{name: getattr(self, name).to(device) for name in TABLES})

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, complete or not at all."""
        with replacing(path, by_several=True) as part:
            save_file({name: getattr(self, name).cpu() for name in TABLES}, part,
                      {"theta": repr(self.theta), "embedding_checksum": self.embedding_checksum})

    @classmethod
    def load(cls, path: str | Path) -> TokenGroups:
        """CheckpointError if the file is missing or broken."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            return cls(**tensors, theta=float(about["theta"]), embedding_checksum=about["embedding_checksum"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot read the token groups ({error}); delete the file, they are built "
                                  "again") from error


def check_theta(theta: float) -> float:
    """ConfigError unless -1 < theta <= 1."""
    if not -1 < theta <= 1:
        raise ConfigError(f"the similarity threshold theta of PCG is a cosine in (-1, 1], not {theta}; the paper uses "
                          "0.38 to 0.45")
    return theta


def build_groups(embedding: Tensor, theta: float, specials: int = 1, memory_bytes: int = 256 << 20) -> TokenGroups:
    """Groups of the codes whose embeddings [codes, D] are given; ids codes .. codes + specials - 1 are singletons.

    Similarities are computed for as many codes at a time as `memory_bytes` of working memory allow, against all
    others; what stays is the distinct groups. float32 embeddings are read in place, others are converted whole.

    Raises ConfigError for theta outside (-1, 1], or where the groups themselves need more than `memory_bytes`.
    """
    check_theta(theta)
    checksum = _checksum(embedding)
    codes = len(embedding)
    seen: set[bytes] = set()  # digests of the sets of ids so far
    members: list[Tensor] = []  # of each distinct group, int32, ascending
    stored = 0
    for done, block in similar_codes(embedding, theta, memory_bytes):
        for ids in block:
            digest = hashlib.blake2b(ids.numpy().tobytes(), digest_size=16).digest()
            if digest not in seen:
                seen.add(digest)
                members.append(ids.clone())
                stored += 4 * len(ids)
        if 6 * stored > memory_bytes:  # while the two CSR halves are made, each entry takes 24 bytes
            raise ConfigError(f"groups at theta = {theta} are too large: over {stored >> 20} MiB of memberships after "
                              f"{done} of {codes} codes; raise theta, or memory_bytes ({memory_bytes >> 20} MiB)")
    members += [torch.tensor([codes + i], dtype=torch.int32) for i in range(specials)]
    return _both_ways(members, codes + specials, theta, checksum).to(embedding.device)


def similar_codes(embedding: Tensor, theta: float, memory_bytes: int) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Blocks of codes in order: how many codes are done, and for each of the block's the ids of G(t), ascending."""
    table = embedding.detach().to(torch.float32)
    rows = max(1, memory_bytes // (len(table) * BYTES_PER_CELL))
    scale = torch.cat([1 / block.norm(dim=1).clamp(min=1e-30) for block in table.split(rows)])
    for start in range(0, len(table), rows):
        block = table[start : start + rows] * scale[start : start + rows, None]
        cosine = (block @ table.T).mul_(scale).clamp_(max=1)
        similar = cosine > theta
        own = torch.arange(len(block), device=table.device)
        similar[own, start + own] = True  # a token is like itself, whatever rounding says
        columns = similar.nonzero()[:, 1].to(torch.int32).cpu()
        yield start + len(block), columns.split(similar.sum(1).tolist())


def _both_ways(members: list[Tensor], vocabulary: int, theta: float, checksum: str) -> TokenGroups:
    sizes = torch.tensor([len(ids) for ids in members])
    group_tokens = torch.cat(members)
    owner = torch.arange(len(members), dtype=torch.int32).repeat_interleave(sizes)
    token_groups = owner[group_tokens.argsort(stable=True)]  # by id, then by group
    return TokenGroups(_starts(sizes), group_tokens, _starts(group_tokens.bincount(minlength=vocabulary)), token_groups,
                       theta, checksum)


def _starts(sizes: Tensor) -> Tensor:
    return torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))


def cached_groups(embedding: Tensor, theta: float, specials: int = 1, folder: Path | None = None) -> TokenGroups:
    """Groups of these embeddings from the cache folder (`dcar_cache_dir()/groups`), built and stored if they are not
    there. CheckpointError where the file there is broken or of other embeddings."""
    checksum = _checksum(embedding)
    path = (folder or dcar_cache_dir() / "groups") / f"{checksum[:16]}_{check_theta(theta)!r}_{specials}.safetensors"
    if not path.is_file():
        groups = build_groups(embedding, theta, specials)
        groups.save(path)
        logger.info("%d similarity groups at theta = %g, %.1f ids each on average; kept in %s", groups.count, theta,
                    len(groups.group_tokens) / groups.count, path)
        return groups
    groups = TokenGroups.load(path)
    found = (groups.embedding_checksum, groups.theta, groups.vocabulary)
    if found != (checksum, theta, len(embedding) + specials):
        raise CheckpointError(f"{path}: groups of the embeddings {found[0][:12]}… at theta = {found[1]} of {found[2]} "
                              f"ids, not {checksum[:12]}… at {theta} of {len(embedding) + specials}; delete the file, "
                              "they are built again")
    return groups.to(embedding.device)


def _checksum(embedding: Tensor) -> str:
    return tensors_checksum({"speech_embedding": embedding})
