"""A made-up comparison of every family of methods, and a strict reader of the page."""

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from compare_worker import made_record, made_result, made_timing

from dcar.methods import read_methods
from eval.results.pareto import equal_speed, speed_axis
from eval.results.rows import counts_of, make_rows
from eval.results.types import RESYNTHESIS, Result

VOID = {"meta", "img", "br", "hr", "link", "input"}
NAMES = [
    str(spec)
    for spec in read_methods(
        (
            "far car-{1,2,3} dcar entropy-{1,2} mtp-viterbi-{2,3} sd ssd-{0,0.4} "
            "pcg-{0.4,0.5} vadusa-{2,3} typical topk-verify-{5,10}"
        ).split()
    )
]


@pytest.fixture(scope="session")
def comparison() -> Result:
    """Made-up records of every family: ten utterances, verifiers accept the first of two drafted
    tokens."""
    rng = np.random.default_rng(0)
    records, timings = [], []
    for m, name in enumerate([RESYNTHESIS, *NAMES]):
        checks = name.startswith(("sd", "ssd", "pcg", "vadusa", "typical", "topk"))
        for u in range(10):
            records.append(
                made_record(
                    name,
                    f"u{u}",
                    int(rng.integers(0, 8)),
                    passes=10,
                    tokens=[1] * (20 + m),
                    sizes=[],
                    emitted=[],
                    proposed=[2] * 10 * checks,
                    accepted=[1] * 10 * checks,
                )
            )
            timings.append(made_timing(name, f"u{u}", 1 / (1 + 0.1 * m), vocoder=0.1, tokens=20))
    rows = make_rows(records, [RESYNTHESIS, *NAMES], timings, resamples=200)
    spoken, counts = [row for row in rows if row.decodes], counts_of(records)
    axes = (speed_axis(spoken), "tokens_per_pass")
    return made_result(
        rows, pairs=[p for axis in axes for p in equal_speed(spoken, counts, axis, 200)]
    )


class Strict(HTMLParser):
    """Every tag is closed in order; collects attributes and text."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.sources: list[tuple[str, str]] = []
        self.tags: set[str] = set()
        self.text = ""
        self.code = ""  # style and script
        self.links: list[str] = []  # within the page
        self.ids: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        for name, value in attributes:
            if name in ("src", "href", "data", "srcset") and not value.startswith("#"):
                self.sources.append((tag, value))
            if name == "href" and value.startswith("#"):
                self.links.append(value[1:])
            if name == "id":
                self.ids.append(value)
            assert not name.startswith("on")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "style"):
            self.code += data
        else:
            self.text += data


@pytest.fixture(scope="session")
def parse():
    return parsed


def parsed(path: Path) -> Strict:
    parser = Strict()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    assert parser.open == []
    return parser
