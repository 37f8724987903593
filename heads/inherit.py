"""Draft models made of a target's own layers (SSD, Interspeech 2025, section 3: the bottom two and the top six of 24).

The draft consumes the target's embeddings and predicts its vocabulary, so ids need no mapping. Embeddings and top
layers (with the final norm) stay as they are in the target; the bottom layers and the output head are trained.
"""

from __future__ import annotations

from typing import Any

from dcar.errors import ConfigError

BOTTOM_SHARE, TOP_SHARE = 2 / 24, 6 / 24


def inherited_layers(depth: int, bottom: int = 0, top: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the target's layers that a draft inherits: its first `bottom` and its last `top` of `depth`.

    0 stands for the paper's share of the depth, rounded, at least one: 2 + 6 of 24, 1 + 3 of 12, 1 + 2 of 8.
    ConfigError where that is more than the target has.
    """
    bottom = bottom or max(1, round(BOTTOM_SHARE * depth))
    top = top or max(1, round(TOP_SHARE * depth))
    if bottom < 1 or top < 1 or bottom + top > depth:
        raise ConfigError(f"a draft of {bottom} bottom and {top} top layers cannot be taken from {depth} layers; "
                          "choose at least one of each and no more than there are")
    return tuple(range(bottom)), tuple(range(depth - top, depth))


def inherit(draft: Any, target: Any, layers: tuple[int, ...], bottom: int) -> None:
    """Copy what stands before the layers (`inputs`: embeddings), the named layers, the final norm and the base head;
    freeze all but `bottom` layers and head."""
    for own, theirs in zip(draft.inputs, target.inputs, strict=True):
        own.load_state_dict(theirs.state_dict())
    for own, index in zip(draft.layers, layers, strict=True):
        own.load_state_dict(target.layers[index].state_dict())
    draft.norm.load_state_dict(target.norm.state_dict())
    draft.heads.base.load_state_dict(target.heads.base.state_dict())
    for module in (*draft.inputs, *draft.layers[bottom:], draft.norm):
        module.requires_grad_(False)
