"""Runner of the quickstart and of the paper's recipe: a list of commands, some of them side by
side, each run once.

A job is finished if its record names the same command and the same content of its inputs, and its
output exists. The record of a job that was begun and not finished is kept, too, so a training that
was begun with another command or with other inputs is recognised. Nothing else decides what runs.

Settings that describe the machine (`OF_MACHINE`) do not count, and a corpus is known by its path
alone: the content of an input is that of its weights, tables and configurations.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dcar.config.recipes import recipe_file
from dcar.errors import DCARError, StoppedError
from dcar.process import INTERRUPTED, REQUEUE
from dcar.progress import SECONDS
from dcar.storage import digest, digest_of
from dcar.tracking import write_json

OF_MACHINE = set(
    (
        "device torch_compile per_device_train_batch_tokens per_device_train_batch_size "
        "gradient_accumulation_steps"
    ).split()
)
"""Settings that depend on the machine. A finished job stays finished if they change."""
CONTENT = {".safetensors", ".json", ".yaml", ".arrow", ".parquet"}
"""Kinds of files that count as the content of a folder."""
POLL_SECONDS = 0.1


def words(template: str, values: Mapping[str, object]) -> list[str]:
    """Split a command at its spaces and fill in `{name}`. A word that is `{name}` alone, whose
    value is a list, is replaced by the words of the list."""
    filled: list[str] = []
    for word in template.split():
        value = values.get(word[1:-1]) if word[0] + word[-1] == "{}" else None
        filled += value if isinstance(value, list) else [word.format(**values)]
    return filled


@dataclass(frozen=True)
class Job:
    """Command of a pipeline, `dcar …` or `python -m …`. The content of `inputs` and of its
    recipe decides whether it has to run again, as does the command itself.

    checkpoints: folder of a training that only the same command may resume; it is renamed if the
    training was begun with another command or with other inputs.
    """

    name: str
    command: list[str]
    output: Path
    inputs: Sequence[Path] = ()
    processes: int = 1
    checkpoints: Path | None = None

    @property
    def module(self) -> str:
        """Module that the command runs."""
        return "dcar.cli" if self.command[0] == "dcar" else self.command[2]

    @property
    def arguments(self) -> list[str]:
        """Arguments of the module."""
        return self.command[1 if self.command[0] == "dcar" else 3 :]

    @property
    def program(self) -> list[str]:
        """Program and arguments that run the command with this Python."""
        python = [sys.executable, "-m"]
        if self.processes == 1:
            return [*python, self.module, *self.arguments]
        # `accelerate launch --cpu` would silently run one process (docs/scaling.md)
        launch = (
            f"accelerate.commands.launch --multi_gpu --num_processes {self.processes} "
            "--num_machines 1 --mixed_precision no --dynamo_backend no -m"
        )
        return [*python, *launch.split(), self.module, *self.arguments]

    def fingerprint(self) -> str:
        """Return a digest of the command and of the content of recipe and inputs."""
        command = [word for word in self.command if word.partition("=")[0] not in OF_MACHINE]
        read = list(self.inputs)
        if "--config" in command:
            read.append(recipe_file(command[command.index("--config") + 1])[0])
        return digest_of([command, *map(content_digest, read)])


def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of the weights, tables and configurations in a folder,
    without checkpoints and provenance."""
    if path.is_file():
        return str(digest(path)["sha256"])
    files = sorted(
        p.relative_to(path)
        for p in path.rglob("*")
        if p.suffix in CONTENT and p.name != "provenance.json"
    )
    listed = [p for p in files if "checkpoint-" not in str(p)]
    return digest_of([(str(p), content_digest(path / p)) for p in listed])


