"""Trees of drafted tokens: several continuations of one token are read in a single pass (Medusa, Cai et al. 2024).

The nodes follow the pending tokens like a longer draft, but each attends only to the past, the pending tokens, its
ancestors and itself, and its position is its depth: siblings share a position. `KVCache.gather` then keeps
the accepted path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DraftTree:
    """Shape of a tree of m drafted tokens, the same for all rows of a batch.

    parents [m]: index of each node's parent, which must stand before it; -1 for a child of the last pending token.
    depths [m]: 1 for those children. ancestors [m, m]: whether node j lies on the path to node i (itself included).
    """

    def __init__(self, parents: Sequence[int], device: torch.device | str = "cpu"):
        if not parents:
            raise ValueError("a draft tree needs at least one node")
        depths: list[int] = []
        ancestors = torch.eye(len(parents), dtype=torch.bool)
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: parents stand before children, -1 is the root")
            depths.append(1 if parent < 0 else depths[parent] + 1)
            if parent >= 0:
                ancestors[node] |= ancestors[parent]
        self.depth = max(depths)
        self.parents = torch.tensor(parents, device=device)
        self.depths = torch.tensor(depths, device=device)
        self.ancestors = ancestors.to(device)

    def __len__(self) -> int:
        return len(self.parents)

    def layout(self, pending: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Attention mask and positions of pending[b] pending tokens and the nodes after them.

        pending [B], width: columns of the pass. Returns a mask [B, width, width] (row sees column) and offsets
        [B, width] from the position of the first column. Columns after the last node are padding: they see the pending
        tokens and themselves.
        """
        column = torch.arange(width, device=pending.device)
        node = column - pending[:, None]  # [B, width] index of the node; negative: a pending token
        inside = (node >= 0) & (node < len(self))
        index = node.clamp(0, len(self) - 1)
        lineage = self.ancestors[index[:, :, None], index[:, None, :]] & inside[:, :, None] & inside[:, None, :]
        causal = column[None, :] <= column[:, None]
        mask = (causal & (node < 0)[:, None, :]) | lineage | torch.eye(width, dtype=torch.bool, device=column.device)
        offsets = torch.where(inside, pending[:, None] + self.depths[index] - 1, column)
        return mask, offsets
