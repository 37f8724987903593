"""int8 weights for decoding on the CPU, as an option: a quarter of the bytes that a step reads, at some loss.

Dynamic quantisation (weights int8 per tensor, activations quantised as they come) of the Transformer layers' matrices.
Embeddings, norms and the prediction heads keep their precision: the heads make the laws that are sampled from.
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn

from dcar.decoding.fast.stack import own_layers
from dcar.errors import ConfigError
from dcar.model.car import CARDecoder


def quantize_int8(model: CARDecoder) -> CARDecoder:
    """A copy of a float32 CPU decoder whose layers multiply in int8; for decoding only.

    Its tokens differ from the original's; compare losses (`teacher_forced_loss`) and word error rates before use. It
    keeps no checksum of its own, so a policy must be checked against the original. ConfigError away from the CPU and
    for a decoder that is not made of this project's layers.
    """
    if own_layers(model) is None:
        raise ConfigError(f"int8 decoding quantises the layers of a CARDecoder, not of a {type(model).__name__}; leave "
                          "int8 out for it")
    weight = model.norm.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        raise ConfigError(f"int8 decoding quantises float32 weights on the CPU, not {weight.dtype} on "
                          f"{weight.device}; move the model first, or decode in bfloat16")
    if not torch.backends.quantized.supported_engines:
        raise ConfigError("this build of torch has no int8 kernels; decode in float32")
    out = copy.deepcopy(model).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces a successor of this interface
        for layer in out.layers:
            torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8, inplace=True)
    return out


@torch.no_grad()
def teacher_forced_loss(model: CARDecoder, text: torch.Tensor, text_lengths: torch.Tensor, speech: torch.Tensor,
                        speech_lengths: torch.Tensor, prompt_lengths: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy (nats) of each head [K]: what quantisation costs, without sampling noise."""
    return model(text, text_lengths, speech, speech_lengths, prompt_lengths).head_losses
