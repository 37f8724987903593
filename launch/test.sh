#!/usr/bin/env bash
# Make the environment if needed and run the tests, two at a time. Arguments go to pytest: ./launch/test.sh -m slow -n 0
set -euo pipefail
extras=dev; . "$(dirname "$0")/environment.sh"
export OMP_NUM_THREADS=1
exec python -m pytest -q -n 2 "$@"
