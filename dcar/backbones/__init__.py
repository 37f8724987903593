"""CAR heads and DCPO on language models of `transformers`: CosyVoice 2, LLaSA, or any Llama- or Qwen-like model.

    dcar convert-backbone kind=cosyvoice2 source=pretrained_models/CosyVoice2-0.5B out=runs/cosyvoice2
    dcar retokenize data=runs/prepared decoder=runs/cosyvoice2 out=runs/prepared_cosyvoice2
    dcar train backbone.path=runs/cosyvoice2 backbone.train=lora data=runs/prepared_cosyvoice2 out_dir=runs/car_lora
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import torch

from dcar.backbones.decoder import BackboneConfig, BackboneDecoder
from dcar.errors import CheckpointError
from dcar.model import CARConfig, CARDecoder

__all__ = ["BackboneConfig", "BackboneDecoder", "load_decoder", "load_decoder_config"]


def _class_of(directory: str | Path) -> type[CARDecoder] | type[BackboneDecoder]:
    path = Path(directory) / "config.json"
    try:
        kind = json.loads(path.read_text()).get("model_type")
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot read the model's configuration ({error}); give the directory of a "
                              "decoder, as `dcar train` and `dcar convert-backbone` write it") from error
    if kind in ("qwen2", "llama", "mistral", "qwen3"):
        raise CheckpointError(f"{path}: this is a '{kind}' language model as it was published; make a decoder of it "
                              f"first: dcar convert-backbone kind=… source={directory} out=…")
    from dcar.draft import BackboneDraft, DraftDecoder  # which are made of decoders

    known = {c.model_type: c for c in (BackboneDecoder, BackboneDraft, DraftDecoder)}
    return known.get(kind, CARDecoder)


def load_decoder(directory: str | Path, device: str | torch.device = "cpu") -> CARDecoder:
    """A decoder or a draft of either kind, in eval mode, by what its config.json says. CheckpointError if it is none.

    Typed as CARDecoder, whose interface all have.
    """
    return cast(CARDecoder, _class_of(directory).from_pretrained(directory, device))


def load_decoder_config(directory: str | Path) -> CARConfig | BackboneConfig:
    """Its configuration alone."""
    return _class_of(directory).load_config(directory)
