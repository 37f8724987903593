"""docs/your_voice.md, walked from a folder of recordings to a tuned voice with a policy: every command of its blocks,
in order, as printed but for the sizes of runs. On a dozen sentences of one speaker of the starter corpus."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from test_docs import bash_lines

from dcar.corpus.read import load_corpus

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/your_voice.md"
TRAIN = ["max_steps=2", "warmup_steps=1", "eval_steps=2", "save_steps=2", "batch_size=2"]
SMALLER = {  # of a command and what its line has → settings behind it
    "prepare": [],
    "compare": ["limit=1", "timing_utterances=0", "reasons_utterances=1", "audio_samples=1", "resamples=100"],
    "analyse": ["limit=1"],
    "score": [], "speak": [], "export": [],
    "train-chunk-scorer": TRAIN,
    "tune-voice": ["training=[max_steps=2,warmup_steps=1,eval_steps=2,save_steps=2,batch_size=2,spoken.sentences=1]",
                   "vocoder_training=[max_steps=2]", "sentences=1", "seeds=[0]", "resamples=100"],
    "train-policy": ["max_steps=1", "save_steps=1", "per_device_train_batch_size=8"],
}


def lines() -> list[list[str]]:
    """The words of every command of the page's bash blocks."""
    return [shlex.split(line) for line in bash_lines(PAGE.read_text())]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Where the reader stands: the recipes, and the recordings with their texts beside them."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "launch").symlink_to(ROOT / "launch")
    recordings = folder / "recordings"
    recordings.mkdir(parents=True)
    spoken = load_corpus("starter", None, "test")
    mine = [u for u in spoken if u.speaker == spoken[0].speaker][:12]
    for i, utterance in enumerate(mine):
        name = f"s{i:02}" if i else "one"
        soundfile.write(recordings / f"{name}.wav", *utterance.load())
        (recordings / f"{name}.txt").write_text(utterance.text)
    return folder


def test_the_page_has_the_whole_way_each_step_once():
    """From recordings to speech in the voice; only preparing (first to try) and speaking come again."""
    names = [words[1] for words in lines()]
    assert names[0] == "speak" and names[-3:] == ["train-policy", "export", "speak"]
    assert set(names) == set(SMALLER)
    assert {name for name in names if names.count(name) > 1} == {"speak", "prepare"}


@pytest.mark.slow
def test_every_command_of_the_page_runs(home):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                   "OMP_NUM_THREADS": "1"}
    for _, name, *given in lines():
        ran = subprocess.run([sys.executable, "-m", "dcar.cli", name, *given, *SMALLER[name]], cwd=home,
                             env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, f"dcar {name} {shlex.join(given)}\n{ran.stdout[-1500:]}\n{ran.stderr[-3000:]}"
    for made in ("out.wav", "runs/prepared/prepared.json", "runs/resynthesis", "runs/shipped/report.html",
                 "tuned.wav", "runs/voice/voice.json", "runs/voice/decoder/config.json",
                 "runs/voice/vocoder/config.json", "runs/policy/config.json"):
        assert (home / made).exists(), made


@pytest.mark.slow
def test_two_processes_tune_one_voice(home):
    """One trains the vocoder, mixes the decoders and prints; both speak."""
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m",
         "launch.tune_voice", "recordings=recordings", "dev_fraction=0.2", "test_fraction=0.3", "out=runs/two",
         f"training=[{','.join(TRAIN)}]", "vocoder_training=[max_steps=2]", "shares=[0.5,1.0]", "sentences=2",
         "seeds=[0]", "resamples=100"], cwd=home, capture_output=True, text=True, timeout=400,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("--voice runs/two") == 1
    assert "2 processes" in ran.stderr + ran.stdout
    found = json.loads((home / "runs/two/voice.json").read_text())
    assert [(t["share"], t["vocoder_share"]) for t in found["tried"]][:3] == [(0, 0), (0, 0.5), (0, 1)]
    assert {t["share"] for t in found["tried"]} == {0, 0.5, 1} and all(t["sentences"] for t in found["tried"])
