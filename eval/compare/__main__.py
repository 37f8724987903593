"""Entry point of `python -m eval.compare`."""

import sys

from dcar.process import run_command
from eval.compare.run import main

if __name__ == "__main__":
    sys.exit(run_command("eval.compare", main))
