"""Two real processes over gloo; accelerate's `--cpu --num_processes 2` would silently run one."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
    "--main_process_port",
    "0",
]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests/toys'}",
    }


def accelerate_launch(*program: object) -> None:
    """Run `-m module` with its arguments in two processes, as a user starts them."""
    done = subprocess.run(
        [*LAUNCH, *map(str, program)],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def two_processes(*program: object) -> str:
    """Run a script or `-m module` with its arguments in two processes and return what both
    printed. They are started like `accelerate launch` does, without the seconds that it takes to
    load."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])

    def run(rank: str) -> subprocess.CompletedProcess:
        ranks = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        return subprocess.run(
            [sys.executable, *map(str, program)],
            env=environment() | ranks,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(run, "01"))
    for done in both:
        assert done.returncode == 0, done.stderr[-3000:]
    return "".join(done.stdout for done in both)
