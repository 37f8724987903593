"""Kill a job again and again, run it again by the same command, and hold what it leaves against a
run that never died.

A job runs in a process that is forked from this one, which has imported everything: a second each.
It dies by SIGKILL
- at a random moment of its uninterrupted duration (`time`), or
- at a write point: the n-th of the calls that open a file for writing, rename, remove or make a
  folder (`write`), or
- with half of a weights or optimiser file on the disk (`torn`), or
- by SIGTERM at a random moment (`term`), for which training saves and ends with status 75.
Jobs of two processes lose one of them; the other one has to end by itself, with an error of this
project. A job that has not ended after 60 seconds counts as one that hangs (ATTACK_LIMIT, where a
machine has other work to do). Some are killed several times before they may finish. Then everything
on the disk is compared: weights, optimiser, scheduler, random states, records, logs, tables and
data bit for bit; of JSON all but times.
"""

import contextlib
import faulthandler
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf
import torch
from accelerate import PartialState
from compare_worker import tiny_config as compare_config
from compare_worker import tiny_tools
from tiny_corpora import toy_prepare, write_starter
from tiny_data import counting, write_prepared
from tiny_training import tiny_config as train_config
from toy_world import ToyDecoder, ToyRecognizer, ToyVocoder, toy_items

import eval.compare.run as compare
from dcar.prepare.run import PrepareConfig
from dcar.process import run_command
from dcar.train.car import run as run_train
from eval.report.plots import read_log
from rl.config import DCPOConfig
from rl.train import run as run_dcpo

# What a clock says, where a temporary folder was, and what the command line was. Everything else is
# compared.
TIMED = re.compile(
    r"seconds|runtime|per_second|created|^out$|output_dir|logging_dir|command|revision|machine"
    r"|tts?f|rtf|latency|speedup|equal_speed|best_model_checkpoint|run_name|fingerprint",
    re.IGNORECASE,
)
# seconds after which a job counts as one that hangs
LIMIT = float(os.environ.get("ATTACK_LIMIT", "60"))


@dataclass
class Job:
    """Something that can be killed: it reads `data` and writes to the folder that it is given."""

    name: str
    run: Callable[[Path], Any]
    processes: int = 1
    ways: tuple[str, ...] = ("time", "write", "torn", "term")
    ignored: tuple[str, ...] = ()  # parts of paths that hold times only (plots, the page)


def jobs(data: Path) -> dict[str, Job]:
    """All jobs by name; `data` holds what they read, see `make_data`."""

    def train(out: Path) -> None:
        run_train(
            train_config(
                data / "prepared",
                out,
                max_steps=6,
                save_steps=2,
                eval_steps=2,
                input_corruption=0.2,
                ddp_timeout=18,
            )
        )

    def dcpo(out: Path) -> None:
        config = DCPOConfig(
            output_dir=str(out),
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
            per_device_train_batch_size=8,
            num_generations=4,
            num_train_epochs=2,
            num_iterations=2,
            gradient_accumulation_steps=2,
            chunk_range=[1, 2],
            learning_rate=3e-3,
            policy_width=32,
            policy_heads=2,
            max_completion_length=300,
            save_strategy="steps",
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            report_to=[],
        )
        run_dcpo(
            config,
            decoder=ToyDecoder(),
            vocoder=ToyVocoder(),
            recognizer=ToyRecognizer(),
            train_dataset=toy_items(8),
            eval_dataset=toy_items(4, 5, "dev"),
        )

    def prepare(out: Path) -> None:
        toy_prepare(
            PrepareConfig(
                out=str(out / "p"), path=str(data / "corpus"), shard_size=4, wait_minutes=0.3
            )
        )

    def comparison(out: Path) -> None:
        compare.run(
            compare_config(
                out,
                methods=["far", "car-3", "random-2-3", "dcar"],
                report=False,
                audio_utterances=2,
                wait_minutes=0.5,
            ),
            tiny_tools(),
        )

    plots = (".png", ".svg")
    listed = [
        Job("train", train),
        Job("dcpo", dcpo),
        Job("prepare", prepare, ways=("time", "write", "term")),
        Job("compare", comparison, ways=("time", "write", "term"), ignored=plots),
        Job("train2", train, 2, ("time", "write", "term")),
        Job("compare2", comparison, 2, ("time",), plots),
    ]
    return {job.name: job for job in listed}


def make_data(folder: Path) -> Path:
    """What the jobs read."""
    write_prepared(folder / "prepared", train=18, dev=9, speech=counting)
    write_starter(folder / "corpus")
    return folder


# --- running and killing --------------------------------------------------------------------------


@dataclass
class Kill:
    """Where a process dies."""

    way: str = ""  # time, write, torn, term; empty = it may finish
    at: float = 0.0  # seconds, or the number of the write point
    rank: int = 0


