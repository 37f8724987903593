#!/usr/bin/env bash
# Create the environment if needed and run the paper's recipe: LibriTTS -> tokens -> FAR and CAR -> DCPO -> table and report.
#   ./launch/paper.sh DATA OUT [NAME=value …] [STAGE.SETTING=value …]
# Run it again to resume. Stages and settings: docs/papers.md.
set -euo pipefail
data=$(realpath "${1:?give the LibriTTS folder: ./launch/paper.sh DATA OUT [NAME=value …]}")
out=$(realpath -m "${2:?give the folder to write: ./launch/paper.sh DATA OUT [NAME=value …]}")
. "$(dirname "$0")/environment.sh"
exec python -m launch.paper data="$data" out="$out" "${@:3}"
