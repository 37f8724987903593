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

import torch

from dcar.config import check, load_config, setting
from dcar.errors import DCARError
from dcar.process import own_device, run_claimed, run_command
from dcar.storage import write_text
from dcar.tracking import machine, write_json
from eval.speed.measure import Row
from eval.speed.run import SpeedConfig
from eval.speed.run import run as run_speed
from launch import gpu_parts

PARTS: dict[str, str | Callable[[str, Path], list[Row]]] = {
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


def measure_speed(settings: str, device: str) -> list[Row]:
    """Run `dcar analyse what=speed` with the settings of a part."""
    size = "sizes=[paper] tokens=225 repeats=3"
    if device == "cpu":
        size = "sizes=[tiny] tokens=12 repeats=1 quick=true"
    arguments = f"device={device} dtype=bfloat16 {size} {settings}".split()
    (rows,) = run_speed(load_config(SpeedConfig, arguments)).values()
    return rows


def measure(part: str, config: RowsConfig) -> list[Row]:
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
                rows.append(Row("peak memory", {"GiB": torch.cuda.max_memory_allocated() / 2**30}))
            return rows
        except (Exception, SystemExit) as error:  # the other parts are measured in any case
            traceback.print_exc()
            cause = f"{type(error).__name__}: {str(error)[:200]}; see {path}"
            raise DCARError(cause) from error
        finally:
            gc.collect()
            torch.cuda.empty_cache()


def read_rows(out: Path, part: str) -> list[Row]:
    """Return the rows of a part that was measured; none otherwise."""
    path = out / f"{part}.json"
    return [Row(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def table(out: Path, parts: Sequence[str]) -> str:
    """Format the rows of these parts as a Markdown table."""
    gpu = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if gpu else "no GPU, tiny sizes: a rehearsal"
    lines = [f"{where}; {machine()}; torch {torch.__version__}", ""]
    lines += ["| part | what | measured | compare |", "| --- | --- | --- | --- |"]
    for part in parts:
        for row in read_rows(out, part) or [Row("not measured yet", {})]:
            lines.append(f"| {part} | {row.what} | {row.measured} | {row.compare} |")
    return "\n".join(lines) + "\n"


def run(config: RowsConfig) -> int:
    """Measure what has not been measured yet on this device. Returns exit status 1 if a part is
    missing in the end."""
    out, end = Path(config.out), time.monotonic() + 60 * config.minutes
    out.mkdir(parents=True, exist_ok=True)
    missing = 0
    for part in config.parts:
        path, started = out / f"{part}.json", time.monotonic()
        if path.exists():
            if json.loads(path.read_text())["device"] == config.device:
                print(f"== {part}: measured before", flush=True)
                continue
            path.unlink()
        print(f"== {part}", flush=True)
        try:
            if started >= end:
                raise DCARError("the time is up; run the same command again to continue here")
            rows = measure(part, config)
        except DCARError as error:
            missing += 1
            print(f"{part}: {error}", flush=True)
            continue
        described = [asdict(row) for row in rows]
        write_json(path, {"device": config.device, "rows": described})
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
