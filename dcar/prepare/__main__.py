"""`python -m dcar.prepare`: corpus to tokens."""

import sys

from dcar.prepare.run import main

if __name__ == "__main__":
    sys.exit(main())
