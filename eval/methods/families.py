"""Families of methods: the rows of a comparison that are one method at several settings, one line
of a plot.

`ssd-0.2` and `ssd-0.4` are the family SSD at β = 0.2 and 0.4. Settings that change the method and
not its degree, those with a `word` (`dcar.decoding.declare.option`), make separate families: a
draft model, four candidates. So does a method's own sampling: `car-3@t0.4` and `car-5@t0.4` are the
family CAR-k (T 0.4), a line by k in addition to that of the common sampling. The methods at their
own best sampling, which may differ, are the family CAR-k (own best). Policies, and the dial of a
policy, are points of one line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dcar.decoding.declare import Style, has_setting, settings_of, value_text
from dcar.methods.find import class_of, every_method
from dcar.methods.names import split_sampling

T = TypeVar("T")
Settings = Mapping[str, Any]  # a method as a mapping (dcar/methods/names.py)
SYMBOLS = {"temperature": "T", "top_k": "top-k", "top_p": "top-p"}


@dataclass(frozen=True)
class Family:
    """Methods that differ only in settings without a word. method: their name without settings;
    title: what a reader calls it; words: for a reader; sampling: likewise, T 0.4, empty for the
    common one; decoder: name of another decoder than that of the comparison."""

    method: str
    title: str
    words: tuple[str, ...] = ()
    sampling: str = ""
    num_candidates: int = 1
    decoder: str = ""

    @property
    def label(self) -> str:
        """Name of the family, which no other has: SSD, SSD (draft model, T 0.4)."""
        return f"{self.title} ({self.qualifier})" if self.qualifier else self.title

    @property
    def qualifier(self) -> str:
        """Words that distinguish it from families of the same title."""
        return ", ".join(filter(None, [*self.words, self.sampling]))

    @property
    def fixed(self) -> bool:
        """Whether these are the fixed sizes that others are compared with: CAR-k by the decoder of
        the comparison."""
        return self.method == "car" and not self.decoder

    @property
    def style(self) -> Style:
        """Drawing style; families that differ only by their sampling look alike."""
        return class_of(self.method).style.of_candidates(self.num_candidates)


def family_of(settings: Settings) -> Family:
    """Return the family of a method."""
    own, sampling = split_sampling(settings)
    cls = class_of(own["method"])
    words = [s.word.format(own[s.name]) for s in settings_of(cls) if s.word and s.name in own]
    sampled = ", ".join(f"{SYMBOLS[k]} {v:g}" for k, v in sampling.items() if k in SYMBOLS)
    candidates = own.get("num_candidates", 1) if has_setting(cls, "policy") else 1
    return Family(
        own["method"],
        cls.style.label or own["method"],
        tuple(words),
        sampled or ("own best" if sampling else ""),
        candidates,
        own.get("decoder", ""),
    )


def setting_text(settings: Settings) -> str:
    """Return what distinguishes a method within its family, 0.4 or 2-3-4; empty if nothing does."""
    return "-".join(value_text(v) for v in _varying(settings) if v is not None)


def _varying(settings: Settings) -> list[Any]:
    """Return the values that differ within a family, None where a default applies."""
    own, _ = split_sampling(settings)
    listed = settings_of(class_of(own["method"]))
    values = [own.get(s.name) for s in listed if not s.word]
    return [v for value in values for v in (value if isinstance(value, list) else [value])]


def short_name(name: str, settings: Settings) -> str:
    """Return a method's name for use in a sentence: random-4…16 for random-4-5-6-…-16, if at
    least four sizes are consecutive."""
    for value in settings.values():
        several = isinstance(value, list) and len(value) > 3
        if several and value == list(range(value[0], value[0] + len(value))):
            name = name.replace("-".join(map(str, value)), f"{value[0]}…{value[-1]}")
    return name


def group_families(
    rows: Sequence[T], spec_of: Callable[[T], Settings | None]
) -> dict[Family, list[T]]:
    """Group rows of methods (not references) by family, in the order of registration, then of
    candidates, each sorted by its settings. spec_of: returns the mapping of a row's method."""
    grouped: dict[Family, list[tuple[list[tuple[str, float]], T]]] = {}
    for row in rows:
        if (settings := spec_of(row)) is not None:
            # a policy is placed by its name, and without a dial at 0
            place = [(v, 0.0) if isinstance(v, str) else ("", v or 0.0) for v in _varying(settings)]
            grouped.setdefault(family_of(settings), []).append((place, row))
    order = list(every_method())

    def rank(family: Family) -> tuple[int, int, str]:
        place = order.index(family.method) if family.method in order else len(order)
        return place, family.num_candidates, family.label

    return {
        family: [row for _, row in sorted(grouped[family], key=lambda placed: placed[0])]
        for family in sorted(grouped, key=rank)
    }
