#!/usr/bin/env bash
# Make the environment if needed and run the tests, two at a time. Arguments go to pytest: ./launch/test.sh -m slow -n 0
#     ./launch/test.sh --coverage     the same, and which lines of the core ran; status 2 below the bound in pyproject.toml
set -euo pipefail
. "$(dirname "$0")/environment.sh"
export OMP_NUM_THREADS=1
[ "${1:-}" = --coverage ] || exec python -m pytest -q -n 2 "$@"
shift
python tests/lines.py start
DCAR_LINES=$PWD/tests/lines.py python -m pytest -q -n 2 "$@"
python tests/lines.py combine
coverage report --skip-covered --sort=cover
