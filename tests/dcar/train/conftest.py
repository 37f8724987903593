"""Data of the tests of training."""

from pathlib import Path

import pytest
from tiny_data import counting, write_prepared


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """18 utterances to train on, 9 to validate: no batch size of these tests divides them.
    Nobody changes them."""
    return write_prepared(
        tmp_path_factory.mktemp("data") / "prepared", train=18, dev=9, speech=counting
    )
