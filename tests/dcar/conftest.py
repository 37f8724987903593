"""A GPU, or its stand-in."""

import fake_gpu
import pytest
import torch


@pytest.fixture
def device(monkeypatch):
    if torch.cuda.is_available():
        precision = torch.get_float32_matmul_precision()
        # other tests may have set TF32, with which tokens are not those of a CPU
        torch.set_float32_matmul_precision("highest")
        yield torch.device("cuda")
        torch.set_float32_matmul_precision(precision)
        return
    with fake_gpu.fake_gpu(monkeypatch) as device:
        yield device
