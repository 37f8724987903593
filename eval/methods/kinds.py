"""Kinds of methods that ship, as data: settings, compact name, label and style of each.

A setting defines its place in the compact name: `mark` precedes its value (`-0.4`, `@draft`, `:4`,
`@n8`), or is all that is written of a flag (`-eos`). The settings of a kind are listed in the order
in which their values are written. eval/methods/registry.py builds methods from their settings;
eval/methods/spec.py reads mappings and names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from dcar.config import setting
from dcar.config.schema import Meaning, meaning_of, settings_of
from dcar.sampling import SamplingConfig
from eval.verifiers import mtp_viterbi
from eval.verifiers.relaxed import DELTA, EPSILON


@dataclass(frozen=True)
class MethodSetting:
    """Setting of a kind of method.

    mark: precedes its value in a compact name; default: ... if it is required, None if it may be
    omitted; word: its value for a reader, as in "{} candidates". Methods that differ in a setting
    with a word are separate families, not points on one line of a plot.
    """

    name: str
    type: Any = float
    mark: str = "-"
    default: Any = ...
    word: str = ""
    bounds: Meaning = field(default_factory=Meaning)

    def written(self, value: Any) -> str:
        """Return the setting as in a compact name."""
        if self.type is bool:
            return self.mark
        values = value if isinstance(value, list) else [value]
        return "".join(f"{self.mark}{value_text(v)}" for v in values)


def value_text(value: str | float) -> str:
    """Return a value as in a name: numbers in their shortest form, 0.4 and not 0.40, 3 and not
    3.0."""
    return value if isinstance(value, str) else repr(value).removesuffix(".0")


def option(
    name: str, type: Any = float, mark: str = "-", default: Any = ..., word: str = "", **bounds: Any
) -> MethodSetting:
    """Declare a setting; bounds and choices are those of `dcar.config.setting`."""
    return MethodSetting(name, type, mark, default, word, meaning_of(setting(None, **bounds)))


@dataclass(frozen=True)
class Style:
    """Label and drawing style of a kind of method. symbol: of its setting; marker: a shape of
    matplotlib."""

    label: str
    color: str = "#4d4d4d"
    marker: str | tuple[int, int, int] = "x"
    symbol: str = ""

    def of_candidates(self, num_candidates: int) -> Style:
        """Return the style of a method that chooses among so many candidates: the same hue,
        darker, and a star with as many points."""
        if num_candidates == 1:
            return self
        strength = max(0.3, 1 - 0.15 * math.log2(num_candidates))
        shade = "".join(f"{round(strength * part):02x}" for part in bytes.fromhex(self.color[1:]))
        return replace(self, color=f"#{shade}", marker=(num_candidates, 1, 0))


@dataclass(frozen=True)
class MethodKind:
    """Kind of method. Its compact names are the prefix followed by the settings in order."""

    prefix: str
    example: str  # a name, as it is written
    style: Style
    settings: tuple[MethodSetting, ...] = ()
    verifies: bool = False  # a pass checks drafted tokens
    policies: bool = False  # needs a policy: one entry per policy, unless its name contains one
    plugin: type[Any] | None = None  # class from outside this project


EOS = option("eos", bool, "-eos", False, "eos")  # the rule is relaxed for the end of speech too
DRAFTED = (
    option("draft", str, "@", "heads", "draft model", choices=("heads", "draft")),
    option("length", int, ":", None, "{} drafted", minimum=1),
)


def _of_sampling(name: str, type: Any, mark: str) -> MethodSetting:
    return MethodSetting(name, type, mark, None, bounds=settings_of(SamplingConfig)[name].meaning)


SAMPLING = (
    _of_sampling("temperature", float, "@t"),
    _of_sampling("top_k", int, "-k"),
    _of_sampling("top_p", float, "-p"),
    option("tuned", bool, "@tuned", False),
)
"""Settings that end every name: car-5@t0.8-k10-p0.9. car-5@tuned is a row at the best sampling
of a tuned.json."""
LIMIT = option("limit", int, minimum=0)
"""Utterances of a method in a comparison: part of a mapping, not of the method."""
SIZE = option("size", int, minimum=1)
THETA = option("theta", above=-1, maximum=1)
POLICY = (
    option("policy", str, "@", None),
    option("num_candidates", int, "@n", 1, "{} candidates", minimum=1),
    option("dial", float, "@d", 0.0),
)

KINDS: dict[str, MethodKind] = {
    kind.prefix: kind
    for kind in (  # in the order of tables and plots
        MethodKind("far", "far", Style("FAR", "#222222", "s")),
        MethodKind("car", "car-3", Style("CAR-k", "#1f5fa8", "o", "k"), (SIZE,)),
        MethodKind(
            "random",
            "random-2-3-4",
            Style("random size", "#8a8f98", "v"),
            (option("sizes", list[int], minimum=1),),
        ),
        MethodKind(
            "end-on-confident",
            "end-on-confident-4-7",
            Style("end on confident", "#6b8e23", "H"),
            (option("shortest", int, minimum=1), option("longest", int, minimum=1)),
        ),
        MethodKind(
            "best-of",
            "best-of-10-4",
            Style("best of several chunks", "#7a4b12", r"$\clubsuit$"),
            (SIZE, option("num_candidates", int, minimum=2)),
        ),
        MethodKind("dcar", "dcar", Style("DCAR", "#d1361c", "D"), POLICY, policies=True),
        MethodKind(
            "dcar-sampled",
            "dcar-sampled",
            Style("DCAR sampled", "#ee8866", "d"),
            POLICY,
            policies=True,
        ),
        MethodKind(
            "dcar-shuffled",
            "dcar-shuffled",
            Style("DCAR shuffled in time", "#b9a394", "|"),
            POLICY,
            policies=True,
        ),
        MethodKind(
            "entropy",
            "entropy-0.8",
            Style("entropy", "#c98a00", "h", "h"),
            (
                option("threshold", float, "-", None, minimum=0),
                option("tokens_per_pass", float, "@", None, minimum=0),
            ),
        ),
        MethodKind(
            "mtp-viterbi",
            "mtp-viterbi-4-5",
            Style("MTP-Viterbi", "#2a8f4e", "p", "n"),
            (
                option("heads", int, minimum=1),
                option("k", int, "-", mtp_viterbi.IDS_PER_HEAD, minimum=1),
            ),
        ),
        MethodKind("sd", "sd", Style("SD", "#5b2a86", "X"), DRAFTED, verifies=True),
        MethodKind(
            "ssd",
            "ssd-0.4",
            Style("SSD", "#8d5fc0", ">", "β"),
            (option("beta", minimum=0), EOS, *DRAFTED),
            verifies=True,
        ),
        MethodKind(
            "pcg", "pcg-0.42", Style("PCG", "#c4318c", "<", "θ"), (THETA, *DRAFTED), verifies=True
        ),
        MethodKind(
            "pcg-mel",
            "pcg-mel-0.9",
            Style("PCG by mel", "#8f1f5c", "8", "θ"),
            (THETA, *DRAFTED),
            verifies=True,
        ),
        MethodKind(
            "vadusa",
            "vadusa-2",
            Style("VADUSA", "#008b8b", "^", "τ"),
            (
                option("tau", int, minimum=1),
                option("nodes", int, "-n", None, "{} nodes", minimum=1),
                option("chained", bool, "-chain", False, "chain"),
            ),
            verifies=True,
        ),
        MethodKind(
            "typical",
            "typical",
            Style("typical", "#8a5a2b", "P"),
            (
                option("epsilon", default=EPSILON, above=0, maximum=1),
                option("delta", default=DELTA, above=0),
                EOS,
                *DRAFTED,
            ),
            verifies=True,
        ),
        MethodKind(
            "topk-verify",
            "topk-verify-50",
            Style("top-k verify", "#74820a", "*", "k"),
            (option("k", int, minimum=1), EOS, *DRAFTED),
            verifies=True,
        ),
    )
}
