"""The contract of every corpus format: what is written is read, whole and by split."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import soundfile as sf
from tiny_corpora import (
    RATE,
    encoded,
    tone,
    toy_prepare,
    toy_settings,
    write_libritts,
    write_manifest,
    write_parquets,
    write_starter,
)

from dcar.corpus.read import corpus_parts, validate_corpus
from dcar.corpus.rows import StoredAudio

Row = tuple[str, str, str, str | None]  # id, text, speaker, split


def starter(folder: Path) -> list[Row]:
    write_starter(folder, train=2, dev=0, test=1)
    return [
        ("train_0", "Number 0 of train.", "v0", "train"),
        ("train_1", "Number 1 of train.", "v1", "train"),
        ("test_0", "Number 0 of test.", "v0", "test"),
    ]


def jsonl(folder: Path) -> list[Row]:
    rows = [{"id": 7, "speaker": 3}, {"id": "b", "split": "test"}]
    write_manifest(folder, rows, [tone(0.6), tone(0.7)], name="valid.jsonl")
    return [("7", "Line 0.", "3", "dev"), ("b", "Line 1.", "s", "test")]


def ljspeech(folder: Path) -> list[Row]:
    (folder / "wavs").mkdir(parents=True)
    for name in "ab":
        sf.write(folder / f"wavs/{name}.wav", tone(0.6), RATE)
    (folder / "metadata.csv").write_text("a|$3|Three dollars.\nb|Plain.\n")
    (folder / "dev.txt").write_text("b\n")
    speaker = folder.name
    return [("a", "Three dollars.", speaker, "train"), ("b", "Plain.", speaker, "dev")]


def libritts(folder: Path) -> list[Row]:
    write_libritts(folder, {"train-clean-100": 1, "dev-clean": 1}, seconds=0.6)
    return [
        ("200_7001_000000_000000", "Sentence 0 of dev-clean.", "200", "dev"),
        ("100_7000_000000_000000", "Sentence 0 of train-clean-100.", "100", "train"),
    ]


def recordings(folder: Path) -> list[Row]:
    kinds = {
        "anna/one.wav": 8_000,
        "anna/two.flac": 44_100,
        "test/three.ogg": 48_000,
        "four.mp3": 22_050,
    }
    for name, rate in kinds.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        sf.write(file, np.repeat(tone(0.6, 200, rate)[:, None], 2, 1), rate)
        file.with_suffix(".txt").write_text(f"\ufeffThis is\n{file.stem}.", encoding="utf-8")
    own = folder.name
    return [
        ("anna-one", "This is one.", "anna", None),
        ("anna-two", "This is two.", "anna", None),
        ("four", "This is four.", own, None),
        ("test-three", "This is three.", own, "test"),
    ]


def saved(folder: Path) -> list[Row]:
    audio = {"bytes": encoded(0.6, kind="FLAC", subtype="PCM_16"), "path": None}
    parts = {}
    for split, name in (("train", "a"), ("validation", "c")):
        columns = {"audio": [audio], "text": ["Hi."], "id": [name], "speaker_id": [1]}
        rows = datasets.Dataset.from_dict(columns)
        parts[split] = rows.cast_column("audio", datasets.Audio(decode=False))
    datasets.DatasetDict(parts).save_to_disk(str(folder))
    return [("a", "Hi.", "1", "train"), ("c", "Hi.", "1", "dev")]


def parquets(folder: Path) -> list[Row]:
    write_parquets(folder, files=2, rows=2)
    return [
        (f"u{f}{i}", f"Row {i} of file {f}.", str(f), "train") for f in range(2) for i in range(2)
    ]


FORMATS: dict[str, tuple[str, Callable[[Path], list[Row]], dict]] = {
    "starter": ("starter", starter, {}),
    "jsonl": ("jsonl", jsonl, {}),
    "ljspeech": ("ljspeech", ljspeech, {}),
    "libritts": ("libritts", libritts, {}),
    "folder": ("folder", recordings, {}),
    "datasets, saved": ("datasets", saved, {}),
    "datasets, parquet": ("datasets", parquets, {}),
    "datasets, streamed": ("datasets", parquets, {"streaming": True}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read(name, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    kind, write, how = FORMATS[name]
    expected = write(tmp_path / "c")
    rows = [row for part in corpus_parts(kind, tmp_path / "c", **how) for row in part.rows()]
    assert [(u.id, u.text, u.speaker, u.split) for u in rows] == expected
    assert validate_corpus(rows, 0.5, 5) == []
    for row in rows:
        wave, rate = row.load(RATE)
        assert rate == RATE and 0.55 * RATE < len(wave) < 1.05 * RATE
        if kind == "datasets":  # bytes stay on disk unless they are streamed
            assert isinstance(row.audio, bytes if how else StoredAudio)
    stamps = [json.dumps(part.stamp) for part in corpus_parts(kind, tmp_path / "c", **how)]
    assert stamps == [json.dumps(part.stamp) for part in corpus_parts(kind, tmp_path / "c", **how)]


def test_a_low_rate_is_warned_of(tmp_path, caplog):
    """It is no bad row, streamed or not; 16 kHz is what encoders read."""
    recordings(tmp_path / "c")
    caplog.set_level("DEBUG", "dcar.audio")
    for stream in (False, True):
        caplog.clear()
        settings = toy_settings(tmp_path / "c", tmp_path / "p", corpus="folder", stream=stream)
        toy_prepare(replace(settings, splits=("train",)))
        [note] = [m for m in caplog.messages if "16000" in m]
        assert note.startswith(f"{tmp_path}/c/anna/one.wav: 8000 Hz")
