"""CosyVoice-300M in small, as published and as a decoder."""

from pathlib import Path

import pytest
import torch
from tiny_backbones import write_cosyvoice1

from dcar.model.backbones.cosyvoice import load_cosyvoice1
from dcar.model.backbones.decoder import BackboneDecoder


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("CosyVoice-300M")
    return folder, write_cosyvoice1(folder)


@pytest.fixture
def cosyvoice(published) -> BackboneDecoder:
    torch.manual_seed(1)  # the blocks of the heads are drawn here
    made = load_cosyvoice1(published[0], num_prediction_heads=3, head_blocks=1)
    with torch.no_grad():
        made.heads.projection.mul_(3)
    return made
