#!/usr/bin/env bash
# Make the environment if needed and run the whole pipeline on the embedded corpus into runs/quickstart.
# Arguments are settings: ./launch/quickstart.sh out=runs/other
set -euo pipefail
. "$(dirname "$0")/environment.sh"
exec python -m launch.quickstart "$@"
