"""The studio behind the page, with narrow limits; it is loaded once."""

import pytest

from eval.demo.studio import DemoConfig, Studio


@pytest.fixture(scope="session")
def studio() -> Studio:
    return Studio(DemoConfig(characters=60, megabytes=1.0))