@dataclass
class End:
    """How the processes of a job ended."""

    status: list[int]  # of waitpid: negative = by that signal
    seconds: float
    said: str
    points: int = 0  # write points that were passed
    hung: bool = False


def run(job: Job, out: Path, kill: Kill | None = None) -> End:
    """Fork the processes of a job, kill one of them as told, and wait for all."""
    kill = kill or Kill()
    out.mkdir(parents=True, exist_ok=True)
    logs = [Path(tempfile.mkstemp(prefix="attack-")[1]) for _ in range(job.processes)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.monotonic()
    children = []
    for rank, log in enumerate(logs):
        child = os.fork()
        if child == 0:
            _child(job, out, log, rank, port, kill if kill.rank == rank else Kill())
        children.append(child)
    if kill.way in ("time", "term"):
        time.sleep(kill.at)
        for rank, child in enumerate(children):  # SLURM sends SIGTERM to all
            if rank == kill.rank or kill.way == "term":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL if kill.way == "time" else signal.SIGTERM)
    status: dict[int, int] = {}
    hung = False
    while len(status) < len(children):
        for child in set(children) - set(status):
            found, code = os.waitpid(child, os.WNOHANG)
            if found:
                status[child] = os.waitstatus_to_exitcode(code)
        if time.monotonic() - started > LIMIT:
            hung = True
            for child in set(children) - set(status):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    said = "".join(log.read_text(errors="replace") for log in logs)
    points = max(
        [int(n) for n in re.findall(r"^write points: (\d+)$", said, re.MULTILINE)], default=0
    )
    for log in logs:
        log.unlink()
    return End(
        [status[child] for child in children], time.monotonic() - started, said, points, hung
    )


def _child(job: Job, out: Path, log: Path, rank: int, port: int, kill: Kill) -> None:
    """What a forked process does; it never returns."""
    code = 99
    try:
        descriptor = os.open(log, os.O_WRONLY)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # pytest has its own
        sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))
        # where it hangs, if it does
        faulthandler.dump_traceback_later(0.8 * LIMIT, file=descriptor)
        torch.set_num_threads(1)
        random.seed(0)
        np.random.seed(0)
        # of tests that ran before in the process which this one was forked from
        PartialState._reset_state()
        if job.processes > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(job.processes),
                LOCAL_WORLD_SIZE=str(job.processes),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                ACCELERATE_USE_CPU="true",
            )
        points = _count_write_points(out, kill.at if kill.way == "write" else None)
        if kill.way == "torn":
            _tear(int(kill.at))
        code = run_command(job.name, lambda: job.run(out))
        print(f"write points: {points[0]}", flush=True)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _count_write_points(out: Path, last: float | None) -> list[int]:
    """Count the calls that change files below `out`'s folder; die at number `last`, before it is
    made."""
    count, root = [0], str(out.parent)

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, mode = arguments[0], arguments[1]
            if not (isinstance(mode, str) and set(mode) & set("wax+")):
                return
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            path = arguments[0]
        else:
            return
        if isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(root):
            count[0] += 1
            if last is not None and count[0] == int(last):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return count


