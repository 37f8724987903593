"""Contracts of imports: the floors, the rooms, no circles (pyproject.toml), and what importing a decoder costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).parents[1]


def test_contracts_of_imports_are_kept(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    status = lint_imports(config_filename="pyproject.toml", no_cache=True)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_importing_the_decoder_imports_no_audio_library():
    program = ("import sys\n"
               "import dcar.model.load, dcar.decoding, dcar.decoding.fast.passes, dcar.decoding.engine.run\n"
               "print(sorted({'soundfile', 'soxr', 'librosa', 'faster_whisper', 'onnxruntime', 'nemo', 'datasets',"
               " 'dcar.audio'} & set(sys.modules)))")
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
