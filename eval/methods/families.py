"""Families of methods: the rows of a comparison that are one method at several settings, one line
of a plot.

`ssd-0.2` and `ssd-0.4` are the family ssd at β = 0.2 and 0.4. Words after a name (`ssd-0.4@heads`)
make a separate family, because they change the method and not its setting. The names after `dcar@`
are settings: policies, and the dial of a policy (`dcar@d0.3`); the number of candidates makes a
family (`dcar@n4`). A method's own sampling makes a family too: `car-3@t0.4` and `car-5@t0.4` are
the family car@t0.4, a line by k in addition to that of the common sampling. The methods at their
own best sampling, which may differ, are the family car@tuned. Label and style of a kind of method
are in its entry of KINDS (eval/methods/kinds.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcar.errors import ConfigError
from eval.methods.kinds import KINDS, LENGTH, MethodKind, MethodSetting, Style
from eval.methods.plugins import prefix_of
from eval.methods.spec import NUMBER, MethodSpec

OTHER = Style("")  # of rows whose method this version does not know
READ = {"temperature": "T", "top_k": "top-k", "top_p": "top-p"}
ANY_DRAFT = (MethodSetting("draft", str, "@", None, word=True), LENGTH)


@dataclass(frozen=True)
class MethodName:
    """Description of a row's method for tables and plots. base: its name without a sampling;
    words: what makes it a separate family within its kind, ("eos", "draft") of
    ssd-0.4-eos@draft; settings: what varies within the family, numbers or names; sampling: t0.4,
    tuned, or empty for the common one; sampled: the same for a reader, T 0.4; num_candidates:
    candidates of a policy."""

    base: str
    kind: str
    words: tuple[str, ...]
    settings: tuple[float | str, ...]
    sampling: str = ""
    sampled: str = ""
    num_candidates: int = 1

    @property
    def family(self) -> str:
        """Name of the family: ssd, ssd@heads, ssd@heads@t0.4; `parse_method` reads it too."""
        return at_sampling("@".join([self.kind, *self.words]), self.sampling)

    @property
    def entry(self) -> MethodKind | None:
        """Entry of the kind in KINDS, if there is one."""
        return KINDS.get(self.kind)

    @property
    def style(self) -> Style:
        """Drawing style; families that differ only by their sampling look alike."""
        return (self.entry.style if self.entry else OTHER).of_candidates(self.num_candidates)

    @property
    def label(self) -> str:
        """Label of the family: SSD, SSD (heads), SSD (heads, T 0.4)."""
        words = (
            [f"{self.num_candidates} candidates"] if self.num_candidates > 1 else list(self.words)
        )
        words += [self.sampled] if self.sampled else []
        label = self.style.label or self.kind
        return f"{label} ({', '.join(words)})" if words else label

    @property
    def setting(self) -> str:
        """Setting as text, 0.4 or 2-3-4; empty if there is none."""
        return "-".join(f"{s:g}" if isinstance(s, float) else s for s in self.settings)


def parse_method(name: str) -> MethodName:
    """Describe the method or family with this name. If KINDS does not contain its kind (that of
    a plug-in or another version), the numbers are settings, and the text after them makes
    families; an unreadable name is its own kind."""
    try:
        prefix = prefix_of(name) or re.split(rf"[@:]|-(?={NUMBER}(?:[-@:]|$))", name, maxsplit=1)[0]
        kind = KINDS.get(prefix) or MethodKind(
            prefix, prefix, OTHER, (MethodSetting("numbers", list[float], default=None), *ANY_DRAFT)
        )
        spec = MethodSpec.parse(name, kind)
    except ConfigError:
        return MethodName(name, name, (), ())
    given = spec.settings
    if "length" in given:  # a draft of so many tokens by the heads, which are the default
        given = {"draft": "heads", **given}
    words = "@".join(
        s.written(given[s.name]).lstrip("-@") for s in kind.settings if s.word and s.name in given
    )
    values = [
        v
        for s in kind.settings
        if not s.word and s.name in given
        for v in (given[s.name] if isinstance(given[s.name], list) else [given[s.name]])
    ]
    sampled = ", ".join(f"{READ[k]} {v:g}" for k, v in spec.sampling.items() if k in READ)
    return MethodName(
        name.removesuffix(f"@{spec.word}"),
        prefix,
        tuple(filter(None, words.replace("@:", ":").split("@"))),
        tuple(v if isinstance(v, str) else float(v) for v in values),
        spec.word,
        sampled or ("own best" if spec.sampling else ""),
        given.get("num_candidates", 1) if kind.policies else 1,
    )


def short_name(name: str) -> str:
    """Return a method's name for use in a sentence: random-4…16 for random-4-5-6-…-16, if at
    least four sizes are consecutive."""

    def ends(m: re.Match[str]) -> str:
        sizes = [int(size) for size in m[0].split("-")]
        follow = len(sizes) > 3 and sizes == list(range(sizes[0], sizes[0] + len(sizes)))
        return f"{sizes[0]}…{sizes[-1]}" if follow else m[0]

    return re.sub(r"(?<=-)\d+(?:-\d+)+(?![\w.])", ends, name)


def at_sampling(name: str, sampling: str) -> str:
    """Return the name of a method at a sampling, as far@t0.4; empty: the common one."""
    return f"{name}@{sampling}" if sampling else name


def group_families(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group rows of methods (not references) by family, in the order of KINDS, then of
    candidates, each sorted by its setting."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "method":
            grouped.setdefault(parse_method(row["method"]).family, []).append(row)
    order = list(KINDS)

    def rank(family: str) -> tuple[int, int, str]:
        name = parse_method(family)
        return (
            order.index(name.kind) if name.kind in order else len(order),
            name.num_candidates,
            family,
        )

    def setting(row: dict[str, Any]) -> tuple[tuple[int, float, str], ...]:
        name = parse_method(row["method"])
        settings = name.settings
        if name.entry and name.entry.policies and not any(isinstance(s, float) for s in settings):
            settings = (*settings, 0.0)  # a policy without a dial stands at 0
        return tuple((0, s, "") if isinstance(s, float) else (1, 0.0, s) for s in settings)

    return {family: sorted(grouped[family], key=setting) for family in sorted(grouped, key=rank)}
