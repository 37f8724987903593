"""Corpora: five layouts written to disk as they are in the wild, and every way in which their rows break."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile as sf
from tiny_corpora import RATE, encoded, tone, write_starter

from dcar.corpus.read import (
    StoredAudio,
    Utterance,
    canonical_split,
    corpus_parts,
    load_corpus,
    read_corpus,
    validate_corpus,
)
from dcar.errors import DataError


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))


def write(path: Path, seconds: float = 1.2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    sf.write(path, tone(seconds), RATE)
    return path


def test_starter(tmp_path: Path) -> None:
    corpus = write_starter(tmp_path / "c", train=3, dev=0, test=2)
    rows = load_corpus("starter", corpus)
    assert [u.id for u in rows] == ["train_0", "train_1", "train_2", "test_0", "test_1"]
    assert (rows[1].split, rows[1].speaker, rows[1].source) == ("train", "v1", "train.parquet:2")
    wave, rate = rows[0].load(16_000)
    assert (rate, len(wave)) == (16_000, 9_600)
    assert {u.split for u in load_corpus("starter", corpus, "test")} == {"test"}
    assert validate_corpus(rows, 0.5, 5) == []


def test_recordings_of_a_low_rate_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No bad rows, but their number is told; 16 kHz is what encoders read."""
    lines = []
    for i, rate in enumerate((8_000, 11_025, 16_000, 24_000)):
        sf.write(tmp_path / f"{i}.wav", tone(1.2, rate=rate), rate)
        lines.append(json.dumps({"id": f"u{i}", "audio": f"{i}.wav", "text": "A line.", "speaker": "s"}))
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    rows = load_corpus("jsonl", tmp_path / "m.jsonl")
    assert validate_corpus(rows, 0.5, 5) == []
    [warning] = caplog.messages
    assert warning.startswith("2 of 4 recordings have fewer than 16000 samples a second (the lowest 8000)")
    caplog.clear()
    assert validate_corpus(rows[2:], 0.5, 5) == [] and not caplog.messages


