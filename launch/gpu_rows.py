"""Measure every figure of the docs that needs a GPU, in one process, the most important first.

    python -m launch.gpu_rows                            # device=cpu: rehearsal with tiny sizes
    python -m launch.gpu_rows parts=[methods,steps,rounds] minutes=3

`methods` times the shipped decoder and vocoder. All other parts measure models of the papers' sizes
with random weights, because times do not depend on the weights: parts with settings are
`dcar analyse what=speed` (`eval.speed`), the others are in `launch.gpu_parts`. The output of a part
is in <out>/<part>.log, and its figures are in <out>/rows.md as soon as it ends. The same command
measures what is missing. `stage-two` trains a policy for the decoder of `stage-one`. Nothing is
downloaded.
"""

import gc
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dcar.config import check, load_config, setting
from dcar.errors import DCARError
from dcar.process import own_device, run_claimed, run_command
from dcar.storage import write_text
from dcar.tracking import provenance, write_json
from eval.speed.measure import SpeedRow
from eval.speed.run import SpeedConfig
from eval.speed.run import run as run_speed
from launch import gpu_parts

PARTS: dict[str, str | Callable[[str, Path], list[SpeedRow]]] = {
    "methods": gpu_parts.measure_methods,
    "replays": gpu_parts.measure_replays,
    "steps": "parts=[steps]",
    "rounds": "parts=[methods]",
    "stage-one": gpu_parts.measure_stage_one,
    "rollouts": gpu_parts.measure_rollouts,
    "vocoder": gpu_parts.measure_vocoder,
    "peers": "parts=[peers]",
    "stage-two": gpu_parts.measure_stage_two,
    "growth": "parts=[growth]",
    "operators": "parts=[steps] compile=false chunks=[1,3]",
    "sixteen-heads": "parts=[steps] heads=shared num_candidates=4 chunks=[1,8,16]",
    "no-graphs": "parts=[steps] graphs=false",
    "steps-float32": "parts=[steps] dtype=float32",
    "rounds-float32": "parts=[methods] dtype=float32",
}
"""Parts in their order: settings of `eval.speed`, or a function of the device and the part's
folder."""


@dataclass
class RowsConfig:
    """Settings of `launch.gpu_rows`."""

    out: str = setting("runs/gpu_rows", "Folder to write.", place="folder")
    device: str = setting(
        "cuda",
        "Device; cpu = a rehearsal with tiny sizes, whose times have no meaning.",
        choices=("cuda", "cpu"),
    )
    minutes: float = setting(6.0, "Minutes after which no further part is started.", above=0)
    parts: list[str] = setting(
        list(PARTS), "Parts to measure, in this order.", choices=tuple(PARTS)
    )

    def __post_init__(self) -> None:
        check(self)
        own_device(self.device)


def measure_speed(settings: str, device: str) -> list[SpeedRow]:
    """Run `dcar analyse what=speed` with the settings of a part."""
    size = "sizes=[paper] tokens=225 repeats=3"
    if device == "cpu":
        size = "sizes=[tiny] tokens=12 repeats=1 quick=true"
    arguments = f"device={device} dtype=bfloat16 {size} {settings}".split()
    (rows,) = run_speed(load_config(SpeedConfig, arguments)).values()
    return rows


def measure(part: str, config: RowsConfig) -> list[SpeedRow]:
    """Measure a part, with its output in <out>/<part>.log. Raises DCARError with the cause if it
    fails."""
    out, device, measured = Path(config.out), config.device, PARTS[part]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    path = out / f"{part}.log"
    with path.open("w", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        try:
            if isinstance(measured, str):
                rows = measure_speed(measured, device)
            else:
                rows = measured(device, out / part)
            if device == "cuda":
                rows.append(
                    SpeedRow("peak memory", {"GiB": torch.cuda.max_memory_allocated() / 2**30})
                )
            return rows
        except (Exception, SystemExit) as error:  # the other parts are measured in any case
            traceback.print_exc()
            cause = f"{type(error).__name__}: {str(error)[:200]}; see {path}"
            raise DCARError(cause) from error
        finally:
            gc.collect()
            torch.cuda.empty_cache()


def read_part(out: Path, part: str) -> dict[str, Any]:
    """Return what was written of a part that was measured: device, machine, revision and version of
    torch, seconds that it took, and rows; nothing otherwise."""
    path = out / f"{part}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def table(out: Path, parts: Sequence[str]) -> str:
    """Format the rows of these parts as a Markdown table."""
    lines = ["| part | what | measured | compare | on |", "| --- | --- | --- | --- | --- |"]
    for part in parts:
        measured = read_part(out, part)
        where = "{machine}, {revision}, torch {torch}".format_map(measured) if measured else ""
        if measured and measured["device"] == "cpu":
            where = f"rehearsal: {where}"
        for values in measured.get("rows", [asdict(SpeedRow("not measured yet", {}))]):
            row = SpeedRow(**values)
            lines.append(f"| {part} | {row.what} | {row.measured} | {row.compare} | {where} |")
    return "\n".join(lines) + "\n"


def run(config: RowsConfig) -> int:
    """Measure what has not been measured yet on this machine. Returns exit status 1 if a part is
    missing in the end."""
    out, end, source = Path(config.out), time.monotonic() + 60 * config.minutes, provenance()
    out.mkdir(parents=True, exist_ok=True)
    where = {"device": config.device, "machine": source["machine"]}
    where |= {"revision": source["revision"], "torch": torch.__version__}
    missing = 0
    for part in config.parts:
        started, before = time.monotonic(), read_part(out, part)
        if all(before.get(name) == where[name] for name in ("device", "machine")):
            print(f"== {part}: measured before", flush=True)
            continue
        (out / f"{part}.json").unlink(missing_ok=True)
        print(f"== {part}", flush=True)
        try:
            if started >= end:
                raise DCARError("the time is up; run the same command again to continue here")
            rows = measure(part, config)
        except DCARError as error:
            missing += 1
            print(f"{part}: {error}", flush=True)
            continue
        spent = {"seconds": time.monotonic() - started}
        print(f"{part}: {spent['seconds']:.0f} s", flush=True)
        write_json(out / f"{part}.json", {**where, **spent, "rows": [asdict(row) for row in rows]})
        write_text(out / "rows.md", table(out, config.parts))
    of = f"{len(config.parts) - missing} of {len(config.parts)} parts"
    print(f"\n{table(out, config.parts)}\n{of}; {out / 'rows.md'}")
    return 1 if missing else 0


CONFIG = RowsConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements, given `[key=value …]`."""
    # configured before stderr is redirected: a handler must not keep the log of a part
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return run_claimed(run, load_config(CONFIG, arguments))


if __name__ == "__main__":
    sys.exit(run_command("gpu_rows", main))
