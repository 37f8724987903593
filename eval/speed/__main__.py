"""`python -m eval.speed`: cost of a decoding step."""

import sys

from dcar.process import run_command
from eval.speed.run import main

if __name__ == "__main__":
    sys.exit(run_command("eval.speed", main))
