"""`python -m dcar.train`: stage one."""

import sys

from dcar.process import run_command
from dcar.train.car import main

if __name__ == "__main__":
    sys.exit(run_command("dcar.train", main))
