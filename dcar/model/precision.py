"""Precision of decoding: the type of a decoder's weights, and float32 products on a GPU.

Every command that decodes has the setting `dtype`. In bfloat16 a step reads half the bytes.
Whatever the type, distributions, features of candidates, scores of chunk ends and the chunk scorer
are computed in float32. A policy in training keeps its float32 weights, and decodes as a rounded
copy.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch

from dcar.config.commands import DTYPES
from dcar.errors import ConfigError
from dcar.model.backbones.decoder import BackboneDecoder, cast_backbone
from dcar.model.draft import AnyDecoder

if TYPE_CHECKING:
    from heads.policy import ChunkPolicy


def chosen_dtype(dtype: str, device: str | torch.device) -> torch.dtype:
    """Resolve the setting `dtype` for a device. On a GPU, float32 products of this process run in
    TF32 from now on.

    Raises ConfigError for a word that is not in DTYPES.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}; not '{dtype}'")
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    return torch.bfloat16 if dtype == "bfloat16" or (dtype == "auto" and on_gpu) else torch.float32


def cast_decoder(decoder: AnyDecoder, dtype: torch.dtype) -> AnyDecoder:
    """Round the weights of a decoder that is not trained any more, in place. Its checksum stays
    that of the weights before, so that models trained for it still fit. For a language model,
    see `cast_backbone`."""
    if decoder.norm.weight.dtype == dtype:
        return decoder
    decoder.keep_checksum()
    return (
        cast_backbone(decoder, dtype) if isinstance(decoder, BackboneDecoder) else decoder.to(dtype)
    )


def matched_policy(policy: ChunkPolicy, decoder: AnyDecoder) -> ChunkPolicy:
    """Return the policy in the type of the hidden states that it reads: a rounded copy with the
    same checksum, or the policy itself if the types agree or it reads candidates only."""
    last = decoder.heads.base if isinstance(decoder, BackboneDecoder) else decoder.norm
    dtype = last.weight.dtype
    if policy.after_draw or next(policy.parameters()).dtype == dtype:
        return policy
    policy = deepcopy(policy)
    policy.keep_checksum()
    return policy.to(dtype)


def precision_of(decoder: AnyDecoder) -> dict[str, str]:
    """Describe, for provenance, the precision in which a decoder computes: the type of its
    layers, and float32 products in full ("ieee") or in TF32."""
    weight = decoder.norm.weight
    tf32 = weight.device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "dtype": str(weight.dtype).removeprefix("torch."),
        "float32_products": "tf32" if tf32 else "ieee",
    }


def precision_identity(decoder: AnyDecoder) -> dict[str, str]:
    """Return the name of the precision if tokens may differ from those of full float32: bfloat16
    or tf32; else an empty one."""
    precision = precision_of(decoder)
    name = precision["dtype"] if precision["dtype"] != "float32" else precision["float32_products"]
    return {} if name == "ieee" else {"precision": name}
