"""Shared fixtures: one thread per test process (thread thrashing costs up to 100x on two cores),
and tiny models."""

import gc
import importlib.util
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tiny_data import counting, write_prepared
from tiny_decoders import tiny_decoder

from dcar.decoding import Prompt
from dcar.model.car import CARDecoder

torch.set_num_threads(1)
settings.register_profile("the same examples in every run", derandomize=True)
settings.load_profile("the same examples in every run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the files, and the tests of each, if TEST_ORDER=SEED is set: no test may depend on
    what ran before it."""
    if not (seed := os.environ.get("TEST_ORDER")):
        return
    rng = random.Random(seed)
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(str(item.path), []).append(item)
    for tests in (groups := rng.sample(list(files.values()), len(files))):
        rng.shuffle(tests)
    items[:] = [item for tests in groups for item in tests]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `needs(package)` if the package is not installed."""
    for mark in item.iter_markers("needs"):
        if importlib.util.find_spec(mark.args[0]) is None:
            pytest.skip(f"no {mark.args[0]} (pip install -e '.[dev]')")
        if mark.args[0] == "nemo" and sys.version_info < (3, 11, 4):
            pytest.skip("NeMo needs Python 3.11.4")


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection: Accelerate collects in every training,
    which takes seconds with them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def decoder() -> CARDecoder:
    return tiny_decoder()


@pytest.fixture
def prompts() -> list[Prompt]:
    """Return seven prompts of different text and prompt lengths for `tiny_decoder`."""
    return [
        Prompt(
            f"utt{i}",
            tuple((3 * i + j) % 19 + 1 for j in range(3 + i)),
            tuple((i + j) % 12 for j in range(i)),
        )
        for i in range(7)
    ]


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Return a prepared corpus whose speech counts, so that all but its ends can be learned."""
    folder = tmp_path_factory.mktemp("data") / "prepared"
    return write_prepared(folder, train=18, dev=9, speech=counting)
