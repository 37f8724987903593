"""Kernels of a step on a GPU and the bytes that they move, counted without one for a decoder of the
paper's size, and kernels of the vocoder (tests/toys/cuda_kernels.py)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOYS = Path(__file__).parents[2] / "toys"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("triton"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which makes the stand-in"),
]
KERNELS = {"far": 90, "car-7": 100, "sd": 110, "dcar@n4": 125, "pcg": 130}
"""Most kernels of a step at batch 1. There are 76, 83, 92, 96 and 103; in operators alone there
were 235, 256, 307, 397 and 484."""
CACHE = 32 * 512 * 2 * 1024 * 2
"""Bytes of the keys and values of a layer, of 32 rows."""


def counted(*arguments: str) -> dict[str, dict]:
    """Return the counts of methods, all in one process."""
    done = subprocess.run(
        [sys.executable, TOYS / "cuda_kernels.py", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-2000:]
    assert "could not be compiled" not in done.stderr, done.stderr[-2000:]
    return {line["method"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def single() -> dict[str, dict]:
    return counted(*KERNELS)


@pytest.mark.parametrize("method", KERNELS)
def test_a_step_has_few_kernels(method, single):
    assert single[method]["kernels"] <= KERNELS[method]


def test_five_methods_compile_in_one_process(single):
    """PyTorch refuses more than 8 variants of a function, and the step would run by operators."""
    assert len(single) == 5


def test_a_step_of_a_batch_copies_no_cache():
    """Inductor copied keys and values of every layer when the cache was one tensor: 14.1 GB. Of
    the least that remains, 610 MB are keys and values and 310 (far) or 380 (car-7) weights."""
    steps = counted("far", "car-7", "--rows", "32")
    assert all(step["megabytes"] <= 1200 for step in steps.values())
    assert steps["far"]["written"] < CACHE / 4


@pytest.mark.parametrize(
    ("chosen", "most"),
    [
        (["--temperature", "0.8", "--top-k", "50", "--top-p", "0.9"], 90),
        (["--cosyvoice", "--top-k", "25", "--top-p", "0.8", "--window", "10"], 158),
    ],
    ids=["top-k and top-p", "CosyVoice 2's"],
)
def test_sampling_sorts_nothing(chosen, most):
    """There are 87 kernels and 154. With a sort there were 94; with one for each head, and the
    distributions of heads one after the other, 215."""
    assert counted("car-7", *chosen)["car-7"]["kernels"] <= most


def test_a_piece_of_speech_is_one_graph():
    """There are 265 kernels, and 9 launches around them, which fill its inputs and copy its
    results. In operators a streamed piece was 275, and
    a wait for the device."""
    found = counted("vocoder")["vocoder"]
    assert found["kernels"] <= 270 and found["launched"] <= 9
