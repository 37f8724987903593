"""Which rows of a comparison are one method at several settings, and what a reader calls them."""

import pytest

from dcar.methods import MethodSpec, read_methods
from dcar.methods.find import every_method
from eval.methods.families import family_of, group_families, setting_text, short_name


@pytest.mark.parametrize(
    ("name", "label", "setting"),
    [
        ("far", "FAR", ""),
        ("car-3", "CAR-k", "3"),
        ("dcar", "DCAR", ""),
        ("ssd-0.4", "SSD", "0.4"),
        ("sd@draft", "SD (draft model)", ""),
        ("pcg--0.5", "PCG", "-0.5"),
        ("vadusa-2-n32", "VADUSA (32 nodes)", "2"),
        ("vadusa-2-chain@t0", "VADUSA (chain, T 0)", "2"),
        ("ssd-1e-05", "SSD", "1e-05"),
        ("car-5@t0.4", "CAR-k (T 0.4)", "5"),
        ("dcar@a@t0.8-k10", "DCAR (a, T 0.8, top-k 10)", ""),
        ("dcar@a@n4@d-0.5", "DCAR (a, 4 candidates)", "-0.5"),
        ("dcar@n8@t0.4", "DCAR (8 candidates, T 0.4)", ""),
        ("ssd-0.4-eos@draft@t0.6-p0.9", "SSD (eos, draft model, T 0.6, top-p 0.9)", "0.4"),
        ("random-2-3@tuned", "random size (own best)", "2-3"),
    ],
)
def test_family_and_setting_of_a_method(name, label, setting):
    mapping = MethodSpec.parse(name).to_mapping()
    assert (family_of(mapping).label, setting_text(mapping)) == (label, setting)


def test_a_method_that_no_name_lists_is_its_own_family():
    """As the entries that the analysis of swapped tokens adds to a comparison."""
    mapping = {"method": "pcg-0.4 swapped"}
    assert (family_of(mapping).label, setting_text(mapping)) == ("pcg-0.4 swapped", "")


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
    assert short_name(name, MethodSpec.parse(name).to_mapping()) == short


@pytest.mark.parametrize(
    ("names", "families"),
    [
        (
            ["ssd-0.4", "car-10", "ssd-0", "car-2", "far"],  # by number, not by text
            {"FAR": ["far"], "CAR-k": ["car-2", "car-10"], "SSD": ["ssd-0", "ssd-0.4"]},
        ),
        (
            ["dcar@n16", "car-2", "dcar@n4@t0", "dcar@n8", "dcar", "dcar@n4"],
            {
                "CAR-k": ["car-2"],
                "DCAR": ["dcar"],
                "DCAR (4 candidates)": ["dcar@n4"],
                "DCAR (4 candidates, T 0)": ["dcar@n4@t0"],
                "DCAR (8 candidates)": ["dcar@n8"],
                "DCAR (16 candidates)": ["dcar@n16"],
            },
        ),
        # a dial is one line
        (
            ["dcar", "dcar@d0.5", "dcar@d-1.5", "dcar@b", "dcar@b@d-1", "dcar@n4", "dcar@n4@d-0.4"],
            {
                "DCAR": ["dcar@d-1.5", "dcar", "dcar@d0.5"],
                "DCAR (b)": ["dcar@b@d-1", "dcar@b"],
                "DCAR (4 candidates)": ["dcar@n4@d-0.4", "dcar@n4"],
            },
        ),
        # k and temperature: a line a temperature
        (
            ["car-{1,3}", "car-{3,1}@t{0,0.4}", "car-{1,3}@tuned", "far@t0"],
            {
                "FAR (T 0)": ["far@t0"],
                "CAR-k": ["car-1", "car-3"],
                "CAR-k (T 0)": ["car-1@t0", "car-3@t0"],
                "CAR-k (T 0.4)": ["car-1@t0.4", "car-3@t0.4"],
                "CAR-k (own best)": ["car-1@tuned", "car-3@tuned"],
            },
        ),
    ],
)
def test_families_are_in_order(names, families):
    rows = [(str(spec), spec.to_mapping()) for spec in read_methods(names)]
    grouped = group_families([*rows, ("recording", None)], lambda row: row[1])
    assert {
        family.label: [name for name, _ in members] for family, members in grouped.items()
    } == families
    assert [family.label for family in grouped] == list(families)


def test_methods_are_told_apart():
    styles = [cls.style for cls in every_method().values()]
    for of in ("label", "color", "marker"):
        assert len({getattr(style, of) for style in styles}) == len(styles)
