"""Which ranks of which heads a tree of candidates holds: Medusa's greedy construction from measured accuracy.

A node is its path of ranks: (0, 2) is the third-ranked id of the second draft head behind the best id of the first.
accuracy[d, i] is the probability that the base head draws the i-th ranked id of draft head d + 1, given that the path
to it is right. Taking the depths as independent, a node is worth the product along its path, and the expected number
of accepted drafts is the sum over nodes. No node is worth more than its parent, so taking the best node whose parent is
present, again and again, gives the best tree of its size.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcar.decoding.tree import DraftTree
from dcar.errors import ConfigError
from dcar.sampling import likeliest

Path = tuple[int, ...]


@dataclass(frozen=True)
class RankTree:
    """Paths of ranks, every path after its own beginning, shorter paths first."""

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        known: set[Path] = {()}
        for path in self.paths:
            if not path or path[:-1] not in known or path in known or min(path) < 0:
                raise ConfigError(f"tree of candidates: the path {list(path)} is empty, listed twice, has a negative "
                                  "rank, or stands before its own beginning; list shorter paths first")
            known.add(path)
        if not self.paths:
            raise ConfigError("a tree of candidates needs at least one path")

    @property
    def depth(self) -> int:
        return max(map(len, self.paths))

    @property
    def widest(self) -> int:
        """How many ranks of a head are used."""
        return max(map(max, self.paths)) + 1

    def shape(self, device: torch.device | str = "cpu") -> DraftTree:
        index = {path: i for i, path in enumerate(self.paths)}
        return DraftTree([index.get(path[:-1], -1) for path in self.paths], device)

    def tokens(self, logits: Tensor) -> Tensor:
        """The nodes' ids: logits of the draft heads [B, depths, V] -> [B, nodes]."""
        ranked = likeliest(logits, self.widest)[1]  # [B, depths, ranks]
        depth = torch.tensor([len(path) - 1 for path in self.paths], device=logits.device)
        rank = torch.tensor([path[-1] for path in self.paths], device=logits.device)
        return ranked[:, depth, rank]


def chain(depth: int) -> RankTree:
    """One path of the best id of each head."""
    return RankTree(tuple((0,) * d for d in range(1, depth + 1)))


def build_tree(accuracy: Tensor, budget: int) -> RankTree:
    """The tree of at most `budget` nodes with the largest expected number of accepted drafts.

    accuracy [depths, ranks] as above. Nodes that are worth nothing are left out. At equal worth the shorter path, then
    the smaller ranks. ConfigError for a budget below 1 or accuracies that are no probabilities.
    """
    if budget < 1:
        raise ConfigError(f"a tree of {budget} nodes drafts nothing; give a budget of at least 1")
    if accuracy.dim() != 2 or not accuracy.numel() or not bool(((accuracy >= 0) & (accuracy <= 1)).all()):
        raise ConfigError(f"rank accuracies must be a table [draft heads, ranks] of probabilities, not "
                          f"{tuple(accuracy.shape)} with other values; measure them again with `dcar fit-verifiers`")
    table = accuracy.double().tolist()
    heap: list[tuple[float, int, Path]] = []

    def push_children(path: Path, worth: float) -> None:
        if len(path) < len(table):
            for rank, probability in enumerate(table[len(path)]):
                if worth * probability > 0:
                    heapq.heappush(heap, (-worth * probability, len(path) + 1, (*path, rank)))

    push_children((), 1.0)
    chosen: list[Path] = []
    while heap and len(chosen) < budget:
        negative, _, path = heapq.heappop(heap)
        chosen.append(path)
        push_children(path, -negative)
    if not chosen:
        raise ConfigError("every rank of the first draft head has accuracy 0, so no candidate is worth verifying; "
                          "train the additional heads, or use a chain")
    return RankTree(tuple(sorted(chosen, key=lambda path: (len(path), path))))


def expected_accepted(paths: Sequence[Path], accuracy: Tensor) -> float:
    """Expected number of accepted drafts under the independence of depths: the sum of the nodes' worths."""
    table = accuracy.double()
    return sum(float(torch.stack([table[d, rank] for d, rank in enumerate(path)]).prod()) for path in paths)
