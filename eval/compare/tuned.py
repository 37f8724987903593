"""tuned.json: the best sampling of every method, found by `dcar tune`, and how a comparison takes it.

A comparison at one sampling for all favours the methods that it happens to suit. With `tuned=runs/tune/tuned.json`
there stands, beside every row at the common sampling, the row at the method's own best one (`car-5@tuned`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dcar.errors import CheckpointError, ConfigError, DataError
from eval.methods.registry import Entry
from eval.methods.samplings import TUNED

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Tuned:
    """A tuned.json that was read: `methods` by name, each with its identity and its best sampling."""

    path: Path
    header: dict[str, Any]
    methods: dict[str, dict[str, Any]]

    def beside(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries, and behind each of the common sampling the same method at its own best one, where it was tuned.

        CheckpointError for a method that was tuned with another decoder, policy or draft; ConfigError if none of the
        methods was tuned.
        """
        made: list[Entry] = []
        for entry in entries:
            made.append(entry)
            found = None if "sampling" in entry.identity else self.methods.get(entry.name)
            if found is None:
                continue
            said = found["identity"]
            if wrong := [k for k in sorted({*entry.identity, *said}) if entry.identity.get(k) != said.get(k)]:
                sides = "; ".join(f"{k} {str(said.get(k))[:12]} there, {str(entry.identity.get(k))[:12]} here"
                                  for k in wrong)
                raise CheckpointError(f"{self.path}: '{entry.name}' was tuned with other models ({sides}); run `dcar "
                                      "tune` with those of this comparison")
            best = {k: found["sampling"][k] for k in ("temperature", "top_k", "top_p")}
            made.append(entry.sampled(TUNED, replace(entry.sampling, **best)))
        if len(made) == len(entries):
            raise ConfigError(f"{self.path} has none of the methods of this comparison, it has "
                              f"{', '.join(self.methods)}; tune them (`dcar tune methods=[…]`), or leave `tuned` out")
        return made

    def about(self, entries: Sequence[Entry], split: str) -> dict[str, Any]:
        """For the head of a comparison: where the samplings come from, and which methods have none."""
        own = {e.name for e in entries}
        common = [e.name for e in entries if "sampling" not in e.identity]
        return {"path": str(self.path), "same_split": self.header["split"] == split,
                **{k: self.header[k] for k in ("split", "utterances", "seeds", "prompt_seeds", "asr")},
                "missing": [n for n in common if f"{n}@{TUNED}" not in own]}


def load_tuned(path: str | Path) -> Tuned:
    """Read a tuned.json. DataError where it is missing, broken or of another format."""
    path = Path(path)
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error}); `dcar tune` writes it") from error
    if not isinstance(header, dict) or header.get("format_version") != FORMAT_VERSION:
        raise DataError(f"{path}: no tuned.json of format {FORMAT_VERSION}; run `dcar tune` again")
    if "judge" in header:  # as it was called before
        header.setdefault("asr", header["judge"])
    kinds = {"split": str, "utterances": int, "seeds": list, "prompt_seeds": list, "asr": str, "methods": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(header.get(name), kind)]
    methods = header["methods"] if "methods" not in wrong else {}
    wrong += [f"methods.{name}" for name, found in methods.items() if not _is_method(found)]
    if wrong:
        raise DataError(f"{path}: incomplete or damaged ({', '.join(wrong[:3])}); run `dcar tune` again, its records "
                        "are kept")
    return Tuned(path, header, methods)


def _is_method(found: Any) -> bool:
    """Whether an entry has the identity of a method and a sampling of three numbers."""
    if not isinstance(found, dict) or not isinstance(found.get("identity"), dict):
        return False
    sampling = found.get("sampling")
    return isinstance(sampling, dict) and all(
        isinstance(sampling.get(k), kind) and not isinstance(sampling[k], bool)
        for k, kind in (("temperature", int | float), ("top_k", int), ("top_p", int | float)))
