"""Trees of drafted tokens: several continuations of one token are read in a single pass (Medusa,
Cai et al. 2024).

The nodes follow the last emitted token like a longer draft, but each attends only to the past, that
token, its ancestors and itself, and its position is its depth: siblings share a position.
`KVCache.gather` then keeps the accepted path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class DraftTree:
    """Shape of a tree of m drafted tokens, the same for all rows of a batch.

    parents [m]: index of each node's parent, which must come before it; -1 for a child of the root,
    the last emitted token. depths [m]: 1 for those children. ancestors [m, m]: whether node j is on
    the path to node i (itself included). layout: attention mask [1, 1 + m, 1 + m] (row attends to
    column) and positions [1 + m] of the root and the nodes.
    """

    def __init__(self, parents: Sequence[int], device: torch.device | str = "cpu"):
        depths: list[int] = []
        ancestors = torch.eye(len(parents), dtype=torch.bool)
        for node, parent in enumerate(parents):
            depths.append(1 if parent < 0 else depths[parent] + 1)
            if parent >= 0:
                ancestors[node] |= ancestors[parent]
        self.depth = max(depths)
        self.parents = torch.tensor(parents, device=device)
        self.depths = torch.tensor(depths, device=device)
        self.ancestors = ancestors.to(device)

        # Column 0 of a pass is the root (the last emitted token), which every node sees; nodes
        # stand at their depths.
        mask = torch.ones(1 + len(parents), 1 + len(parents), dtype=torch.bool)
        mask[0, 1:], mask[1:, 1:] = False, ancestors
        self.layout = mask[None].to(device), torch.tensor([0, *depths], device=device)

    def __len__(self) -> int:
        return len(self.parents)

    def to(self, device: torch.device) -> DraftTree:
        """Return the tree with its tensors on a device."""
        return self if self.depths.device == device else DraftTree(self.parents.tolist(), device)
