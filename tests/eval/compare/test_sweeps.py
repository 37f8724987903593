"""Names of methods: sweeps in braces, and which names are one family."""

from __future__ import annotations

import pytest

from dcar.config import load_config
from dcar.errors import ConfigError
from eval.compare.run import CompareConfig
from eval.compare.sweeps import expand_names
from eval.methods.families import group_families, parse_method
from eval.methods.registry import METHODS
from eval.results.rows import strict_baseline


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


@pytest.mark.parametrize(("name", "kind", "family", "settings"), [
    ("far", "far", "far", ()), ("car-3", "car", "car", (3.0,)), ("random-2-3-4", "random", "random", (2.0, 3.0, 4.0)),
    ("dcar", "dcar", "dcar", ()), ("dcar@range-2-3", "dcar", "dcar", ("range-2-3",)),
    ("dcar-sampled@a", "dcar-sampled", "dcar-sampled", ("a",)), ("ssd-0.4", "ssd", "ssd", (0.4,)),
    ("ssd-0.4@heads", "ssd", "ssd@heads", (0.4,)), ("sd@heads", "sd", "sd@heads", ()),
    ("pcg--0.5", "pcg", "pcg", (-0.5,)), ("mtp-viterbi-5", "mtp-viterbi", "mtp-viterbi", (5.0,)),
    ("mtp-viterbi-ffbs-5", "mtp-viterbi", "mtp-viterbi@ffbs", (5.0,)),
    ("topk-verify-5", "topk-verify", "topk-verify", (5.0,)), ("new-thing-2", "new-thing", "new-thing", (2.0,)),
])
def test_names_are_taken_apart(name, kind, family, settings):
    parsed = parse_method(name)
    assert (parsed.kind, parsed.family, parsed.settings) == (kind, family, settings)
    assert parse_method(family).kind == kind  # a family's key is a name itself
    assert parse_method(family).family == family


def test_families_are_sorted_by_number_not_by_text():
    rows = [{"method": m, "kind": "method"} for m in ("ssd-0.4", "car-10", "ssd-0", "car-2", "odd-1", "far")]
    grouped = group_families([*rows, {"method": "recording", "kind": "reference"}])
    assert {f: [r["method"] for r in members] for f, members in grouped.items()} == {
        "far": ["far"], "car": ["car-2", "car-10"], "ssd": ["ssd-0", "ssd-0.4"], "odd": ["odd-1"]}
    assert list(grouped) == ["far", "car", "ssd", "odd"]
    draws = [{"method": m, "kind": "method"} for m in ("dcar@n16", "car-2", "dcar@n4@t0", "dcar@n8", "dcar", "dcar@n4")]
    assert list(group_families(draws)) == ["car", "dcar", "dcar@n4", "dcar@n4@t0", "dcar@n8", "dcar@n16"]


def test_methods_are_told_apart():
    assert all(prefix == kind.prefix and parse_method(kind.example).kind == prefix for prefix, kind in METHODS.items())
    for of in ("label", "color", "marker"):
        assert len({getattr(kind.style, of) for kind in METHODS.values()}) == len(METHODS)


def test_relaxed_verifiers_are_measured_against_their_own_sd():
    methods = ["sd", "sd@heads", "ssd-0.4", "ssd-0.4@heads", "car-3"]
    assert strict_baseline("ssd-0.4", methods) == "sd"
    assert strict_baseline("ssd-0.4@heads", methods) == "sd@heads"
    assert strict_baseline("pcg-0.5@draft", methods) == "sd"
    assert strict_baseline("ssd-0.4-eos@draft", [*methods, "sd@draft"]) == "sd@draft"
    assert strict_baseline("ssd-0.4-eos", methods) == strict_baseline("vadusa-2", methods) == "sd"
    assert strict_baseline("ssd-0.4", ["car-3"]) is None
    assert strict_baseline("car-3", methods) is strict_baseline("sd", methods) is None
