"""Multi-token heads built from a configuration, independent (the paper's) or shared, and the
parameters that they read."""

from dataclasses import dataclass
from typing import Any

from dcar.errors import ConfigError
from heads.multi_token import MultiTokenHeads
from heads.shared import SharedHeads

Heads = MultiTokenHeads | SharedHeads
"""Interface of prediction heads: that of `PredictionHeads`, `blocks` and `start_outputs(rows)`."""

HEAD_KINDS = ("independent", "shared")


def build_heads(config: Any, base_bias: bool = False) -> Heads:
    """Build the heads that a decoder's configuration describes (`CARConfig`, `BackboneConfig`).
    `base_bias` gives the base head a bias. Raises ConfigError for an unknown kind."""
    if config.heads not in HEAD_KINDS:
        raise ConfigError(f"heads must be one of {', '.join(HEAD_KINDS)}; not '{config.heads}'")
    kind = SharedHeads if config.heads == "shared" else MultiTokenHeads
    return kind(
        config.hidden_size,
        config.output_size,
        config.num_prediction_heads,
        config.head_blocks,
        base_bias,
    )


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
