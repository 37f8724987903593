"""Hold checkpoints, trained models, comparisons and prepared corpora against the digests that were written with them.

    dcar doctor runs/car

Every manifest.json, provenance.json, prepared.json and compare.json under the folder that lists digests is recomputed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dcar.config import load_config, setting
from dcar.errors import DataError
from dcar.storage import MANIFEST, faults

LISTS = (MANIFEST, "provenance.json", "prepared.json", "compare.json")


@dataclass
class Verdict:
    """What became of one list of digests."""

    path: Path
    files: int
    faults: list[str]

    def __str__(self) -> str:
        if self.faults:
            return "\n".join([f"BAD   {self.path}", *(f"      {fault}" for fault in self.faults)])
        return f"ok    {self.path}: {self.files} files are as they were written"


def verify(folder: str | Path) -> list[Verdict]:
    """The verdicts on all lists of digests under a folder. DataError where there are none."""
    folder = Path(folder)
    verdicts = []
    for path in sorted(p for name in LISTS for p in folder.rglob(name)):
        try:
            listed = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            verdicts.append(Verdict(path, 0, [f"cannot be read ({error})"]))
            continue
        if isinstance(listed, dict) and (path.name == MANIFEST or isinstance(listed.get("files"), dict)):
            complete = {"complete": True} if path.name != MANIFEST else {}
            files = listed.get("files")
            count = len(files) if isinstance(files, dict) else 0
            verdicts.append(Verdict(path, count, faults(path.parent, {**listed, **complete})))
    if not verdicts:
        raise DataError(f"{folder}: no list of digests here ({', '.join(LISTS)}); give the folder of a run, of a "
                        "prepared corpus or of a comparison that this version has written")
    return verdicts


@dataclass
class VerifyConfig:
    """What `dcar doctor` looks at."""

    folder: str = setting(meaning="Folder of a run, of a prepared corpus or of a comparison.", positional=True,
                         place="folder")


def main(arguments: Sequence[str] | None = None) -> int:
    """`dcar doctor DIR`; status 1 where something is not as it was written."""
    verdicts = verify(load_config(VerifyConfig, arguments).folder)
    print("\n".join(map(str, verdicts)))
    return int(any(verdict.faults for verdict in verdicts))