def run_pipeline(
    groups: Sequence[Sequence[Job]], out: Path, environment: Mapping[str, str]
) -> None:
    """Run the jobs that are not finished, group by group; the jobs of a group run side by side.

    out: folder of the pipeline; records are in <out>/jobs. environment: variables of the jobs in
    addition to those of this process. SIGTERM and SIGUSR1 are passed on to the running jobs as
    SIGTERM. Raises DCARError if a job fails, after stopping its neighbours, and StoppedError if
    it was stopped.
    """
    records, count, first = out / "jobs", sum(map(len, groups)), 1
    with signals_received() as received:
        records.mkdir(parents=True, exist_ok=True)
        for group in groups:
            begun: dict[str, dict[str, Any]] = {}
            for number, job in enumerate(group, start=first):
                title, fingerprint = f"== {number}/{count} {job.name}", job.fingerprint()
                record = _record(records / f"{job.name}.json")
                same = record.get("fingerprint", fingerprint) == fingerprint
                if same and record.get("finished") and job.output.exists():
                    print(f"{title}: finished {record['finished']}, in {job.output}", flush=True)
                    continue
                if not same and job.checkpoints and job.checkpoints.exists():
                    set_aside(job.checkpoints)
                note = f"  # messages: {out / job.name}.log" if begun else ""
                print(f"{title}: {shlex.join(job.command)}{note}", flush=True)
                begun[job.name] = {"fingerprint": fingerprint, "command": job.command}
                write_json(records / f"{job.name}.json", begun[job.name])
            first += len(group)
            todo, started = [job for job in group if job.name in begun], time.time()
            _raise_for({}, received, todo, out)
            failed = _run_side_by_side(todo, out, {**os.environ, **environment}, received)
            for job in todo:
                if job.name in failed:
                    continue
                if not job.output.exists():
                    raise DCARError(f"job {job.name} ended without writing {job.output}")
                finished = datetime.now().isoformat(sep=" ", timespec="seconds")
                seconds = round(time.time() - started)
                done = {**begun[job.name], "finished": finished, "seconds": seconds}
                write_json(records / f"{job.name}.json", done)
            _raise_for(failed, received, todo, out)


def _record(path: Path) -> dict[str, Any]:
    """Return the record of a job; empty if it was never begun."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def set_aside(folder: Path) -> None:
    """Rename a folder to the first free of folder.1, folder.2, …"""
    number = 1
    while (free := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    print(f"== {folder} was begun with other settings or inputs; it is now {free}", flush=True)
    folder.rename(free)


@contextlib.contextmanager
def signals_received() -> Iterator[list[int]]:
    """Collect SIGTERM, SIGUSR1 and SIGINT within the block, in place of their handlers."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    handlers = {n: signal.signal(n, lambda number, frame: received.append(number)) for n in numbers}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _run_side_by_side(
    jobs: Sequence[Job], out: Path, environment: Mapping[str, str], received: Sequence[int]
) -> dict[str, int]:
    """Run jobs until all have ended; if one fails, stop the others. Return the exit statuses of
    those that failed or were stopped, the first one that did before the others. Messages of the
    first job are shown, those of the others are in <out>/<name>.log. received: signals of this
    process, as they arrive."""
    failed: dict[str, int] = {}
    running: dict[str, subprocess.Popen] = {}
    started = said = time.monotonic()
    with contextlib.ExitStack() as stack:
        for job in jobs:
            log = stack.enter_context((out / f"{job.name}.log").open("w")) if running else None
            process = subprocess.Popen(job.program, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            running[job.name] = process
        passed_on = 0
        while running:
            time.sleep(POLL_SECONDS)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if status := running.pop(name).returncode:
                    failed[name] = status
                else:
                    print(f"== {name}: done in {_minutes(time.monotonic() - started)}", flush=True)
            if running and jobs[0].name not in running and time.monotonic() - said >= SECONDS:
                said = time.monotonic()  # the messages of the others are in their logs
                print(f"== {', '.join(running)}: {_minutes(said - started)} so far", flush=True)
            # Ctrl-C in a terminal reaches the jobs, too
            stops = bool(failed) + sum(number != signal.SIGINT for number in received)
            if stops > passed_on:
                passed_on = stops
                for process in running.values():
                    process.terminate()
    return failed


def _minutes(seconds: float) -> str:
    return f"{round(seconds) // 60}:{round(seconds) % 60:02} min"


def _raise_for(
    failed: Mapping[str, int], received: Sequence[int], jobs: Sequence[Job], out: Path
) -> None:
    """Raise StoppedError after a signal, and DCARError if a job failed."""
    again = "what was finished is kept; run the same command again to continue from there"
    name, status = next(iter(failed.items()), ("", 0))
    if received or status in (REQUEUE, INTERRUPTED):
        stopped = INTERRUPTED if signal.SIGINT in received or status == INTERRUPTED else REQUEUE
        raise StoppedError(f"stopped{name and f' in job {name}'}; {again}", stopped)
    if failed:
        where = "above" if name == jobs[0].name else f"in {out / name}.log"
        raise DCARError(
            f"job {name} failed with status {status}, see its messages {where}; {again}"
        )
