"""`python -m eval.report`: one HTML page of a comparison."""

import sys

from dcar.process import run_command
from eval.report.page import main

if __name__ == "__main__":
    sys.exit(run_command("eval.report", main))
