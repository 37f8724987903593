"""A small corpus to prepare."""

from pathlib import Path

import pytest
from tiny_corpora import write_starter


@pytest.fixture(scope="package")
def corpus(tmp_path_factory) -> Path:
    """15 utterances in three splits; nobody changes it."""
    return write_starter(tmp_path_factory.mktemp("corpus"))
