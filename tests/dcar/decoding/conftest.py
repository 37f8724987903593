"""Kernels as they are compiled for this processor, and for others; a GPU or its stand-in."""

import os

import fake_gpu
import pytest
import torch

from dcar.decoding.cpu.native import Kernels

# compiler flags: for this processor, and for one without AVX-512
FLAGS: list[tuple[str, ...]] = [(), ("-mno-avx512f",)] if os.uname().machine == "x86_64" else [()]
VARIANTS = [(torch.float32, FLAGS[0]), (torch.bfloat16, FLAGS[0]), (torch.bfloat16, ("-DPORTABLE",))]
for flags in FLAGS[1:]:
    VARIANTS += [(torch.float32, flags), (torch.bfloat16, (*flags, "-DPORTABLE"))]


@pytest.fixture(params=VARIANTS, ids=lambda v: " ".join((str(v[0]).removeprefix("torch."), *v[1])))
def own(request) -> Kernels:
    return Kernels(*request.param)


@pytest.fixture(params=FLAGS, ids=lambda flags: " ".join(flags) or "native")
def own32(request) -> Kernels:
    return Kernels(torch.float32, request.param)


@pytest.fixture
def device(monkeypatch):
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with fake_gpu.fake_gpu(monkeypatch) as device:
        yield device
