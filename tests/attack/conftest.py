"""The jobs that are attacked."""

import harness
import pytest


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, harness.Job]:
    return harness.jobs(harness.make_data(tmp_path_factory.mktemp("attack")))
