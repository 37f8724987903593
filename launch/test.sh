#!/usr/bin/env bash
# Make the environment if needed and run the tests. Arguments go to pytest: ./launch/test.sh -m slow
set -euo pipefail
. "$(dirname "$0")/environment.sh"
export OMP_NUM_THREADS=1
exec python -m pytest -q "$@"
