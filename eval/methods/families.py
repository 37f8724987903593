"""Which rows of a comparison are one method at several settings: a family is one line of the plot.

`ssd-0.2` and `ssd-0.4` are the family ssd at β = 0.2 and 0.4; words behind a name (`ssd-0.4@heads`) make a family of
its own, because they change the method and not its setting; so does `@int8` (`car-3@int8`: int8 layers). The other
names behind `dcar@` are settings: policies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Style:
    """How a family is called and drawn. `symbol`: its setting. `verifies`: a pass checks drafted tokens."""

    label: str
    color: str
    marker: str
    symbol: str = ""
    verifies: bool = False


STYLES: dict[str, Style] = {
    "far": Style("FAR", "#222222", "s"),
    "car": Style("CAR-k", "#1f5fa8", "o", "k"),
    "random": Style("random size", "#8a8f98", "v"),
    "dcar": Style("DCAR", "#d1361c", "D"),
    "dcar-sampled": Style("DCAR sampled", "#ee8866", "d"),
    "entropy": Style("entropy", "#c98a00", "h", "h"),
    "mtp-viterbi": Style("MTP-Viterbi", "#2a8f4e", "p", "n"),
    "sd": Style("SD", "#5b2a86", "X", verifies=True),
    "ssd": Style("SSD", "#8d5fc0", ">", "β", True),
    "pcg": Style("PCG", "#c4318c", "<", "θ", True),
    "vadusa": Style("VADUSA", "#008b8b", "^", "τ", True),
    "typical": Style("typical", "#8a5a2b", "P", verifies=True),
    "topk-verify": Style("top-k verify", "#74820a", "*", "k", True),
    "oracle": Style("oracle", "#555555", "1"),
}
OTHER = Style("", "#4d4d4d", "x")
INT8 = "@int8"  # behind any method's name: the decoder's layers multiply in int8
POLICIES = ("dcar", "dcar-sampled")
_PART = re.compile(r"[-@](-?\d+(?:\.\d+)?(?=[-@]|$)|[^-@]+)")


@dataclass(frozen=True)
class MethodName:
    """A method's name taken apart. family: ssd, ssd@heads; settings: what varies within it, numbers or names."""

    kind: str
    family: str
    settings: tuple[float | str, ...]

    @property
    def style(self) -> Style:
        return STYLES.get(self.kind, OTHER)

    @property
    def label(self) -> str:
        """What a reader calls the family: SSD, SSD (heads)."""
        variant = self.family.removeprefix(self.kind).removeprefix("@")
        label = self.style.label or self.kind
        return f"{label} ({variant})" if variant else label

    @property
    def setting(self) -> str:
        """The setting as text, 0.4 or 2-3-4; empty where there is none."""
        return "-".join(f"{s:g}" if isinstance(s, float) else s for s in self.settings)


def parse_method(name: str) -> MethodName:
    """Take a method's name apart; a kind that is not in STYLES is what stands before the first number."""
    if (plain := name.removesuffix(INT8)) != name:
        of = parse_method(plain)
        return MethodName(of.kind, of.family + INT8, of.settings)
    kinds = [k for k in STYLES if name == k or name.startswith((f"{k}-", f"{k}@"))]
    kind = max(kinds, key=len) if kinds else re.split(r"[-@](?=\d)|@", name, maxsplit=1)[0]
    rest = name.removeprefix(kind)
    if kind in POLICIES:
        return MethodName(kind, kind, (rest[1:],) if rest else ())
    parts = _PART.findall(rest)
    numbers = tuple(float(p) for p in parts if _is_number(p))
    words = [p for p in parts if not _is_number(p)]
    return MethodName(kind, "@".join([kind, *words]), numbers)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", text) is not None


def group_families(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of methods (no references) by family, in the order of STYLES, each sorted by its setting."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "method":
            grouped.setdefault(parse_method(row["method"]).family, []).append(row)
    order = list(STYLES)

    def rank(family: str) -> tuple[int, str]:
        kind = parse_method(grouped[family][0]["method"]).kind
        return (order.index(kind) if kind in order else len(order), family)

    def setting(row: dict[str, Any]) -> tuple[tuple[int, float, str], ...]:
        return tuple((0, s, "") if isinstance(s, float) else (1, 0.0, s)
                     for s in parse_method(row["method"]).settings)

    return {family: sorted(grouped[family], key=setting) for family in sorted(grouped, key=rank)}


def family_label(family: str) -> str:
    """The label of a family key (the key itself is a valid method name)."""
    return parse_method(family).label
