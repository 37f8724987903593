"""Two real processes over gloo; accelerate's `--cpu --num_processes 2` would silently run one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines",
          "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]


def environment() -> dict[str, str]:
    return {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


def two_processes(*program: object) -> str:
    """Runs a script or `-m module` with its arguments to the end; returns what both printed."""
    done = subprocess.run([*LAUNCH, *map(str, program)], env=environment(), cwd=ROOT, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