def _tear(number: int) -> None:
    """Die with half of the `number`-th weights or optimiser file on the disk."""
    import safetensors.torch

    import heads.checkpoint
    import rl.trainer

    count = [0]

    def torn(write: Callable[..., Any], place: int) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            result = write(*arguments, **keywords)
            count[0] += 1
            if count[0] == number:
                path = Path(arguments[place])
                os.truncate(path, path.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    torch.save = torn(torch.save, 1)
    safetensors.torch.save_file = torn(safetensors.torch.save_file, 1)
    heads.checkpoint.save_file = rl.trainer.save_file = safetensors.torch.save_file


# --- what is left ---------------------------------------------------------------------------------


def outcome(job: Job, out: Path) -> dict[str, str]:
    """Everything under a folder by its place, without times and the places of folders."""
    names = {path: str(path.relative_to(out)) for path in sorted(out.rglob("*")) if path.is_file()}
    last = max(
        (int(n) for name in names.values() for n in re.findall(r"^checkpoint-(\d+)/", name)),
        default=0,
    )
    found: dict[str, str] = {}
    for path, name in names.items():
        if path.suffix in job.ignored or name.startswith("records/") or path.name == "compare.txt":
            # records: in whose shard a record stands is chance; records.jsonl has them all
            continue
        if name.startswith("checkpoint-") and not name.startswith(f"checkpoint-{last}/"):
            # which are kept depends on where a signal had one written; the exported model is there
            # by itself
            continue
        found |= leaves(content(path, str(out)), name)
    return {place: value.replace(str(out), "") for place, value in found.items()}


def content(path: Path, out: str) -> Any:
    """What a file says; its bytes where that is not known."""
    if path.suffix in (".pt", ".pth"):
        return torch.load(path, weights_only=False)
    if path.suffix == ".json":
        return json.loads(path.read_text())
    # once, what a run that was killed behind its end logged again; see `leaves`
    if path.name == "log.jsonl":
        lines = [line for line in read_log(path) if "train_runtime" not in line]
        return list({(line["step"], *sorted(line)): line for line in lines}.values())
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix in (".md", ".yaml"):
        timed = (out, "Z,", "seconds", "- run: ")  # the last has the state of git
        return [
            line
            for line in path.read_text().splitlines()
            if not any(word in line for word in timed)
        ]
    if path.suffix == ".opus":  # every Ogg file has a serial number of its own
        return sf.read(path)[0]
    return np.frombuffer(path.read_bytes(), np.uint8)


def leaves(value: Any, where: str) -> dict[str, str]:
    """Nested data as place → value: arrays by their digests, dictionaries without times."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return {where: hashlib.sha256(np.asarray(value).tobytes()).hexdigest()}
    # of files that hold times (trainer_state.json)
    if isinstance(value, dict) and "sha256" in value:
        value = "digest"
    if isinstance(value, dict):
        parts = {name: part for name, part in value.items() if not TIMED.search(str(name))}
    elif isinstance(value, list | tuple):
        parts = dict(enumerate(value))
    else:
        return {where: repr(value)}
    found = {where: f"{len(parts)} parts"}
    for name, part in parts.items():
        found |= leaves(part, f"{where}/{name}")
    return found


def differences(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """The places where two outcomes differ."""
    return [
        f"{place}: {expected.get(place, 'nothing')[:80]} became {found.get(place, 'nothing')[:80]}"
        for place in sorted({*expected, *found})
        if expected.get(place) != found.get(place)
    ]


# --- the attack -----------------------------------------------------------------------------------


def attack(
    job: Job, folder: Path, kills: int, rng: random.Random
) -> tuple[Counter[str], list[str]]:
    """Kill a job `kills` times in all, one to three times a run, and compare every run's end.

    Returns how many kills there were by way ("late" where it had finished before), how many runs
    "resumed", and everything that went wrong.
    """
    whole = run(job, folder / "whole" / "out")
    assert not any(whole.status), f"{job.name} fails by itself:\n{whole.said[-3000:]}"
    expected, points = outcome(job, folder / "whole" / "out"), max(1, whole.points)
    ends: Counter[str] = Counter()
    lost: list[str] = []
    while not lost and sum(ends[way] for way in job.ways) < kills:
        place = folder / "again"
        story = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            way = rng.choice(job.ways)
            at = {
                "time": rng.uniform(0, whole.seconds),
                "term": rng.uniform(0, whole.seconds),
                "write": rng.randint(1, points),
                "torn": rng.randint(1, 20),
            }[way]
            kill = Kill(way, at, rng.randrange(job.processes))
            end = run(job, place / "out", kill)
            died = end.status[kill.rank] == -signal.SIGKILL or (way == "term" and any(end.status))
            ends[way if died else "late"] += 1
            story.append(f"{way} {at:.3g} of process {kill.rank}: {end.status}")
            lost += judge(job, kill, end, story)
        end = run(job, place / "out")
        if any(end.status):
            lost.append(f"{job.name} after {story}: does not go on:\n{end.said[-1500:]}")
        else:
            ends["resumed"] += 1
            found = differences(expected, outcome(job, place / "out"))
            lost += [f"{job.name} after {story}: {difference}" for difference in found[:5]]
        if not lost:  # else it stays, to be looked at
            shutil.rmtree(place)
    return ends, lost


def judge(job: Job, kill: Kill, end: End, story: list[str]) -> list[str]:
    """Return what is wrong with how a killed job ended: it hung, showed a traceback, or left with a
    wrong status."""
    wrong = []
    if end.hung:
        wrong.append(
            f"{job.name}, {story[-1]}: a process was still there after {LIMIT:g} "
            f"s\n{end.said[-3000:]}"
        )
    # a signal that comes while Python cleans up an object is reported so, and raised again some
    # seconds later
    said = re.sub(
        r"Exception ignored in.*?^SystemExit: 75$", "", end.said, flags=re.DOTALL | re.MULTILINE
    )
    if "Traceback" in said:
        wrong.append(f"{job.name}, {story[-1]}: a traceback:\n{end.said[-1500:]}")
    allowed = {"term": {0, 75, -signal.SIGTERM}, "": {0}}.get(kill.way, {0, 1, -signal.SIGKILL})
    if job.processes > 1:
        # while they meet, one may find the other gone before it hears the signal itself
        allowed = allowed | {1}
    if not set(end.status) <= allowed:
        wrong.append(f"{job.name}, {story[-1]}: status {end.status}\n{end.said[-1500:]}")
    return wrong