def test_starter_broken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="no train.parquet"):
        load_corpus("starter", tmp_path / "a")
    (tmp_path / "a" / "train.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"train.parquet: not a readable parquet"):
        load_corpus("starter", tmp_path / "a")
    pq.write_table(pa.table({"id": ["a"], "text": ["b"]}), tmp_path / "a" / "train.parquet")
    with pytest.raises(DataError, match="columns missing: audio, duration, speaker"):
        load_corpus("starter", tmp_path / "a")


def test_ljspeech(tmp_path: Path) -> None:
    root = tmp_path / "LJ"
    for name in ("LJ-1", "LJ-2", "LJ-3"):
        write(root / "wavs" / f"{name}.wav")
    metadata = [
        'LJ-1|It cost $3 "then"|It cost three dollars',
        "LJ-2|Plain.",
        "",
        "LJ-3|Raw.|",
        "LJ-9|Gone.|Gone.",
        "broken",
    ]
    (root / "metadata.csv").write_bytes("\r\n".join(metadata).encode("utf-8-sig") + b"\r\nLJ-4|caf\xe9|x\r\n")
    rows, problems = read_corpus("ljspeech", root)
    assert [(u.id, u.text, u.speaker, u.split) for u in rows[:3]] == [
        ("LJ-1", "It cost three dollars", "LJ", None),
        ("LJ-2", "Plain.", "LJ", None),
        ("LJ-3", "Raw.", "LJ", None),
    ]
    assert [p.source for p in problems] == [f"{root}/metadata.csv:6", f"{root}/metadata.csv:7"]
    assert "1 fields" in problems[0].message
    assert "not UTF-8 (byte 9" in problems[1].message
    found = validate_corpus(rows, 0.5, 5)
    assert [(p.id, p.source) for p in found] == [("LJ-9", f"{root}/metadata.csv:5")]
    assert "no such audio file" in found[0].message
    with pytest.raises(DataError, match=r"(?s)2 rows.*metadata.csv:6.*metadata.csv:7"):
        load_corpus("ljspeech", root)


def test_ljspeech_splits_by_lists_of_ids(tmp_path: Path) -> None:
    root = tmp_path / "LJ"
    names = [f"LJ-{i}" for i in range(6)]
    for name in names:
        write(root / "wavs" / f"{name}.wav")
    (root / "metadata.csv").write_text("".join(f"{name}|The same words.\n" for name in names))
    (stamp,) = (part.stamp for part in corpus_parts("ljspeech", root))
    (root / "val.txt").write_text("LJ-1\n\nLJ-4\n")
    (root / "test.txt").write_text("/data/wavs/LJ-2.wav|The same words.\n")
    (root / "notes.txt").write_text("recorded in May\n")
    rows, problems = read_corpus("ljspeech", root)
    assert [u.split for u in rows] == ["train", "dev", "test", "train", "dev", "train"] and not problems
    assert [u.id for u in read_corpus("ljspeech", root, "dev")[0]] == ["LJ-1", "LJ-4"]
    assert corpus_parts("ljspeech", root)[0].stamp != stamp  # a changed list is noticed

    (root / "train.txt").write_text("LJ-0\nLJ-3\nLJ-9\n")
    rows, problems = read_corpus("ljspeech", root)
    assert len(rows) == 5
    assert [(p.id, p.source) for p in problems] == [("LJ-5", f"{root}/metadata.csv:6"), ("LJ-9", f"{root}/train.txt:3")]
    assert "in none of train.txt, val.txt, test.txt" in problems[0].message
    assert "not in metadata.csv" in problems[1].message

    (root / "train.txt").write_text("LJ-0\nLJ-4\n")
    with pytest.raises(DataError, match=r"val.txt:3: LJ-4 stands in .*train.txt:2 as well"):
        read_corpus("ljspeech", root)


def test_jsonl_with_prompts_and_splits(tmp_path: Path) -> None:
    write(tmp_path / "wav" / "a.wav")
    write(tmp_path / "wav" / "p.wav", 2)
    row = {
        "id": 7,
        "audio": "wav/a.wav",
        "text": "Hi.",
        "speaker": 3,
        "prompt_audio": "wav/p.wav",
        "prompt_text": "Oh.",
    }
    (tmp_path / "valid.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps({**row, "id": "b", "split": "test"}) + "\n"
    )
    a, b = load_corpus("jsonl", tmp_path / "valid.jsonl")
    assert (a.id, a.speaker, a.split, b.split) == ("7", "3", "dev", "test")
    prompt = a.load_prompt(8_000)
    assert prompt is not None
    assert len(prompt[0]) == 16_000
    assert load_corpus("jsonl", tmp_path)[0] == a  # a folder of manifests


def test_every_bad_line_of_a_manifest_is_reported(tmp_path: Path) -> None:
    good = write(tmp_path / "good.wav")
    (tmp_path / "zero.wav").write_bytes(b"")
    sf.write(tmp_path / "nan.wav", np.full(RATE, np.nan, np.float32), RATE, subtype="FLOAT")
    sf.write(tmp_path / "silent.wav", np.zeros(RATE), RATE)
    (tmp_path / "text.flac").write_text("not audio at all")
    write(tmp_path / "short.wav", 0.1)
    write(tmp_path / "long.wav", 6)

    def line(**changes: Any) -> str:
        row = {"id": f"u{len(lines)}", "audio": good.name, "text": "A fine day.", "speaker": "s", **changes}
        return json.dumps({k: v for k, v in row.items() if v is not ...})

    lines: list[str] = []
    expected: list[tuple[int, str]] = []

    def add(text: str, *messages: str) -> None:
        lines.append(text)
        expected.extend((len(lines), m) for m in messages)

    add(line())
    add('{"id": "x", "audio": ', "not valid JSON")
    add("[1, 2]", "a JSON list, expected an object")
    add("[" * 100_000, "JSON")
    add(line(speaker=...), "fields missing: speaker")
    add(line(audio=5, text=None), "fields missing: text")
    add(line(text=["x"]), "fields that must be strings: text")
    add(line(speaker=" "), "must not be empty: speaker")
    add(line(prompt_audio=3), "'prompt_audio' must be a string")
    add(line(audio="none.wav"), "no such audio file")
    add(line(audio="zero.wav"), "0 bytes")
    add(line(audio="nan.wav"), "NaN")
    add(line(audio="silent.wav"), "silent")
    add(line(audio="text.flac"), "not readable as audio")
    add(line(audio="short.wav"), r"0.10 s, outside 0.5…5 s")
    add(line(audio="long.wav"), r"6.00 s, outside 0.5…5 s")
    add(line(text=""), "text: text is empty")
    add(line(text="😀"), "text: text is empty or has no letter")
    add(line(text="你好", audio="none.wav"), "cannot say", "no such audio file")  # two faults, two reports
    add(line(id="u0"), "used before, at")
    add(line(prompt_audio="short.wav"), "the prompt .*short.wav is 0.10 s")
    add(line(prompt_audio="none.wav"), "prompt .*none.wav: there is no such audio file")
    add(line(prompt_audio=good.name, prompt_text="..."), "prompt_text: text is empty")
    add(line())
    manifest = tmp_path / "m.jsonl"
    manifest.write_text("\n".join(lines) + "\n")

    rows, problems = read_corpus("jsonl", manifest)
    problems += validate_corpus(rows, 0.5, 5, num_workers=4)
    found = sorted(((int(p.source.rpartition(":")[2]), p.message) for p in problems), key=lambda f: f[0])
    assert len(found) == len(expected)
    for (number, message), (expected_number, pattern) in zip(found, expected, strict=True):
        assert number == expected_number
        assert re.search(pattern, message), (number, message, pattern)
    assert all(str(p).startswith(f"{manifest}:") for p in problems)
    assert str(problems[0]).count(str(manifest)) == 1


def test_libritts(tmp_path: Path) -> None:
    root = tmp_path / "LibriTTS"
    for subset, speaker, n in (("train-clean-100", "19", 2), ("dev-clean", "84", 1), ("test-other", "367", 1)):
        for i in range(n):
            stem = root / subset / speaker / "198" / f"{speaker}_198_000000_00000{i}"
            write(stem.with_suffix(".wav"))
            Path(f"{stem}.original.txt").write_text("It cost $5.")
            Path(f"{stem}.normalized.txt").write_text("It cost five dollars.\n")
    chapter = root / "train-clean-100" / "19" / "198"
    write(chapter / "19_198_orphan.wav")
    (chapter / "19_198_mute.normalized.txt").write_text("No audio for this.")
    (chapter / "19_198.trans.tsv").write_text("other files lie here too\n")
    rows, problems = read_corpus("libritts", root)
    assert {(u.split, u.speaker) for u in rows} == {("train", "19"), ("dev", "84"), ("test", "367")}
    assert [(p.id, p.message) for p in problems] == [
        ("19_198_orphan", "no transcript 19_198_orphan.normalized.txt beside it")
    ]
    found = validate_corpus(rows, 0.5, 5)
    assert [p.id for p in found] == ["19_198_mute"]
    assert "no such audio file" in found[0].message
    assert {u.split for u in read_corpus("libritts", root / "dev-clean")[0]} == {"dev"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="not the LibriTTS layout"):
        read_corpus("libritts", tmp_path / "empty")


def _hf(n: int, **columns: Any) -> datasets.Dataset:
    data = {
        "audio": [{"bytes": encoded(kind="FLAC", subtype="PCM_16"), "path": None}] * n,
        "text": ["Good morning."] * n,
    }
    return datasets.Dataset.from_dict({**data, **columns}).cast_column("audio", datasets.Audio(decode=False))


def _save(root: Path) -> str:
    parts = {"train": _hf(2, id=["a", "b"], speaker_id=[1, 2]), "validation": _hf(1, id=["c"], speaker_id=[3])}
    datasets.DatasetDict(parts).save_to_disk(str(root))
    return str(root)


def _parquet(root: Path) -> str:
    root.mkdir()
    _hf(2, id=["a", "b"], speaker_id=[1, 2]).to_parquet(str(root / "train-00000-of-00001.parquet"))
    _hf(1, id=["c"], speaker_id=[3]).to_parquet(str(root / "validation-00000-of-00001.parquet"))
    return str(root)


@pytest.mark.parametrize("make", [_save, _parquet])
def test_hugging_face_datasets(tmp_path: Path, make: Callable[[Path], str]) -> None:
    rows = load_corpus("datasets", make(tmp_path / "hf"))
    assert [(u.id, u.speaker, u.split) for u in rows] == [("a", "1", "train"), ("b", "2", "train"), ("c", "3", "dev")]
    assert isinstance(rows[0].audio, StoredAudio)  # bytes stay on disk
    assert rows[2].load()[1] == 24_000
    assert validate_corpus(rows, 0.5, 5) == []


def test_hugging_face_paths_and_bad_rows(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.wav"))
    audio = [{"bytes": None, "path": path}, {"bytes": None, "path": None}, {"bytes": b"", "path": "/no/such.wav"}, None]
    # plain parquet, as written by pandas: nothing says that the column is audio but its name
    pq.write_table(pa.table({"audio": audio, "sentence": ["Fine.", "x", "y", None]}), tmp_path / "hf.parquet")
    rows, problems = read_corpus("datasets", tmp_path / "hf.parquet")
    assert [p.source.rpartition(":")[2] for p in problems] == ["4"]
    assert "expected a string" in problems[0].message
    assert rows[0].speaker == "unknown"
    found = validate_corpus(rows, 0.5, 5)
    assert [p.id for p in found] == ["hf_0000001", "hf_0000002"]
    assert "neither audio bytes nor a path" in found[0].message
    assert "no such audio file" in found[1].message


def test_hugging_face_unusable(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["x"], "label": [1]}).save_to_disk(str(tmp_path / "hf"))
    with pytest.raises(DataError, match=r"Audio column .*it has text, label"):
        load_corpus("datasets", tmp_path / "hf")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("x")
    with pytest.raises(DataError, match="neither a folder made by save_to_disk nor parquet"):
        load_corpus("datasets", tmp_path / "folder")
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match="datasets cannot open it"):
        load_corpus("datasets", tmp_path / "bad.parquet")


