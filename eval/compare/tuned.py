"""tuned.json, the best sampling of every method as found by `dcar tune`, and its use in a
comparison.

A comparison at one common sampling favours the methods that it happens to suit. With
`tuned=runs/tune/tuned.json`, every row at the common sampling is followed by one at the method's
own best sampling (`car-5@tuned`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dcar.errors import CheckpointError, ConfigError, DataError, check_format
from eval.methods.registry import Entry

FORMAT_VERSION = 1
ABOUT = ("split", "utterances", "seeds", "prompt_seeds", "recognizer")
SAMPLING = ("temperature", "top_k", "top_p")
TUNED = "tuned"  # after @ in a name: the best sampling of a tuned.json


@dataclass(frozen=True)
class Tuned:
    """Content of a tuned.json: its header (ABOUT), and by method the identity and the best
    sampling."""

    path: Path
    header: dict[str, Any]
    methods: dict[str, tuple[dict[str, Any], dict[str, Any]]]

    def beside(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries, each entry at the common sampling followed by the same method at its
        own best one, if it was tuned.

        Raises CheckpointError if a method was tuned with another decoder, policy or draft model,
        and ConfigError if none of the methods was tuned.
        """
        both: list[Entry] = []
        for entry in entries:
            both.append(entry)
            if "sampling" in entry.identity or entry.name not in self.methods:
                continue
            tuned, best = self.methods[entry.name]
            # precision does not change which sampling is best
            named = sorted({*entry.identity, *tuned} - {"precision"})
            if wrong := [k for k in named if entry.identity.get(k) != tuned.get(k)]:
                sides = "; ".join(
                    f"{k} {str(tuned.get(k))[:12]} there, {str(entry.identity.get(k))[:12]} here"
                    for k in wrong
                )
                raise CheckpointError(
                    f"{self.path}: '{entry.name}' was tuned with other models ({sides}); run `dcar "
                    "tune` with those of this comparison"
                )
            both.append(entry.sampled({TUNED: True}, replace(entry.sampling, **best)))
        if len(both) == len(entries):
            raise ConfigError(
                f"{self.path} has none of the methods of this comparison, only "
                f"{', '.join(self.methods)}; tune them (`dcar tune methods=[…]`), or leave "
                "`tuned` out"
            )
        return both

    def about(self, entries: Sequence[Entry], split: str) -> dict[str, Any]:
        """Return the entry `tuned` of compare.json: where the samplings come from, and which
        methods have none."""
        own = {e.name for e in entries}
        common = [e.name for e in entries if "sampling" not in e.identity]
        return {
            "path": str(self.path),
            "same_split": self.header["split"] == split,
            **self.header,
            "missing": [n for n in common if f"{n}@{TUNED}" not in own],
        }


def load_tuned(path: str | Path) -> Tuned:
    """Read a tuned.json. Raises DataError if it is missing, damaged or of another format."""
    path = Path(path)
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        check_format(
            path, header.get("format_version"), FORMAT_VERSION, DataError, "run `dcar tune` again"
        )
        methods = {
            name: (dict(tuned["identity"]), {k: tuned["sampling"][k] for k in SAMPLING})
            for name, tuned in header["methods"].items()
        }
        return Tuned(path, {k: header[k] for k in ABOUT}, methods)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); run `dcar tune` to write it again (the records of "
            "an earlier run are kept)"
        ) from error
