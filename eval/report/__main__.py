"""`python -m eval.report`: one HTML page of a comparison."""

import sys

from eval.report.page import main

if __name__ == "__main__":
    sys.exit(main())
