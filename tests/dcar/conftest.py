"""A GPU, or its stand-in."""

import fake_gpu
import pytest
import torch


@pytest.fixture
def device(monkeypatch):
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with fake_gpu.fake_gpu(monkeypatch) as device:
        yield device
