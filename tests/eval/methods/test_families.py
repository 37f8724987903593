"""Names taken apart: which rows of a comparison are one method at several settings, and what a
reader calls them."""

import pytest

from eval.methods.families import group_families, parse_method, short_name
from eval.methods.kinds import KINDS
from eval.methods.sweeps import expand_names


@pytest.mark.parametrize(
    ("name", "kind", "family", "settings", "label"),
    [
        ("far", "far", "far", (), "FAR"),
        ("car-3", "car", "car", (3.0,), "CAR-k"),
        ("random-2-3-4", "random", "random", (2.0, 3.0, 4.0), "random size"),
        ("dcar", "dcar", "dcar", (), "DCAR"),
        ("dcar@range-2-3", "dcar", "dcar", ("range-2-3",), "DCAR"),
        ("dcar-sampled@a", "dcar-sampled", "dcar-sampled", ("a",), "DCAR sampled"),
        ("ssd-0.4", "ssd", "ssd", (0.4,), "SSD"),
        ("ssd-0.4@heads", "ssd", "ssd@heads", (0.4,), "SSD (heads)"),
        ("sd@heads", "sd", "sd@heads", (), "SD (heads)"),
        ("pcg--0.5", "pcg", "pcg", (-0.5,), "PCG"),
        ("sd:4", "sd", "sd@heads:4", (), "SD (heads:4)"),
        ("ssd-0.4:2", "ssd", "ssd@heads:2", (0.4,), "SSD (heads:2)"),
        ("mtp-viterbi-5", "mtp-viterbi", "mtp-viterbi", (5.0,), "MTP-Viterbi"),
        ("vadusa-2-n32", "vadusa", "vadusa@n32", (2.0,), "VADUSA (n32)"),
        ("vadusa-2-chain@t0", "vadusa", "vadusa@chain@t0", (2.0,), "VADUSA (chain, T 0)"),
        ("entropy@3.0", "entropy", "entropy", (3.0,), "entropy"),
        ("ssd-1e-05", "ssd", "ssd", (1e-05,), "SSD"),
        # none of ours
        (
            "mtp-viterbi-ffbs-5",
            "mtp-viterbi-ffbs-5",
            "mtp-viterbi-ffbs-5",
            (),
            "mtp-viterbi-ffbs-5",
        ),
        (
            "new.Thing-2-0.5:4@t0",
            "new.Thing",
            "new.Thing@heads:4@t0",
            (2.0, 0.5),
            "new.Thing (heads:4, T 0)",
        ),
        ("topk-verify-5", "topk-verify", "topk-verify", (5.0,), "top-k verify"),
        ("new-thing-2", "new-thing", "new-thing", (2.0,), "new-thing"),
        ("car-5@t0.4", "car", "car@t0.4", (5.0,), "CAR-k (T 0.4)"),
        ("far@t0", "far", "far@t0", (), "FAR (T 0)"),
        ("dcar@a@t0.8-k10", "dcar", "dcar@t0.8-k10", ("a",), "DCAR (T 0.8, top-k 10)"),
        ("dcar@a@n4@d-0.5", "dcar", "dcar@n4", ("a", -0.5), "DCAR (4 candidates)"),
        ("dcar@d0.3", "dcar", "dcar", (0.3,), "DCAR"),
        ("dcar@n8@t0.4", "dcar", "dcar@n8@t0.4", (), "DCAR (8 candidates, T 0.4)"),
        ("best-of-10-4", "best-of", "best-of", (10.0, 4.0), "best of several chunks"),
        (
            "ssd-0.4-eos@draft@t0.6-p0.9",
            "ssd",
            "ssd@eos@draft@t0.6-p0.9",
            (0.4,),
            "SSD (eos, draft, T 0.6, top-p 0.9)",
        ),
        ("random-2-3@tuned", "random", "random@tuned", (2.0, 3.0), "random size (own best)"),
    ],
)
def test_names_are_taken_apart(name, kind, family, settings, label):
    parsed = parse_method(name)
    assert (parsed.kind, parsed.family, parsed.settings, parsed.label) == (
        kind,
        family,
        settings,
        label,
    )
    assert parse_method(family).kind == kind  # a family's key is a name itself
    assert parse_method(family).family == family and parse_method(family).label == label
    assert "t0" not in "".join(parsed.words) and (parsed.entry is not None) == (kind in KINDS)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("random-4-5-6-7-8", "random-4…8"),
        ("random-4-5-6-7@t0.4", "random-4…7@t0.4"),
        ("random-4-5-6", "random-4-5-6"),
        ("random-4-6-8-10", "random-4-6-8-10"),
        ("best-of-10-4", "best-of-10-4"),
        ("dcar@n4@d-0.5", "dcar@n4@d-0.5"),
    ],
)
def test_names_in_sentences_are_short(name, short):
    assert short_name(name) == short


@pytest.mark.parametrize(
    ("names", "families"),
    [
        (
            ["ssd-0.4", "car-10", "ssd-0", "car-2", "odd-1", "far"],  # by number, not by text
            {
                "far": ["far"],
                "car": ["car-2", "car-10"],
                "ssd": ["ssd-0", "ssd-0.4"],
                "odd": ["odd-1"],
            },
        ),
        (
            ["dcar@n16", "car-2", "dcar@n4@t0", "dcar@n8", "dcar", "dcar@n4"],
            {
                "car": ["car-2"],
                **{n: [n] for n in ("dcar", "dcar@n4", "dcar@n4@t0", "dcar@n8", "dcar@n16")},
            },
        ),
        # a dial is one line
        (
            ["dcar", "dcar@d0.5", "dcar@d-1.5", "dcar@b", "dcar@b@d-1", "dcar@n4", "dcar@n4@d-0.4"],
            {
                "dcar": ["dcar@d-1.5", "dcar", "dcar@d0.5", "dcar@b@d-1", "dcar@b"],
                "dcar@n4": ["dcar@n4@d-0.4", "dcar@n4"],
            },
        ),
        # k and temperature: a line a temperature
        (
            ["car-{1,3}", "car-{3,1}@t{0,0.4}", "car-{1,3}@tuned", "far@t0"],
            {
                "far@t0": ["far@t0"],
                "car": ["car-1", "car-3"],
                "car@t0": ["car-1@t0", "car-3@t0"],
                "car@t0.4": ["car-1@t0.4", "car-3@t0.4"],
                "car@tuned": ["car-1@tuned", "car-3@tuned"],
            },
        ),
    ],
)
def test_families_are_in_order(names, families):
    rows = [{"method": name, "kind": "method"} for name in expand_names(names)]
    grouped = group_families([*rows, {"method": "recording", "kind": "reference"}])
    assert {
        family: [row["method"] for row in members] for family, members in grouped.items()
    } == families
    assert list(grouped) == list(families)


def test_methods_are_told_apart():
    assert all(
        prefix == kind.prefix and parse_method(kind.example).kind == prefix
        for prefix, kind in KINDS.items()
    )
    for of in ("label", "color", "marker"):
        assert len({getattr(kind.style, of) for kind in KINDS.values()}) == len(KINDS)
