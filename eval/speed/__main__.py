"""`python -m eval.speed`: cost of a decoding step."""

import sys

from eval.speed.run import main

if __name__ == "__main__":
    sys.exit(main())
