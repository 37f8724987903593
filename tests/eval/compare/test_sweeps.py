"""Names of methods: sweeps in braces."""

from __future__ import annotations

import pytest

from dcar.config import load_config
from dcar.errors import ConfigError
from eval.compare.run import CompareConfig
from eval.compare.sweeps import expand_names


def test_braces_expand_in_order():
    assert expand_names(["far", "ssd-{0,0.1, 0.4}", "car-1"]) == ["far", "ssd-0", "ssd-0.1", "ssd-0.4", "car-1"]
    assert expand_names(["{ssd,pcg}-{0,1}@heads"]) == ["ssd-0@heads", "ssd-1@heads", "pcg-0@heads", "pcg-1@heads"]
    assert expand_names([]) == []


@pytest.mark.parametrize("bad", ["ssd-{0,1", "ssd-0,1}", "ssd-{0,{1,2}}", "ssd-{}", "ssd-{0}", "ssd-{0,}", "ssd-{,1}",
                                 "ssd-{0,1}}", "ssd-}0,1{"])
def test_broken_braces_are_refused_and_named(bad):
    with pytest.raises(ConfigError) as error:
        expand_names(["far", bad])
    assert bad in str(error.value)
    with pytest.raises(ConfigError):
        CompareConfig(methods=[bad])


def test_braces_on_the_command_line():
    config = load_config(CompareConfig, ['methods=[far,"ssd-{0,0.4}"]', "draft=d", "statistics=s"])
    assert expand_names(config.methods) == ["far", "ssd-0", "ssd-0.4"]
    assert (config.draft, config.statistics) == ("d", "s")
