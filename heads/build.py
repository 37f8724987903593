"""Multi-token heads built from a configuration, independent (the paper's) or shared, and the
parameters that they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcar.errors import ConfigError
from heads.multi_token import MultiTokenHeads
from heads.shared import SharedHeads

Heads = MultiTokenHeads | SharedHeads
"""Interface of prediction heads: `base`, `num_heads`, `blocks`, `forward(hidden, k, only)`,
`start_outputs(rows)`."""

HEAD_KINDS = ("independent", "shared")


def check_kind(
    heads: str, share_head_blocks: bool = False, head_width: int = 0, tie_heads: bool = False
) -> None:
    """Raise ConfigError for an unknown kind of heads, and for settings that have no effect on
    this kind."""
    if heads not in HEAD_KINDS:
        raise ConfigError(f"heads must be one of {', '.join(HEAD_KINDS)}; not '{heads}'")
    if heads == "independent" and (head_width or tie_heads):
        raise ConfigError(
            "head_width and tie_heads are settings of shared heads: set heads=shared, or remove "
            "them (independent heads are as wide as the hidden states)"
        )
    if heads == "shared" and share_head_blocks:
        raise ConfigError(
            "share_head_blocks is a setting of independent heads: with heads=shared, set "
            "head_blocks=1"
        )


def build_heads(config: Any, base_bias: bool = False) -> Heads:
    """Build the heads that a decoder's configuration describes (`CARConfig`, `BackboneConfig`).
    `base_bias` gives the base head a bias. Raises ConfigError."""
    check_kind(config.heads, config.share_head_blocks, config.head_width, config.tie_heads)
    size = config.hidden_size, config.output_size, config.num_prediction_heads, config.head_blocks
    start = {"zero_init": config.zero_init_heads, "base_bias": base_bias}
    if config.heads == "shared":
        return SharedHeads(*size, width=config.head_width, tie=config.tie_heads, **start)
    return MultiTokenHeads(*size, share_blocks=config.share_head_blocks, **start)


@dataclass(frozen=True)
class HeadCosts:
    """Parameters of the additional heads that a step with k heads reads: `once` if k > 1, plus k
    - 1 times `each`."""

    once: int
    each: int

    def read(self, k: float) -> float:
        """Return the parameters that a step with k heads reads in addition to the base head; k
        may be a mean above 1."""
        return (self.once if k > 1 else 0) + max(k - 1, 0) * self.each


def head_costs(heads: Heads) -> HeadCosts:
    """Return the costs of these heads, which may be on the meta device."""
    out, width = heads.base.weight.shape
    if isinstance(heads, SharedHeads):
        w, blocks = heads.width, heads.blocks
        stack = (heads.up, heads.down, heads.norm, heads.out)
        once = sum(p.numel() for part in stack if part is not None for p in part.parameters())
        return HeadCosts(once, width + 2 * blocks * w)
    return HeadCosts(0, heads.blocks * (width * width + width) + width * out)
