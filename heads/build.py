"""The multi-token heads that a configuration describes: independent ones, which are the paper's, or shared ones."""

from __future__ import annotations

from typing import Any

from dcar.errors import ConfigError
from heads.multi_token import MultiTokenHeads
from heads.shared import SharedHeads

Heads = MultiTokenHeads | SharedHeads
"""`base`, `num_heads`, `blocks`, `forward(hidden, k, only)`, `single(hidden, head)`, `start_outputs(rows)`."""

HEAD_KINDS = ("independent", "shared")


def check_kind(heads: str, share_head_blocks: bool = False, head_width: int = 0, tie_heads: bool = False) -> None:
    """ConfigError for an unknown kind of heads, and for a setting that this kind would ignore."""
    if heads not in HEAD_KINDS:
        raise ConfigError(f"heads must be one of {', '.join(HEAD_KINDS)}; not '{heads}'")
    if heads == "independent" and (head_width or tie_heads):
        raise ConfigError("head_width and tie_heads are of one stack for all offsets: set heads=shared, or leave them "
                          "out (independent heads are as wide as the hidden states)")
    if heads == "shared" and share_head_blocks:
        raise ConfigError("share_head_blocks is of independent heads: with heads=shared set head_blocks=1")


def build_heads(config: Any, base_bias: bool = False) -> Heads:
    """New heads as the configuration of a decoder says (`CARConfig`, `BackboneConfig`); `base_bias` gives the base head
    a bias. Raises ConfigError."""
    check_kind(config.heads, config.share_head_blocks, config.head_width, config.tie_heads)
    size = config.hidden_size, config.output_size, config.num_prediction_heads, config.head_blocks
    if config.heads == "shared":
        return SharedHeads(*size, width=config.head_width, tie=config.tie_heads, zero_init=config.zero_init_heads,
                           base_bias=base_bias)
    return MultiTokenHeads(*size, share_blocks=config.share_head_blocks, zero_init=config.zero_init_heads,
                           base_bias=base_bias)
