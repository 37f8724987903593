"""Families of a picture are told apart, and what belongs together looks related."""

import itertools
from colorsys import rgb_to_hsv

import pytest
from compare_worker import made_row
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from dcar.decoding import PolicyChunk
from dcar.methods.find import every_method
from dcar.text.bootstrap import Interval
from eval.methods.families import family_of
from eval.report.plots import plot_errors
from eval.results.types import RESYNTHESIS, Row

NAMES = (
    "dcar dcar@d0.5 dcar@n2 dcar@n4 dcar@n4@d0.5 dcar@n8 dcar@n16 dcar@t0.4 dcar@n4@t0.4".split()
)


@pytest.fixture
def drawn(monkeypatch) -> list[dict]:
    """Options of the lines that were drawn through methods."""
    lines, plot = [], Axes.plot

    def recorded(self, x, y, *more, **options):
        if len(x) and options.get("ms") and not more:
            lines.append(options)
        return plot(self, x, y, *more, **options)

    monkeypatch.setattr(Axes, "plot", recorded)
    return lines


def row(name: str, place: int) -> Row:
    wer = Interval(0.1, [0.09, 0.11], 0.005)
    return made_row(name, wer=wer, tokens_per_pass=5 + 0.3 * place)


def test_every_number_of_draws_has_a_shade_and_a_mark(drawn, tmp_path):
    plot_errors(
        [row(name, i) for i, name in enumerate(NAMES)], "tokens_per_pass", tmp_path / "plot.png"
    )
    looks = [(line["color"], line["marker"], line["ls"]) for line in drawn]
    assert len(looks) == len(set(looks)) == 7  # families, each drawn once
    one, cold, two, four, cold_four, eight, sixteen = looks  # in the order of draws
    assert one[:2] == cold[:2] == (every_method()["dcar"].style.color, "D") and one[2] != cold[2]
    # another sampling: other dashes
    assert four[:2] == cold_four[:2] and four[2] == one[2] != cold_four[2]
    assert [look[1] for look in (two, four, eight, sixteen)] == [(n, 1, 0) for n in (2, 4, 8, 16)]
    shades = [rgb_to_hsv(*to_rgb(look[0])) for look in (one, two, four, eight, sixteen)]
    assert all(shade[0] == pytest.approx(shades[0][0], abs=0.02) for shade in shades)
    assert all(a[2] - b[2] > 0.1 for a, b in itertools.pairwise(shades))


@pytest.mark.parametrize(("floor", "shown"), [(0.01, False), (0.105, True), (0.3, False)])
def test_a_floor_that_is_far_away_is_in_the_legend_alone(
    monkeypatch, recwarn, tmp_path, floor, shown
):
    """Recordings may be understood less well than what a decoder says of them."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path: figures.append(self) or save(self, path)
    )
    reference = made_row(RESYNTHESIS, floor)
    plot_errors(
        [row("dcar", 0), row("dcar@d0.5", 1), reference], "tokens_per_pass", tmp_path / "plot.png"
    )
    (figure,) = figures
    low, high = figure.axes[0].get_ylim()
    assert (low < 100 * floor < high) == shown
    (legend,) = figure.legends
    assert any(f"{100 * floor:.1f} %" in text.get_text() for text in legend.get_texts())
    assert not [str(w.message) for w in recwarn if "layout" in str(w.message)]


def test_other_methods_have_another_hue_or_mark_than_those_of_several_draws():
    others = {(cls.style.color, cls.style.marker) for cls in every_method().values()}
    looks = [
        (style.color, style.marker)
        for style in (
            family_of({"method": kind, "num_candidates": n}).style
            for kind, cls in every_method().items()
            if issubclass(cls, PolicyChunk)
            for n in range(2, 33)
        )
    ]
    assert len({*looks, *others}) == len(looks) + len(others)
