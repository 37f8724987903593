"""Sampling as a setting of a method: what stands behind its name.

    car-5@t0.4               temperature 0.4; top-k and top-p as in the comparison's common sampling
    sd@draft:4@t0.8-k10      and top-k 10
    dcar@name@t0.8-k10-p0.9  and top-p 0.9
    car-5@tuned              the method's own best sampling, of a tuned.json (`dcar tune`)

It is taken off the name here, before a kind of method sees it: every kind can be sampled as one likes, and none has to
know. Everything else of the sampling (limits of length, repetition window) is the comparison's, for all methods alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig

TUNED = "tuned"
NUMBER = r"\d+(?:\.\d+)?"
_SUFFIX = re.compile(rf"(?P<method>.*)@t(?P<temperature>{NUMBER})(?:-k(?P<top_k>\d+))?(?:-p(?P<top_p>{NUMBER}))?")
_BEGUN = re.compile(r"@t[-\d.]|@t$|@tuned.")  # looks like a sampling; no policy may be called so (`names_sampling`)


@dataclass(frozen=True)
class OwnSampling:
    """What a name says of sampling; None: as in the common sampling."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None

    @property
    def word(self) -> str:
        """As it stands in a name: t0.4-k10."""
        return self._joined("-", "t", "k", "p")

    @property
    def label(self) -> str:
        """As a reader reads it: T 0.4, top-k 10."""
        return self._joined(", ", "T ", "top-k ", "top-p ")

    def _joined(self, between: str, *names: str) -> str:
        return between.join(f"{name}{value:g}" for name, value in zip(names, vars(self).values(), strict=True)
                            if value is not None)

    def of(self, common: SamplingConfig, name: str) -> SamplingConfig:
        """The common sampling with what is said here. ConfigError, with the method's name, if that is impossible."""
        try:
            return replace(common, **{k: v for k, v in vars(self).items() if v is not None})
        except ConfigError as error:
            raise ConfigError(f"method '{name}': {error}") from error


def split_sampling(name: str) -> tuple[str, OwnSampling | None]:
    """A method's name without its sampling, and the sampling, None where it has none of its own.

    ConfigError for a sampling that is not written as above.
    """
    found = _SUFFIX.fullmatch(name)
    if found and not _BEGUN.search(found["method"]):
        top_k, top_p = found["top_k"], found["top_p"]
        return found["method"], OwnSampling(float(found["temperature"]), int(top_k) if top_k else None,
                                            float(top_p) if top_p else None)
    if _BEGUN.search(name):
        raise ConfigError(f"method '{name}': write its sampling at the end, temperature, then top-k, then top-p, as in "
                          "car-5@t0.4, car-5@t0.8-k10, car-5@t0.8-k10-p0.9")
    return name, None


def parse_sampling(word: str) -> OwnSampling:
    """A sampling alone, t0.4-k10. ConfigError for what is none."""
    found = split_sampling(f"@{word}")[1]
    if found is None:
        raise ConfigError(f"sampling '{word}': write temperature, then top-k, then top-p, as in t0.4 or t0.8-k10-p0.9")
    return found


def split_label(name: str) -> tuple[str, str, str]:
    """For tables and plots: the name without its sampling, the sampling's word and what a reader calls it.

    Both are empty for the common sampling; a name that is malformed (of a row that another version wrote) has none.
    """
    if name.endswith(f"@{TUNED}"):
        return name.removesuffix(f"@{TUNED}"), TUNED, "own best"
    try:
        method, own = split_sampling(name)
    except ConfigError:
        return name, "", ""
    return (method, own.word, own.label) if own else (name, "", "")


def names_sampling(policy: str) -> bool:
    """Whether a policy of this name could be taken for a sampling: dcar@t0.4."""
    return policy == TUNED or _BEGUN.search(f"@{policy}") is not None
