"""VADUSA (Li et al., arXiv 2410.21951): a tree of the heads' candidates, accepted by tolerant
sampling.

A tree follows each token drawn from the base head at state h. Its nodes at depth d are the best ids
of head d + 1 at h. One pass of the decoder reads the tree and yields the base head's probabilities
q at every node. tau samples are drawn from each. **A node is accepted iff its token is among the
tau samples at its parent** and its parent is accepted. The longest accepted path is emitted,
followed by the first sample at its end, which is the next root.

tau = 1 is lossless: every node draws one token from q, and it is emitted whether or not the tree
contained it. That draw has the address (token stream, position) of plain decoding, so `vadusa-1`
yields the tokens of car-1. tau > 1 moves mass to the nodes of the tree. The end of speech e keeps
its probability, whatever tau is: the first sample alone decides whether a node ends, the branch
that leads furthest is chosen as if none did (`accept`), and samples at different nodes are
independent. With qC the base mass of a node's children
C other than e, if all of them lead equally far,

    out(e) = q(e),    out(v) = (1 - qC)^(tau - 1) q(v)  for v not in C,
    out(c) = q(c) + (1 - q(e) - qC) q(c) / qC * (1 - (1 - qC)^(tau - 1))  for c in C,

at total variation (1 - q(e) - qC)(1 - (1 - qC)^(tau - 1)) from q.

The paper's text was not available to us: the rule follows the description in later papers by its
authors (docs/methods.md).

The ranks and heads in the tree are chosen by Medusa's greedy construction from measured accuracy
(`build_tree`). A node is its path of ranks: (0, 2) is the third-ranked id of the second draft head
after the best id of the first. accuracy[d, i] is the probability that the base head draws the i-th
ranked id of draft head d + 1, given that the path to it is right. If depths are taken as
independent, a node is worth the product along its path, and the expected number of accepted drafts
is the sum over nodes. No node is worth more than its parent, so adding the best node whose parent
is present, again and again, yields the best tree of its size.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcar.decoding import BatchState, Decision, Draft, Method
from dcar.decoding.chunks import check_size
from dcar.decoding.declare import Style, decoding_method, option, unlisted
from dcar.decoding.tree import DraftTree
from dcar.errors import ConfigError
from dcar.model.models import Borrowed
from dcar.sampling import sample, sample_several
from dcar.ties import likeliest
from heads.layers import at

NODES = 16  # default budget of a tree
Path = tuple[int, ...]


@dataclass(frozen=True)
class RankTree:
    """Paths of ranks; every path comes after its own prefix, shorter paths first."""

    paths: tuple[Path, ...]

    def shape(self, device: torch.device | str = "cpu") -> DraftTree:
        index = {path: i for i, path in enumerate(self.paths)}
        return DraftTree([index.get(path[:-1], -1) for path in self.paths], device)

    def places(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the draft head, counted from 0, and the rank of every node: [2, nodes]."""
        return torch.tensor([[len(path) - 1, path[-1]] for path in self.paths], device=device).T

    def tokens(self, logits: Tensor, places: Tensor) -> Tensor:
        """Return the nodes' ids [B, nodes], given logits of the draft heads [B, depths, V] and
        `places` on their device."""
        ranked = likeliest(logits, max(map(max, self.paths)) + 1)[1]  # [B, depths, ranks]
        return ranked[:, places[0], places[1]]


def chain(depth: int) -> RankTree:
    """Return the tree that is a single path: the best id of each head."""
    return RankTree(tuple((0,) * d for d in range(1, depth + 1)))


def build_tree(accuracy: Tensor, budget: int) -> RankTree:
    """Build the tree of at most `budget` nodes with the largest expected number of accepted drafts.

    accuracy: [depths, ranks] as above. Nodes without worth are left out. Of equal nodes, the
    shorter path and then the smaller ranks come first.
    """
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
    return RankTree(tuple(sorted(chosen, key=lambda path: (len(path), path))))


