"""Counts and sums of a run's quantities, merged over steps and processes: a mean is taken once, at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable

from accelerate.utils import gather_object


class Meter:
    """Collects quantities between two lines of the log."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}
        self._counts: dict[str, list[float]] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """A mean is logged: sum of totals / sum of counts."""
        a, b = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (a + float(total), b + float(count))

    def add_values(self, name: str, values: Iterable[float]) -> None:
        """The mean of the values that are finite is logged."""
        finite = [float(v) for v in values if math.isfinite(v)]
        self.add(name, sum(finite), len(finite))

    def add_max(self, name: str, value: float) -> None:
        self._maxima[name] = max(float(value), self._maxima.get(name, -math.inf))

    def add_counts(self, name: str, counts: Iterable[float]) -> None:
        """Shares of a total are logged, as a list."""
        new = [float(c) for c in counts]
        self._counts[name] = [a + b for a, b in zip(self._counts.get(name, [0.0] * len(new)), new, strict=True)]

    def drain(self) -> dict[str, float | list[float]]:
        """The quantities of all processes, and start anew. Every process has to call it."""
        states = gather_object([(self._sums, self._maxima, self._counts)])
        self._sums, self._maxima, self._counts = {}, {}, {}
        merged = Meter()
        for sums, maxima, counts in states:
            for name, (total, count) in sums.items():
                merged.add(name, total, count)
            for name, value in maxima.items():
                merged.add_max(name, value)
            for name, values in counts.items():
                merged.add_counts(name, values)
        out: dict[str, float | list[float]] = {k: a / b for k, (a, b) in merged._sums.items() if b}
        out.update(merged._maxima)
        for name, values in merged._counts.items():
            out[name] = [v / max(1.0, sum(values)) for v in values]
        return out
