"""Choice of the checkpoint that a run resumes from: the newest complete one, according to its
manifest of sizes and digests.

A folder is marked as incomplete before anything is written to it, and sealed when every process has
written its part.
"""

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

from dcar.errors import CheckpointError
from dcar.prepare.prepared import prepared_folder
from dcar.storage import (
    MANIFEST,
    digest,
    faults,
    files_of,
    read_manifest,
    seal,
    step_of,
    sync,
    unseal,
)

logger = logging.getLogger(__name__)

STATE = "trainer_state.json"


def some(names: Sequence[str]) -> str:
    """Return the first three names, and the number of the others, for a message."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Return all checkpoint folders of a run, complete or not, the newest first."""
    folders = (
        p
        for p in Path(output_dir).glob("checkpoint-*")
        if p.is_dir() and p.name.split("-")[1].isdigit()
    )
    return sorted(folders, key=step_of, reverse=True)


def why_incomplete(folder: Path) -> str:
    """Return why a run cannot resume from this checkpoint; empty if it can."""
    if not folder.is_dir():
        return "the folder is missing"
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{MANIFEST} is missing"
    return some(faults(folder, manifest))


def latest_checkpoint(output_dir: str | Path) -> Path | None:
    """Return the newest complete checkpoint, or None. Log which newer ones are skipped, and why."""
    for folder in checkpoints(output_dir):
        if not (why := why_incomplete(folder)):
            return folder
        logger.warning("%s is passed over: %s", folder, why)
    return None


def resume_point(given: str | None, output_dir: str | Path) -> Path | None:
    """Return the checkpoint that `resume_from_checkpoint` names (auto, never or a folder), or None.
    Raises CheckpointError if it is missing or incomplete."""
    if given in (None, "never"):
        return None
    if given == "auto":
        return latest_checkpoint(output_dir)
    if why := why_incomplete(Path(given)):
        raise CheckpointError(
            f"resume_from_checkpoint: {given} is not a complete checkpoint ({why}); use auto for "
            "the newest complete one, never, or another folder"
        )
    return Path(given)


def last_of(config: Any, load_config: Callable[[Path], Any], wanted: Any, what: str) -> Path | None:
    """Return the checkpoint to resume from, or None. what: the kind of model, for the message.
    Raises CheckpointError if its model has another configuration than `wanted`."""
    last = resume_point(config.resume_from_checkpoint, config.out)
    if last and (differences := config_differences(load_config(last), wanted)):
        raise CheckpointError(
            f"{last}: a checkpoint of another {what}: {differences}; choose another out, or set "
            "resume_from_checkpoint=never to start again"
        )
    return last


def config_differences(found: Any, wanted: Any) -> str:
    """Return the fields in which the configurations of two models differ, for a message; empty
    if there are none."""
    if type(found) is not type(wanted):
        return "one is on a pretrained language model, the other is not"
    ours, theirs = (json.loads(json.dumps(dataclasses.asdict(c))) for c in (wanted, found))
    return ", ".join(
        f"{k} is {theirs[k]!r}, here {ours[k]!r}" for k in ours if ours[k] != theirs[k]
    )


def data_stamp(folder: str) -> dict[str, Any]:
    """Return what a checkpoint records about the prepared corpus that it was trained on."""
    return {"path": folder, "prepared.json": digest(prepared_folder(folder) / "prepared.json")}


def begin_checkpoint(folder: Path) -> None:
    """Empty a folder and mark it as incomplete. Every process must call this; it returns when
    that is done."""
    state = PartialState()
    if state.is_main_process:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        unseal(folder)
    state.wait_for_everyone()


def seal_checkpoint(folder: Path, **facts: Any) -> None:
    """Compute the digests, each process those of its share of the files, and write the manifest
    when all files are on the disk.

    Every process must call this when it has written its part.
    """
    state = PartialState()
    state.wait_for_everyone()
    files = files_of(folder)
    for name in files:  # each machine flushes the files that it has written
        sync(folder / name)
    mine = {
        name: digest(folder / name) for name in files[state.process_index :: state.num_processes]
    }
    parts = gather_object([mine])
    if state.is_main_process:
        seal(
            folder,
            {name: digests for part in parts for name, digests in part.items()},
            processes=state.num_processes,
            **facts,
        )
    state.wait_for_everyone()


def remove_old(
    output_dir: str | Path, keep: int | None, spared: Sequence[str | Path | None] = ()
) -> None:
    """Remove all but the newest `keep` complete checkpoints (None = all) and the `spared` ones,
    and every incomplete one that is older than a complete one."""
    folders = checkpoints(output_dir)
    complete = [f for f in folders if (read_manifest(f) or {}).get("complete")]
    spared_names = {p.name for p in complete[: keep or None]} | {Path(p).name for p in spared if p}
    for folder in folders:
        if folder.name not in spared_names and complete and step_of(folder) < step_of(complete[0]):
            shutil.rmtree(folder, ignore_errors=True)
