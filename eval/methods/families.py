"""Families of methods: the rows of a comparison that are one method at several settings, one line
of a plot.

`ssd-0.2` and `ssd-0.4` are the family SSD at β = 0.2 and 0.4. Settings that change the method and
not its degree, those with a `word` in KINDS (eval/methods/kinds.py), make separate families: a
draft model, four candidates. So does a method's own sampling: `car-3@t0.4` and `car-5@t0.4` are the
family CAR-k (T 0.4), a line by k in addition to that of the common sampling. The methods at their
own best sampling, which may differ, are the family CAR-k (own best). Policies, and the dial of a
policy, are points of one line.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.methods.kinds import DRAFTED, EOS, KINDS, Style, value_text
from eval.methods.spec import split_sampling

Settings = Mapping[str, Any]  # a method as a mapping (eval/methods/spec.py)
SYMBOLS = {"temperature": "T", "top_k": "top-k", "top_p": "top-p"}


@dataclass(frozen=True)
class Family:
    """Methods that differ only in settings without a word. method: their kind, a key of KINDS or
    a path; words: for a reader; sampling: likewise, T 0.4, empty for the common one."""

    method: str
    words: tuple[str, ...] = ()
    sampling: str = ""
    num_candidates: int = 1

    @property
    def label(self) -> str:
        """Name of the family, which no other has: SSD, SSD (draft model, T 0.4)."""
        name = KINDS[self.method].style.label if self.method in KINDS else self.method
        words = [*self.words, self.sampling] if self.sampling else self.words
        return f"{name} ({', '.join(words)})" if words else name

    @property
    def style(self) -> Style:
        """Drawing style; families that differ only by their sampling look alike."""
        style = KINDS[self.method].style if self.method in KINDS else Style("")
        return style.of_candidates(self.num_candidates)


def family_of(settings: Settings) -> Family:
    """Return the family of a method."""
    own, sampling = split_sampling(settings)
    kind = KINDS.get(own["method"])
    words = [
        s.word.format(own[s.name])
        for s in (kind.settings if kind else (EOS, *DRAFTED))
        if s.word and s.name in own
    ]
    sampled = ", ".join(f"{SYMBOLS[k]} {v:g}" for k, v in sampling.items() if k in SYMBOLS)
    return Family(
        own["method"],
        tuple(words),
        sampled or ("own best" if sampling else ""),
        own.get("num_candidates", 1) if kind and kind.policies else 1,
    )


def setting_text(settings: Settings) -> str:
    """Return what distinguishes a method within its family, 0.4 or 2-3-4; empty if nothing does."""
    return "-".join(value_text(v) for v in _varying(settings) if v is not None)


def _varying(settings: Settings) -> list[Any]:
    """Return the values that differ within a family, None where a default applies."""
    own, _ = split_sampling(settings)
    if kind := KINDS.get(own["method"]):
        values = [own.get(s.name) for s in kind.settings if not s.word]
    else:
        words = {"method", EOS.name, *(s.name for s in DRAFTED)}
        values = [value for name, value in own.items() if name not in words]
    return [v for value in values for v in (value if isinstance(value, list) else [value])]


def short_name(name: str) -> str:
    """Return a method's name for use in a sentence: random-4…16 for random-4-5-6-…-16, if at
    least four sizes are consecutive."""

    def ends(m: re.Match[str]) -> str:
        sizes = [int(size) for size in m[0].split("-")]
        follow = len(sizes) > 3 and sizes == list(range(sizes[0], sizes[0] + len(sizes)))
        return f"{sizes[0]}…{sizes[-1]}" if follow else m[0]

    return re.sub(r"(?<=-)\d+(?:-\d+)+(?![\w.])", ends, name)


def group_families(rows: Sequence[dict[str, Any]]) -> dict[Family, list[dict[str, Any]]]:
    """Group rows of methods (not references) by family, in the order of KINDS, then of
    candidates, each sorted by its settings."""
    grouped: dict[Family, list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "method":
            grouped.setdefault(family_of(row["settings"]), []).append(row)
    order = list(KINDS)

    def rank(family: Family) -> tuple[int, int, str]:
        place = order.index(family.method) if family.method in order else len(order)
        return place, family.num_candidates, family.label

    def place(row: dict[str, Any]) -> list[tuple[str, float]]:
        # a policy is placed by its name, and without a dial at 0
        return [
            (v, 0.0) if isinstance(v, str) else ("", v or 0.0) for v in _varying(row["settings"])
        ]

    return {family: sorted(grouped[family], key=place) for family in sorted(grouped, key=rank)}
