"""Decoders and policies of a few thousand parameters, decoders with known ends, and states
without a cache."""

from collections.abc import Sequence
from unittest.mock import patch

import torch
from torch import Tensor

from dcar.decoding import Prompt
from dcar.model.batch import speech_batch
from dcar.model.car import CARConfig, CARDecoder
from heads.build import Heads, build_heads
from heads.policy import HiddenPolicy, HiddenPolicyConfig
from heads.shared import SharedHeads


@torch.no_grad()
def draw_blocks(heads: Heads) -> Heads:
    """Draw the blocks' weights, which start at zero, at random; return the heads."""
    for weight in (
        [down.weight for down in heads.down]
        if isinstance(heads, SharedHeads)
        else [heads.block_weight]
    ):
        bound = weight.shape[-1] ** -0.5
        weight.uniform_(-bound, bound)
    return heads


def random_blocks(module: str):
    """Let decoders that are built in `module` begin with `draw_blocks`."""
    return patch(f"{module}.build_heads", lambda *a: draw_blocks(build_heads(*a)))


def sharpen_heads(heads: Heads, factor: float) -> None:
    """Scale the heads so that distributions are far from uniform and, in shared heads, offsets
    far from each other."""
    with torch.no_grad():
        heads.base.weight.mul_(factor)
        if isinstance(heads, SharedHeads):
            heads.offset.mul_(5)
            heads.scale.normal_(std=0.5)
            if heads.out is not None:
                heads.out.weight.mul_(factor)
        else:
            heads.projection.mul_(factor)


def tiny_decoder(heads: int = 4, seed: int = 0, kind: str = "independent", **changes) -> CARDecoder:
    """Return a random decoder of a few thousand parameters, sharpened so that its distributions
    are far from uniform."""
    torch.manual_seed(seed)
    settings = dict(
        text_vocab_size=20,
        speech_vocab_size=12,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=2,
        ffn_size=64,
        num_prediction_heads=heads,
        head_blocks=2,
        bos=True,
        speech_position_scale=0.5,
        heads=kind,
    )
    with random_blocks("dcar.model.car"):
        model = CARDecoder(CARConfig(**{**settings, **changes})).eval()
    sharpen_heads(model.heads, 3)
    return model


def policy_of(
    width: int | None = 16, seed: int = 0, base: str = "", features: int = 32, std: float = 2.0
) -> HiddenPolicy:
    """Return a random policy on the hidden states of a tiny decoder (with the checksum `base`),
    far from uniform."""
    torch.manual_seed(seed)
    policy = HiddenPolicy(
        HiddenPolicyConfig(features, 4, width=width, num_attention_heads=2, base_checksum=base)
    ).eval()
    torch.nn.init.normal_(policy.output.weight, std=std)
    return policy


@torch.no_grad()
def states(model, prompt: Prompt, tokens: Sequence[int] = ()) -> Tensor:
    """Return the hidden states [S, D] of a prompt and the tokens after it, computed without a
    cache."""
    front = [
        *prompt.prompt_ids,
        *([model.config.speech_vocab_size + 1] if model.config.bos else []),
    ]
    batch = speech_batch([prompt.text_ids], [[*front, *tokens]], [len(front)])
    return model.speech_hidden(batch)[0]


def eos_decoder(head: int) -> CARDecoder:
    """Return a decoder of which one head always predicts EOS and the others never do."""
    model = tiny_decoder()
    with torch.no_grad():
        model.heads.block_weight.zero_()
        model.heads.block_bias.zero_()
        model.norm.weight.zero_()
        model.norm.bias.fill_(1.0)
        for k, weight in enumerate([model.heads.base.weight, *model.heads.projection], start=1):
            weight[12] = 10.0 if k == head else -10.0
    return model
