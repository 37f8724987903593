"""`python -m eval.compare`: the comparison."""

import sys

from eval.compare.run import main

if __name__ == "__main__":
    sys.exit(main())