def test_unusable_corpora_say_so(tmp_path: Path) -> None:
    for kind, path, message in [
        ("csv", tmp_path, "unknown corpus kind 'csv'; one of starter, folder, ljspeech"),
        ("jsonl", None, "needs a path"),
        ("datasets", None, "needs a path"),
        ("jsonl", tmp_path / "none", "there is no such jsonl corpus"),
        ("ljspeech", tmp_path, "no metadata.csv"),
        ("jsonl", tmp_path, "no .jsonl manifest"),
    ]:
        with pytest.raises(DataError, match=message):
            load_corpus(kind, path)
    (tmp_path / "m.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no utterances"):
        load_corpus("jsonl", tmp_path / "m.jsonl")
    with pytest.raises(DataError, match="min_seconds < max_seconds"):
        validate_corpus([], 5, 1)


def test_a_duration_that_the_audio_does_not_have(tmp_path: Path) -> None:
    u = Utterance("a", "Hello.", "s", encoded(1.0), duration=3.0, source="train.parquet:1")
    assert "but the corpus says 3.00 s" in validate_corpus([u], 0.5, 5)[0].message


def test_split_names() -> None:
    names = ["train", "train.clean.100", "validation", "dev-other", "test-clean", "evaluation", "other"]
    assert [canonical_split(n) for n in names] == ["train", "train", "dev", "dev", "test", "test", "other"]
