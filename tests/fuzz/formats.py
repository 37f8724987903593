"""Every format that people write or copy by hand, in miniature: what makes a good folder of it, and
what reads it to the end."""

import base64
import contextlib
import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf
from tiny_corpora import tone, wav_bytes, write_manifest

from dcar.audio import audio_seconds, load_audio, load_segment
from dcar.config import load_config
from dcar.corpus.read import read_corpus, validate_corpus
from dcar.corpus.rows import describe
from dcar.errors import DCARError
from dcar.prepare.run import PrepareConfig
from dcar.storage import digest, seal
from dcar.train.car import TrainConfig
from dcar.train.checkpoints import latest_checkpoint


@dataclasses.dataclass(frozen=True)
class Format:
    """`make` writes a good folder and returns the files to damage; `read` reads it as the
    program does."""

    name: str
    make: Callable[[Path], list[str]]
    read: Callable[[Path], Any]
    cost: float = 1.0  # how many cases of it for one of the others


def _lines(path: Path, rows: list[dict[str, Any]]) -> list[str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [path.name]


def _jsonl(folder: Path) -> list[str]:
    row = {"audio": "0.wav", "split": "train", "prompt_audio": "1.wav", "prompt_text": "Oh."}
    rows = [row | {"text": f"The {i}th day, $3.50 & more.", "speaker": i % 2} for i in range(4)]
    return [write_manifest(folder, rows, [tone(1.1), tone(1.2)]).name]


def _cuts(folder: Path) -> list[str]:
    sf.write(folder / "a.wav", tone(0.8), 16_000)
    inside = base64.b64encode(wav_bytes(0.8, 200)).decode()
    in_file, in_memory = (
        {
            "sampling_rate": 16_000,
            "duration": 0.8,
            "sources": [{"type": kind, "channels": [0], "source": source}],
        }
        for kind, source in (("file", "a.wav"), ("memory", inside))
    )
    said = [
        {"start": 0, "text": "A day.", "speaker": "s"},
        {"start": 1, "custom": {"texts": ["Hi."]}, "speaker": "s"},
    ]
    rows = [
        {
            "id": f"u{i}",
            "start": 0.1 * (i % 2),
            "duration": 0.8 - 0.1 * (i % 2),
            "channel": 0,
            "type": "MonoCut",
            "supervisions": said,
            "recording": in_memory if i == 2 else in_file,
        }
        for i in range(4)
    ]
    _lines(folder / "cuts_dev.jsonl", rows)
    lines = (folder / "cuts_dev.jsonl").read_bytes()
    (folder / "cuts_train.jsonl.gz").write_bytes(gzip.compress(lines))
    return ["cuts_dev.jsonl", "cuts_train.jsonl.gz"]


def _ljspeech(folder: Path) -> list[str]:
    (folder / "wavs").mkdir()
    for i in range(3):
        sf.write(folder / "wavs" / f"LJ-{i}.wav", tone(0.4), 16_000)
    (folder / "metadata.csv").write_text(
        "".join(f"LJ-{i}|On 3/4, Dr. X.|On the day {i}.\n" for i in range(3))
    )
    (folder / "test.txt").write_text("LJ-2\n")
    (folder / "meta.lst").write_text(
        "LJ-0|Oh.|wavs/LJ-1.wav|Hello.\nLJ-1|Oh.|wavs/LJ-1.wav|Hello.|wavs/LJ-0.wav\n"
    )
    return ["metadata.csv", "test.txt", "meta.lst", "wavs/LJ-0.wav"]


def _corpus(*kinds: tuple[str, str]) -> Callable[[Path], Any]:
    def read(folder: Path) -> None:
        for kind, inside in kinds:
            rows, problems = read_corpus(kind, folder / inside)
            problems += validate_corpus(rows, 0.1, 5)
            describe(problems).encode()

    return read


def _audio(folder: Path) -> list[str]:
    kinds = {
        "a.wav": ("WAV", "PCM_16"),
        "b.wav": ("WAV", "FLOAT"),
        "c.flac": ("FLAC", "PCM_16"),
        "d.ogg": ("OGG", "VORBIS"),
        "e.opus": ("OGG", "OPUS"),
        "f.mp3": ("MP3", "MPEG_LAYER_III"),
    }
    for name, (kind, subtype) in kinds.items():
        sf.write(folder / name, tone(0.3), 16_000, format=kind, subtype=subtype)
    return list(kinds)


def _read_audio(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        audio_seconds(path)
        attempt(lambda path=path: load_segment(path, 0.1, 0.1))  # type: ignore[misc]
        wave, rate = load_audio(path, 24_000)
        assert rate == 24_000 and wave.ndim == 1 and np.isfinite(wave).all() and len(wave) < 10**7


def _checkpoint(folder: Path) -> list[str]:
    for step in (1, 2):
        inside = folder / f"checkpoint-{step}"
        inside.mkdir()
        (inside / "model.safetensors").write_bytes(b"weights")
        (inside / "trainer_state.json").write_text("{}")
        files = {path.name: digest(path) for path in inside.iterdir()}
        seal(inside, files, step=step, processes=1)
    return [f"checkpoint-2/{path.name}" for path in sorted(inside.iterdir())]


def _read_checkpoint(folder: Path) -> None:
    found = latest_checkpoint(folder)
    assert found is not None and found.name in ("checkpoint-1", "checkpoint-2")


def _recipes(folder: Path) -> list[str]:
    recipes = Path(__file__).parents[2] / "launch" / "recipes"
    for name in ("car_tiny.yaml", "prepare.yaml"):
        (folder / name).write_bytes(
            (recipes / name.replace("prepare.", "prepare_paper.")).read_bytes()
        )
    return ["car_tiny.yaml", "prepare.yaml"]


def _read_recipes(folder: Path) -> None:
    attempt(lambda: load_config(TrainConfig, ["--config", str(folder / "car_tiny.yaml")]))
    load_config(PrepareConfig, ["--config", str(folder / "prepare.yaml")])


def attempt(action: Callable[[], Any]) -> None:
    """Run one of several readers; an error of the project is as good as a result, and the next
    one follows."""
    with contextlib.suppress(DCARError):
        action()


FORMATS = [
    Format("jsonl", _jsonl, _corpus(("jsonl", "m.jsonl")), cost=2),
    Format(
        "lhotse",
        _cuts,
        _corpus(("lhotse", "cuts_dev.jsonl"), ("lhotse", "cuts_train.jsonl.gz")),
        cost=2,
    ),
    Format("ljspeech", _ljspeech, _corpus(("seed-tts-eval", "meta.lst"), ("ljspeech", "."))),
    Format("audio", _audio, _read_audio),
    Format("checkpoint", _checkpoint, _read_checkpoint),
    Format("recipes", _recipes, _read_recipes),
]
