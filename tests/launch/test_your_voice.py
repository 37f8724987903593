"""docs/your_voice.md from a folder of recordings to speech by the tuned decoder: every command
and the Python of the page in order, as printed but for the sizes of runs, on a dozen sentences
of one speaker of the starter corpus."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from test_docs import FENCE, bash_lines

from dcar.corpus.read import load_corpus

ROOT = Path(__file__).parents[2]
SMALLER = {  # program and its first argument → settings appended to the printed ones
    "dcar prepare": [],
    "dcar speak": [],
    "-m dcar.vocoder.training.pack": [],
    "dcar train": (
        "max_steps=2 warmup_steps=1 eval_steps=2 save_steps=2 per_device_train_batch_size=2"
    ).split(),
    "dcar compare": ["limit=2", "timing_utterances=0", "audio_utterances=1", "resamples=100"],
    "dcar train-vocoder": ["max_steps=2", "eval_steps=2"],
}


def programs() -> list[list[str]]:
    """Arguments of Python for every line of the page's bash blocks and for its Python blocks, in
    order."""
    found = []
    for block in FENCE.finditer((ROOT / "docs/your_voice.md").read_text()):
        if block[1] == "python":
            found.append(["-c", block[2]])
        for line in bash_lines(block[0]):
            program, *words = shlex.split(line)
            key = " ".join(shlex.split(line)[:2]) if program == "dcar" else " ".join(words[:2])
            found.append(
                [*(["-m", "dcar.cli"] if program == "dcar" else []), *words, *SMALLER[key]]
            )
    return found


def test_the_page_prepares_trains_compares_and_speaks():
    names = [words[2] for words in programs() if words[:2] == ["-m", "dcar.cli"]]
    assert names == ["prepare", "train", "compare", "compare", "speak", "train-vocoder"]


@pytest.mark.slow
def test_every_command_of_the_page_runs(tmp_path):
    (tmp_path / "recordings").mkdir()
    spoken = load_corpus("starter", None, "test")
    for i, utterance in enumerate([u for u in spoken if u.speaker == spoken[0].speaker][:12]):
        name = f"s{i:02}" if i else "one"
        soundfile.write(tmp_path / f"recordings/{name}.wav", *utterance.load())
        (tmp_path / f"recordings/{name}.txt").write_text(utterance.text)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    printed = ""
    for words in programs():
        ran = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, (
            f"{shlex.join(words)}\n{ran.stdout[-1500:]}\n{ran.stderr[-3000:]}"
        )
        printed += ran.stdout
    differences = r"car-5: [+-]\d+\.\d points\ncar-10: [+-]\d+\.\d points"
    assert re.search(differences, printed)
    for made in (
        "runs/prepared/prepared.json runs/voice/config.json runs/compare_shipped/report.html "
        "runs/compare_voice/report.html tuned.wav runs/vocoder/export/config.json"
    ).split():
        assert (tmp_path / made).exists(), made
