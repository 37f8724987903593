"""Contracts of imports: the floors, the rooms, no circles (pyproject.toml), and what importing a decoder costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_contracts_of_imports_are_kept():
    """In a process of its own: import-linter switches the loggers off that exist, and later tests listen to them."""
    program = ("from importlinter.cli import lint_imports\n"
               "raise SystemExit(lint_imports(config_filename='pyproject.toml', no_cache=True))")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "0 broken" in done.stdout, done.stdout + done.stderr


def test_importing_the_decoder_imports_no_audio_library():
    program = ("import sys\n"
               "import dcar.model.load, dcar.decoding, dcar.decoding.fast.passes, dcar.decoding.engine.run\n"
               "print(sorted({'soundfile', 'soxr', 'librosa', 'faster_whisper', 'onnxruntime', 'nemo', 'datasets',"
               " 'dcar.audio'} & set(sys.modules)))")
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
