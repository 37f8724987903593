"""Kill a job again and again, run it again by the same command, and compare what it leaves with a
run that never died.

A job runs in a process that is forked from this one, which has imported everything: a second each.
It dies by SIGKILL
- at a random moment of its uninterrupted duration (`time`), or
- at a write point: before the n-th of the calls that open a file for writing, rename, remove or
  make a folder (`write`), or
- with half of a weights or optimiser file on the disk (`torn`), or
- by SIGTERM at a random moment (`term`), for which training saves and ends with status 75.
Jobs of two processes lose one of them; the other one has to end by itself, with an error of this
project, within LIMIT seconds. Some are killed several times before they may finish. Then everything
on the disk is compared: weights, optimiser, scheduler, random states, records, logs, tables and
data bit for bit; of JSON all but times.
"""

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
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import soundfile as sf
import torch
from accelerate import PartialState
from compare_worker import tiny_config as compare_config
from compare_worker import tiny_tools
from tiny_corpora import toy_prepare, write_starter
from tiny_data import counting, write_prepared
from tiny_training import tiny_config as train_config
from toy_training import toy_config, toy_parts
from tqdm import tqdm

import eval.compare.run as compare
import heads.checkpoint
import rl.trainer
from dcar.prepare.run import PrepareConfig
from dcar.process import run_command
from dcar.train.car import run as run_train
from eval.report.plots import read_log
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
    """Something that can be killed: it writes to the folder that it is given."""

    name: str
    run: Callable[[Path], Any]
    processes: int = 1
    ways: tuple[str, ...] = ("time", "write", "term")


