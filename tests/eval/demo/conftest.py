"""The studio behind the page, with narrow limits; it is loaded once."""

import pytest

from eval.demo.studio import Limits, Studio


@pytest.fixture(scope="session")
def studio() -> Studio:
    return Studio.load(limits=Limits(characters=60, seconds=3.0, megabytes=1.0))
