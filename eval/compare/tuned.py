"""tuned.json, the best sampling of every method as found by `dcar tune`, and its use in a
comparison.

A comparison at one common sampling favours the methods that it happens to suit. With
`tuned=runs/tune/tuned.json`, every row at the common sampling is followed by one at the method's
own best sampling (`car-5@tuned`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dcar.errors import CheckpointError, ConfigError, DataError
from dcar.methods import Entry
from dcar.sampling import SamplingConfig
from dcar.text.bootstrap import Interval
from eval.results.types import STRICT, Variety, brief, from_versioned

FORMAT_VERSION = 2
ABOUT = ("split", "utterances", "seeds", "prompt_seeds", "recognizer")
TUNED = "tuned"  # after @ in a name: the best sampling of a tuned.json


@STRICT
@dataclass
class Point:
    """One sampling of a method, by its name (t0.4-k10), and what the method does with it.
    difference, p_value: of word errors, to the best point."""

    name: str
    temperature: float
    top_k: int
    top_p: float
    wer: Interval
    tokens_per_pass: float
    variety: Variety
    truncation_rate: float
    duration_ratio: float | None
    n: int
    records: int
    difference: float
    p_value: float | None

    @property
    def not_worse(self) -> bool:
        """True if chance alone may have made another point the best."""
        return self.p_value is None or self.p_value > 0.05


@STRICT
@dataclass
class TunedMethod:
    """Points of a method, and the name of the one with the fewest word errors."""

    best: str
    identity: dict[str, str]
    grid: list[Point]

    @property
    def point(self) -> Point:
        """The best point."""
        return next(point for point in self.grid if point.name == self.best)


@STRICT
@dataclass
class Search:
    """Content of tuned.json."""

    methods: dict[str, TunedMethod]
    common: SamplingConfig
    split: str
    recognizer: str
    normalizer: str
    seeds: list[int]
    prompt_seeds: list[int]
    utterances: int
    corpus: dict[str, Any]
    models: dict[str, str]
    provenance: dict[str, Any]
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Tuned:
    """A tuned.json and its path."""

    path: Path
    search: Search

    def beside(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries, each entry at the common sampling followed by the same method at its
        own best one, if it was tuned.

        Raises CheckpointError if a method was tuned with another decoder, policy or draft model,
        and ConfigError if none of the methods was tuned.
        """
        both: list[Entry] = []
        for entry in entries:
            both.append(entry)
            if entry.spec.sampling or entry.name not in self.search.methods:
                continue
            tuned = self.search.methods[entry.name]
            # precision does not change which sampling is best
            named = sorted({*entry.identity, *tuned.identity} - {"precision"})
            wrong = [k for k in named if entry.identity.get(k) != tuned.identity.get(k)]
            if wrong:
                sides = "; ".join(
                    f"{k} {str(tuned.identity.get(k))[:12]} there, "
                    f"{str(entry.identity.get(k))[:12]} here"
                    for k in wrong
                )
                raise CheckpointError(
                    f"{self.path}: '{entry.name}' was tuned with other models ({sides}); run `dcar "
                    "tune` with those of this comparison"
                )
            best = {k: getattr(tuned.point, k) for k in ("temperature", "top_k", "top_p")}
            spec = replace(entry.spec, sampling={TUNED: True})
            both.append(replace(entry, spec=spec, sampling=replace(entry.sampling, **best)))
        if len(both) == len(entries):
            raise ConfigError(
                f"{self.path} has none of the methods of this comparison, only "
                f"{', '.join(self.search.methods)}; tune them (`dcar tune methods=[…]`), or leave "
                "`tuned` out"
            )
        return both

    def about(self, entries: Sequence[Entry], split: str) -> dict[str, Any]:
        """Return the entry `tuned` of compare.json: where the samplings come from, and which
        methods have none."""
        own = {e.name for e in entries}
        common = [e.name for e in entries if not e.spec.sampling]
        return {
            "path": str(self.path),
            "same_split": self.search.split == split,
            **{name: getattr(self.search, name) for name in ABOUT},
            "missing": [n for n in common if f"{n}@{TUNED}" not in own],
        }


def load_tuned(path: str | Path) -> Tuned:
    """Read a tuned.json. Raises DataError if it is missing, damaged or of another format."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        remedy = "run `dcar tune` again"
        return Tuned(
            path, from_versioned(Search, text, path, FORMAT_VERSION, remedy, "format_version")
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read ({brief(error)}); run `dcar tune` to write it again (the "
            "records of an earlier run are kept)"
        ) from error