def jobs(data: Path) -> dict[str, Job]:
    """Make what the jobs read in the folder `data`, and return them by name."""
    write_prepared(data / "prepared", train=18, dev=9, speech=counting)
    write_starter(data / "corpus")

    def train(out: Path) -> None:
        steps = dict(max_steps=6, save_steps=2, eval_steps=2, ddp_timeout=18)
        run_train(train_config(data / "prepared", out, input_corruption=0.2, **steps))

    def dcpo(out: Path) -> None:
        small = dict(per_device_train_batch_size=8, num_iterations=2, gradient_accumulation_steps=2)
        saved = dict(save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
        run_dcpo(toy_config(out, report_to=[], **small, **saved), **toy_parts(8, 4))

    def prepare(out: Path) -> None:
        places = dict(out=str(out / "p"), path=str(data / "corpus"))
        toy_prepare(PrepareConfig(**places, shard_size=4, wait_minutes=0.3))

    def comparison(out: Path) -> None:
        methods = ["far", "car-3", "random-2-3", "dcar"]
        compare.run(
            compare_config(out, methods=methods, report=False, wait_minutes=0.5), tiny_tools()
        )

    listed = [
        Job("train", train, ways=("time", "write", "torn", "term")),
        Job("dcpo", dcpo, ways=("time", "write", "torn", "term")),
        Job("prepare", prepare),
        Job("compare", comparison),
        Job("train2", train, 2),
        Job("dcpo2", dcpo, 2),
        Job("compare2", comparison, 2, ("time",)),
    ]
    return {job.name: job for job in listed}


# --- running and killing --------------------------------------------------------------------------


@dataclass
class Kill:
    """Where a process dies."""

    way: str = ""  # time, write, torn, term; empty = it may finish
    at: float = 0.0  # seconds, or the number of the write point or file
    rank: int = 0


@dataclass
class End:
    """How the processes of a job ended."""

    status: list[int]  # negative = by that signal
    seconds: float
    said: str

    @property
    def points(self) -> int:
        """Number of write points that were passed."""
        return max(
            map(int, re.findall(r"^write points: (\d+)$", self.said, re.MULTILINE)), default=0
        )


def run(job: Job, out: Path, kill: Kill | None = None) -> End:
    """Fork the processes of a job, kill one of them as told, and wait for all."""
    kill = kill or Kill()
    out.mkdir(parents=True, exist_ok=True)
    logs = [Path(tempfile.mkstemp(prefix="attack-")[1]) for _ in range(job.processes)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = time.monotonic()
    running: dict[int, int] = {}
    for rank, log in enumerate(logs):
        child = os.fork()
        if child == 0:
            _child(job, out, log, rank, port, kill if kill.rank == rank else Kill())
        running[child] = rank
    if kill.way in ("time", "term"):
        time.sleep(kill.at)
        for child, rank in running.items():  # SLURM sends SIGTERM to all
            if rank == kill.rank or kill.way == "term":
                os.kill(child, signal.SIGKILL if kill.way == "time" else signal.SIGTERM)
    status = [0] * job.processes
    while running:
        for child in list(running):
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                status[running.pop(child)] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            elif time.monotonic() - started > LIMIT:
                os.kill(child, signal.SIGABRT)  # its status tells; no job ends by that
        time.sleep(0.01)
    said = "".join(log.read_text(errors="replace") for log in logs)
    for log in logs:
        log.unlink()
    return End(status, time.monotonic() - started, said)


def _child(job: Job, out: Path, log: Path, rank: int, port: int, kill: Kill) -> None:
    """Run a job in a forked process; this never returns."""
    code = 99
    try:
        descriptor = os.open(log, os.O_WRONLY)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # pytest has its own
        sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))
        faulthandler.dump_traceback_later(0.8 * LIMIT, file=descriptor)  # where it hangs
        # a semaphore that all forked processes share: a killed one may have held it, and nobody else
        # draws a bar again
        for bar in (tqdm, *tqdm.__subclasses__()):
            bar.set_lock(threading.RLock())
        torch.set_num_threads(1)
        random.seed(0)
        np.random.seed(0)
        # of tests that ran before in the process which this one was forked from
        PartialState._reset_state()
        if job.processes > 1:
            ranks = dict(RANK=rank, LOCAL_RANK=rank)
            ranks |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), job.processes)
            os.environ |= {name: str(value) for name, value in ranks.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ["ACCELERATE_USE_CPU"] = "true"
        count = _count_write_points(out, kill.at if kill.way == "write" else 0)
        if kill.way == "torn":
            _tear(int(kill.at))
        code = run_command(job.name, lambda: job.run(out))
        print(f"write points: {count.total()}", flush=True)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _count_write_points(out: Path, last: float) -> Counter[str]:
    """Count the calls that change files below `out`'s folder; die at number `last`, before it is
    made."""
    count: Counter[str] = Counter()

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            if not (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
                return
        elif event not in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            return
        path = arguments[0]
        if isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(
            str(out.parent)
        ):
            count[event] += 1
            if count.total() == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return count


def _tear(number: int) -> None:
    """Die with half of the `number`-th weights or optimiser file on the disk."""
    written: list[Path] = []

    def torn(write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(value: Any, path: Any, *arguments: Any, **keywords: Any) -> None:
            write(value, path, *arguments, **keywords)
            written.append(Path(path))
            if len(written) == number:
                os.truncate(path, written[-1].stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    torch.save = torn(torch.save)
    safetensors.torch.save_file = torn(safetensors.torch.save_file)
    heads.checkpoint.save_file = rl.trainer.save_file = safetensors.torch.save_file


# --- what is left ---------------------------------------------------------------------------------


def outcome(out: Path) -> dict[str, str]:
    """Return everything under a folder by its place, without times, pictures and the places of
    folders."""
    names = {path: str(path.relative_to(out)) for path in sorted(out.rglob("*")) if path.is_file()}
    steps = (int(n) for name in names.values() for n in re.findall(r"^checkpoint-(\d+)/", name))
    last = f"checkpoint-{max(steps, default=0)}/"
    found: dict[str, str] = {}
    for path, name in names.items():
        # in whose shard a record stands is chance, and records.jsonl has them all; which other
        # checkpoints are kept depends on where a signal had one written
        chance = name.startswith("records/") or path.suffix == ".png" or name == "compare.txt"
        if not chance and (not name.startswith("checkpoint-") or name.startswith(last)):
            found |= leaves(content(path, str(out)), name)
    return {place: value.replace(str(out), "") for place, value in found.items()}


def content(path: Path, out: str) -> Any:
    """Return what a file says; its bytes if that is not known."""
    if path.suffix in (".pt", ".pth"):
        return torch.load(path, weights_only=False)
    if path.suffix == ".json":
        return json.loads(path.read_text())
    # once, what a run that was killed after its end logged again
    if path.name == "log.jsonl":
        lines = [line for line in read_log(path) if "train_runtime" not in line]
        return list({(line["step"], *sorted(line)): line for line in lines}.values())
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix in (".md", ".yaml"):
        timed = (out, "Z,", "seconds", "- run: ")  # the last has the state of git
        lines = path.read_text().splitlines()
        return [line for line in lines if not any(word in line for word in timed)]
    if path.suffix == ".opus":  # every Ogg file has a serial number of its own
        return sf.read(path)[0]
    return np.frombuffer(path.read_bytes(), np.uint8)


def leaves(value: Any, where: str) -> dict[str, str]:
    """Return nested data as place → value: arrays by their digests, dictionaries without times."""
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
    """Return the places where two outcomes differ."""
    return [
        f"{place}: {expected.get(place, 'nothing')[:80]} became {found.get(place, 'nothing')[:80]}"
        for place in sorted({*expected, *found})
        if expected.get(place) != found.get(place)
    ]


# --- the attack -----------------------------------------------------------------------------------


def attack(job: Job, folder: Path, kills: int, rng: random.Random) -> Counter[str]:
    """Kill a job `kills` times in all, one to three times a run, and compare every run's end.

    Return how many kills there were by way ("late" if it had finished before), and how many runs
    "resumed". Raises AssertionError at the first thing that went wrong; its folder stays.
    """
    whole = run(job, folder / "whole" / "out")
    assert not any(whole.status), f"{job.name} fails by itself:\n{whole.said[-3000:]}"
    expected = outcome(folder / "whole" / "out")
    most = {"write": max(1, whole.points), "torn": 20}
    ends: Counter[str] = Counter()
    while sum(ends[way] for way in job.ways) < kills:
        out = folder / "again" / "out"
        story = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            way = rng.choice(job.ways)
            at = rng.randint(1, most[way]) if way in most else rng.uniform(0, whole.seconds)
            kill = Kill(way, at, rng.randrange(job.processes))
            end = run(job, out, kill)
            died = end.status[kill.rank] == -signal.SIGKILL or (way == "term" and any(end.status))
            ends[way if died else "late"] += 1
            story.append(f"{job.name}, {way} {at:.3g} of process {kill.rank}: {end.status}")
            check_end(job, way, end, "\n".join(story))
        end = run(job, out)
        assert not any(end.status), f"{story}: does not continue:\n{end.said[-1500:]}"
        found = differences(expected, outcome(out))
        assert not found, "\n".join([*story, *found[:5]])
        ends["resumed"] += 1
        shutil.rmtree(out.parent)
    return ends


def check_end(job: Job, way: str, end: End, story: str) -> None:
    """Raise AssertionError if a killed job hung, showed a traceback, or left with a wrong status."""
    # a signal that comes while Python cleans up an object is reported so, and raised again some
    # seconds later
    late = r"Exception ignored in.*?^SystemExit: 75$"
    said = re.sub(late, "", end.said, flags=re.DOTALL | re.MULTILINE)
    assert "Traceback" not in said, f"{story}: a traceback:\n{end.said[-1500:]}"
    allowed = {0, 75, -signal.SIGTERM} if way == "term" else {0, 1, -signal.SIGKILL}
    if job.processes > 1:
        # while they meet, one may find the other gone before it receives the signal itself
        allowed = allowed | {1}
    assert set(end.status) <= allowed, f"{story}\n{end.said[-3000:]}"
