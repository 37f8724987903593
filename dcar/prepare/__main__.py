"""`python -m dcar.prepare`: corpus to tokens."""

import sys

from dcar.prepare.run import main
from dcar.process import run_command

if __name__ == "__main__":
    sys.exit(run_command("dcar.prepare", main))
