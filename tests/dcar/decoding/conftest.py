"""The kernels for the CPU, as this processor has them and as one without AVX-512 would."""

from __future__ import annotations

import os

import pytest

from dcar.decoding.fast.cpu.native import Kernels


@pytest.fixture(params=[(), ("-mno-avx512f",)] if os.uname().machine == "x86_64" else [()],
                ids=lambda flags: " ".join(flags) or "native")
def own(request) -> Kernels:
    return Kernels(request.param)