def expected_accepted(paths: Sequence[Path], accuracy: Tensor) -> float:
    """Return the expected number of accepted drafts if depths are independent: the sum of the
    nodes' worths."""
    table = accuracy.double()
    return sum(
        float(torch.stack([table[d, rank] for d, rank in enumerate(path)]).prod()) for path in paths
    )


def hits(candidates: Tensor, samples: Tensor, tree: DraftTree, eos: int) -> tuple[Tensor, Tensor]:
    """Return which nodes are accepted [B, m], and the earliest sample [B, m] that each one's
    token is among; see `accept`."""
    at_parent = samples[:, tree.parents + 1]  # [B, m, tau]
    match = at_parent == candidates[:, :, None]
    # a node ends iff the first sample at its parent is EOS
    match &= ((candidates == eos) == (at_parent[:, :, 0] == eos))[:, :, None]
    after_end = (candidates[:, tree.parents.clamp(min=0)] == eos) & (tree.parents >= 0)
    hit = match.any(-1) & ~after_end
    accepted = (~hit).float() @ tree.ancestors.T.float() == 0  # every node on the path was hit
    return accepted, match.to(torch.uint8).argmax(-1)


def accept(
    candidates: Tensor, samples: Tensor, tree: DraftTree, eos: int, unended: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the accepted path: a node is accepted iff its token is among the tau samples at its
    parent, and the parent is accepted.

    candidates: [B, m] tokens of the nodes; samples: [B, 1 + m, tau] of the base head after the root
    (index 0) and every node. Return nodes [B, depth] from the root on, padded with 0, and their
    number [B]. Of accepted siblings, the one that leads furthest is taken, then the one of the
    earliest sample.

    A branch that ends leads nowhere, so preferring the longest would avoid ends. "Furthest" is
    therefore determined as if no node ended: unended [B, 1 + m] are draws from q without e, which
    replace a first sample that is e. The choice then does not depend on the ends, and each node
    ends with probability q(e). For tau = 1, unended is None: one sample is at most one child.
    """
    accepted, earliest = hits(candidates, samples, tree, eos)
    preference = samples.shape[-1] - earliest
    if unended is not None:
        first = torch.where(samples[:, :, 0] == eos, unended, samples[:, :, 0])
        leading, _ = hits(
            candidates, torch.cat((first[:, :, None], samples[:, :, 1:]), -1), tree, eos
        )
        # [B, m, m] descendants of each node that are reached
        below = leading[:, None] & tree.ancestors.T
        preference = preference + (samples.shape[-1] + 1) * (below * tree.depths).amax(-1)
    path = torch.zeros(len(candidates), tree.depth, dtype=torch.long, device=candidates.device)
    counts = torch.zeros(len(candidates), dtype=torch.long, device=candidates.device)
    node, going = counts - 1, counts == 0  # at the root, every row
    for depth in range(tree.depth):
        children = (tree.parents == node[:, None]) & accepted
        going = going & children.any(-1)
        best = torch.where(children, preference, 0).argmax(-1)
        node = torch.where(going, best, node)
        path[:, depth] = torch.where(going, best, 0)
        counts = counts + going
    return path, counts


@decoding_method("vadusa", Style("VADUSA", "#008b8b", "^", "τ"), example="vadusa-2")
class Vadusa(Method):
    """Decoding method: draft a tree by the additional heads, accept by `accept`. chained: the best
    id of each head instead of a tree.

    Accounting: a round proposes as many tokens as the tree is deep, because no more can be
    accepted.
    """

    tau: int = option(minimum=1)
    ranks: RankTree = unlisted()
    nodes: int | None = option(None, "-n", word="{} nodes", minimum=1)
    chained: bool = option(False, "-chain", word="chain")
    tree: DraftTree = unlisted()
    verifies = True

    def __post_init__(self) -> None:
        if self.ranks is not None:
            self.draft(self.ranks)

    def bind(self, models: Borrowed) -> None:
        if models.heads < 2:
            raise ConfigError(
                "drafts by the additional heads, but this decoder has only the base head"
            )
        if self.nodes and self.chained:
            raise ConfigError(
                "the number of nodes has no effect on a chain; write vadusa-2-n32 or vadusa-2-chain"
            )
        if self.chained:
            self.draft(chain(models.heads - 1))
        else:
            accuracy = models.statistics("rank_accuracy").rank_accuracy
            self.draft(build_tree(accuracy, self.nodes or NODES))

    def draft(self, ranks: RankTree) -> None:
        """Set the tree that is drafted."""
        self.ranks, self.tree, self.draft_length = ranks, ranks.shape(), len(ranks.paths)

    def width(self, heads: int) -> int:
        check_size(self.tree.depth + 1, heads)
        return 1 + self.tree.depth

    def start(self, state: BatchState) -> None:
        state.shared["tree"] = self.tree.to(state.tokens.device)
        state.shared["places"] = self.ranks.places(state.tokens.device)
        state.own["drawn_from"] = torch.zeros_like(state.states[:, 0])

    def propose(self, state: BatchState) -> Draft:
        """Draft tokens for the positions after the root, from the state that the root was drawn
        from."""
        depth = self.tree.depth
        logits = state.heads(state.own["drawn_from"], depth + 1, first=2)  # [B, depths, V + 1]
        forbidden = state.forbidden(state.next_positions(depth))
        if forbidden is not None:
            logits[..., state.eos].masked_fill_(forbidden, -torch.inf)
        return Draft(
            self.ranks.tokens(logits, state.shared["places"]),
            depth * state.alive,
            layout=state.shared["tree"].layout,
        )

    def keep(self, state: BatchState) -> Decision:
        m = self.draft_length if state.most(state.draft_counts, 1) else 0
        # of the root and the nodes
        states, drafted = state.states[:, : m + 1], state.draft_tokens[:, :m]
        samples, unended = self._samples(state, states, m)
        if not m:  # prompts were read: draw the first roots
            state.own["drawn_from"].copy_(states[:, 0])
            none = torch.zeros_like(state.generated)
            return Decision(none + 1, samples[:, 0, :1], none)
        path, accepted = accept(drafted, samples, state.shared["tree"], state.eos, unended)
        accepted = accepted * (state.draft_counts > 0)
        # 0: the root
        last = torch.where(accepted > 0, at(path, (accepted - 1).clamp(min=0)) + 1, 0)
        state.own["drawn_from"].copy_(at(states, last))
        root = at(samples[..., 0], last)[:, None]  # the next one
        tokens = torch.cat((drafted.gather(1, path), root), dim=1).scatter(
            1, accepted[:, None], root
        )
        return Decision(accepted + 1, tokens, accepted, path)

    def _samples(self, state: BatchState, states: Tensor, m: int) -> tuple[Tensor, Tensor | None]:
        """Draw tau samples of q at the states [B, 1 + m, D] of the root and m nodes, [B, 1 + m,
        tau]; and, for tau > 1, one without the end, [B, 1 + m].

        The first one at the root is the one that plain decoding draws at this position. For tau = 1
        so are those at the nodes, of which one path alone counts. For tau > 1 all are independent
        between nodes: a choice between branches that shared them would tell which of them end.
        """
        position = state.generated[:, None] + state.shared["tree"].layout[1][: m + 1]
        others = self.tau - 1
        q = state.probs(state.heads(states, 1)[:, :, 0], position)
        if not others:
            return state.sample(q, state.uniform("token", position))[:, :, None], None
        # of a buffer (see `Uniforms.several`)
        node, count = state.offsets[: m + 1], 1 + self.draft_length
        first = state.further("token", position, node)
        # `others` numbers for each node, then one more for each
        node = node[:, None]
        number = torch.cat(
            (node * others + torch.arange(others, device=node.device), count * others + node), 1
        )
        # [B, 1 + m, tau]
        further = state.further("tau", position[:, :, None].expand(-1, -1, 1 + others), number)
        samples = sample_several(q, torch.cat((first[:, :, None], further[..., :-1]), -1))
        return state.checked(samples), sample(q[..., : state.eos], further[..., -1]).clamp(
            max=state.eos - 1
        )
