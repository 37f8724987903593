"""Parts for GPUs are compared with plain operators before they are first used on a device.

Kernels of our own, compiled operations and CUDA graphs may be wrong in ways that raise nothing: a
sum, a race, a driver's fault. So the first model of some shapes on a device decides, in a process
of its own and within a limit of time, which parts compute what plain operators compute
(dcar/gpu_checks.py). The others are replaced by operators, with a warning. The verdict is kept by
device, driver, versions, shapes and the code of this package.
"""

import fcntl
import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from dcar.home import cache_folder
from dcar.storage import digest_of, write_text

logger = logging.getLogger(__name__)

LIMIT_S = 900.0  # of one comparison: a hang is a fault too
ORDERS: dict[str, list[frozenset[str]]] = {
    "decoding": [
        frozenset(parts)
        for parts in (
            ("kernels", "compilation", "graphs"),
            ("kernels", "compilation"),
            ("compilation", "graphs"),
            ("compilation",),
            ("graphs",),
        )
    ],
    "vocoder": [frozenset({"graphs"})],
    "optimizer": [frozenset({"kernels"})],
}
"""Sets of parts in the order in which they are tried, for what uses them. After the last, operators
alone are used."""
CODE = (
    *("dcar/gpu_checks.py", "dcar/sampling.py", "dcar/ties.py", "dcar/repetition.py"),
    *("dcar/decoding/**/*.py", "dcar/model/**/*.py", "dcar/vocoder/**/*.py", "dcar/optim/*.py"),
    "heads/*.py",
)
"""Files on which a verdict depends."""
NO_ROOM = ("out of memory", "busy or unavailable")  # errors of a GPU that is full, or not shared
under_test: frozenset[str] | None = None  # in a process that compares: these parts
_known: dict[tuple[str, str, str], frozenset[str]] = {}


def sound_parts(use: str, case: Mapping[str, Any], device: Any) -> frozenset[str]:
    """Return the parts that compute what operators compute, for a use (a key of ORDERS) in a case
    (shapes and types, as JSON) on a GPU. They are compared if that is not known yet, by one process
    while others wait. Without a GPU, where tensors only pretend to be on one, that is all parts."""
    if under_test is not None:
        return under_test
    known = use, json.dumps(case, sort_keys=True), str(device)
    if known not in _known:
        import torch

        found = _verdict(use, case, device) if torch.cuda.is_available() else ORDERS[use][0]
        _known[known] = found
    return _known[known]


def _verdict(use: str, case: Mapping[str, Any], device: Any) -> frozenset[str]:
    """Return the parts of a verdict that is stored, or is stored now."""
    where = describe(device)
    folder = cache_folder("dcar") / "gpu_checks"
    verdict = folder / f"{digest_of([use, dict(case), where, _code()])[:32]}.json"
    with _one_process(folder):
        if not verdict.exists():
            logger.info("%s: comparing the parts for this GPU with plain operators, once", use)
            parts, faults = compare(use, case, device)
            # a first fault of another kind stands: those parts are wrong, and not used
            if faults and any(sign in faults[0] for sign in NO_ROOM):
                logger.warning(
                    "%s: the parts for this GPU were not compared with plain operators, because "
                    "its memory is full or it serves one process (%s); run `dcar doctor` while it "
                    "is free",
                    use,
                    faults[0],
                )
                return ORDERS[use][0]
            said = {"use": use, "parts": sorted(parts), "faults": faults, **where}
            write_text(verdict, json.dumps(said, indent=2) + "\n")
    said = json.loads(verdict.read_text(encoding="utf-8"))
    if said["faults"]:
        warn(use, said["faults"], where)
    return frozenset(said["parts"])


def compare(use: str, case: Mapping[str, Any], device: Any) -> tuple[frozenset[str], list[str]]:
    """Return the first set of parts that agrees with operators, and the faults of those before
    it."""
    faults: list[str] = []
    for parts in ORDERS[use]:
        fault = run_check(use, case, device, parts)
        if fault is None:
            return parts, faults
        faults.append(f"{', '.join(sorted(parts))}: {fault}")
    return frozenset(), faults


def run_check(use: str, case: Mapping[str, Any], device: Any, parts: Iterable[str]) -> str | None:
    """Compare parts with operators in a process of its own. Return what is wrong, if anything."""
    command = [sys.executable, "-m", "dcar.gpu_checks", use, str(device), ",".join(sorted(parts))]
    try:
        done = subprocess.run(
            command, input=json.dumps(case), capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"no result after {LIMIT_S:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return lines[-1][:300]
    return None


def describe(device: Any) -> dict[str, str]:
    """Return what a verdict depends on besides shapes and code: the GPU, its driver, versions."""
    import torch

    driver = Path("/proc/driver/nvidia/version")
    triton = "none"
    with suppress(metadata.PackageNotFoundError):
        triton = metadata.version("triton")
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": driver.read_text().splitlines()[0].strip() if driver.exists() else "unknown",
        "torch": torch.__version__,
        "triton": triton,
    }


def _code() -> str:
    """Return the digest of the code whose results are compared."""
    root, code = Path(__file__).parents[1], hashlib.sha256()
    for pattern in CODE:
        for file in sorted(root.glob(pattern)):
            code.update(file.read_bytes())
    return code.hexdigest()


@contextmanager
def _one_process(folder: Path) -> Iterator[None]:
    """Let one process at a time compare."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def warn(use: str, faults: Sequence[str], where: Mapping[str, str]) -> None:
    """Name the parts that are replaced, and why."""
    logger.warning(
        "%s: parts for this GPU are replaced by plain operators, which are slower, because they "
        "are wrong or fail here (%s); please report this line (%s)",
        use,
        "; ".join(faults),
        ", ".join(f"{name} {value}" for name, value in where.items()),
    )
