"""Stage one: `python -m dcar.train`."""

import sys

from dcar.process import run_command
from dcar.train.car import main

if __name__ == "__main__":
    sys.exit(run_command("dcar.train", main))
