"""Rows that would stop validation or crash what comes after it: each is listed, with file and
line, and left out."""

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile as sf
from tiny_corpora import tone, toy_prepare, wav_bytes, write_libritts

from dcar.corpus.read import read_corpus, validate_corpus
from dcar.errors import DataError
from dcar.prepare.prepared import load_prepared
from dcar.prepare.run import PrepareConfig

RATE = 16_000
GOOD = {"audio": "good.wav", "text": "A fine day.", "speaker": "s", "split": "train"}


def line(changes: str = "", **fields: Any) -> str:
    """A row as JSON, with a piece of JSON that Python would not write; without the fields that
    are `...`."""
    row = {key: value for key, value in {**GOOD, **fields}.items() if value is not ...}
    return json.dumps(row)[:-1] + (f", {changes}}}" if changes else "}")


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, seconds in (
        ("good.wav", 1.2),
        ("whole.flac", 3.0),
        ("short.wav", 0.1),
        ("long.wav", 6),
    ):
        sf.write(tmp_path / name, tone(seconds), RATE)
    for name in ("good.wav", "whole.flac"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / f"cut_{name}").write_bytes(data[: len(data) * 2 // 3])
    (tmp_path / "zero.wav").write_bytes(b"")
    sf.write(tmp_path / "nan.wav", np.full(RATE, np.nan, np.float32), RATE, subtype="FLOAT")
    sf.write(tmp_path / "silent.wav", np.zeros(RATE), RATE)
    (tmp_path / "text.flac").write_text("not audio at all")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


# a whole line, the fields that differ from a good row, or a piece of JSON for one; and what is said
# of it
ROWS = [
    ({},),
    ('{"id": "x", "audio": ', "not valid JSON"),
    ("[1, 2]", "a JSON list, expected an object"),
    ({"speaker": ...}, "fields missing: speaker"),
    ({"audio": 5, "text": None}, "fields missing: text"),
    ({"text": ["x"]}, "fields that must be strings: text"),
    ({"speaker": " "}, "must not be empty: speaker"),
    ({"prompt_audio": 3}, "'prompt_audio' must be a string"),
    ({"audio": "none.wav"}, "none.wav"),
    ({"audio": "zero.wav"}, "0 bytes"),
    ({"audio": "nan.wav"}, "NaN"),
    ({"audio": "silent.wav"}, "silent"),
    ({"audio": "text.flac"}, "readable"),
    ({"audio": "short.wav"}, "0.10 s.*0.5…5 s"),
    ({"audio": "long.wav"}, "6.00 s.*0.5…5 s"),
    ({"text": ""}, " text: "),
    ({"text": "😀"}, " text: "),
    ({"text": "你好", "audio": "none.wav"}, "你 好", "none.wav"),  # two faults, two reports
    ({"prompt_audio": "short.wav"}, "prompt .*short.wav .*0.10 s"),
    ({"prompt_audio": "none.wav"}, "prompt .*none.wav"),
    ({"prompt_audio": "whole.flac", "prompt_text": "..."}, "prompt_text: "),
    ({"prompt_audio": "good.wav"}, "its prompt is its own recording"),
    ({"text": "A fine \ud800 day."}, r"text .*U\+D800.* 8"),
    ({"id": "\ud800"}, r"id .*U\+D800"),
    ({"speaker": "\udfff"}, r"speaker .*U\+DFFF"),
    ({"split": "\ud800"}, r"split .*U\+D800"),
    ({"prompt_audio": "whole.flac", "prompt_text": "Oh \ud800"}, r"prompt_text .*U\+D800"),
    ({"audio": "\ud800.wav"}, "audio: .*UTF-8"),
    ({"prompt_audio": "\ud800"}, "prompt_audio: .*UTF-8"),
    (f'"id": {"1" * 5000}', "digits"),
    ({"audio": "pipe"}, "pipe"),
    ({"audio": "cut_whole.flac"}, "readable"),
    ({"audio": "cut_good.wav"}, "1.20 s.* 0.[78]"),
    ({},),
]


def test_every_bad_row_is_listed_and_left_out(folder):
    manifest = folder / "m.jsonl"
    lines = []
    for i, (row, *_) in enumerate(ROWS):
        whole = isinstance(row, str) and row[0] in "{["
        own = {"id": f"u{i}"} | ({} if isinstance(row, str) else row)
        lines.append(row if whole else line(row if isinstance(row, str) else "", **own))
    manifest.write_text("\n".join([*lines, line(id="u0")]))
    rows, problems = read_corpus("jsonl", manifest)
    problems += validate_corpus(rows, 0.5, 5, num_workers=4)
    assert all(str(p).encode().decode().startswith(f"{manifest}:") for p in problems)
    assert str(problems[0]).count(str(manifest)) == 1
    found = sorted(
        ((int(p.source.rpartition(":")[2]), p.message) for p in problems), key=lambda f: f[0]
    )
    expected = [
        (number, message) for number, (_, *messages) in enumerate(ROWS, 1) for message in messages
    ]
    again = (len(ROWS) + 1, "m.jsonl:1;")
    for (number, message), (expected_number, pattern) in zip(
        found, [*expected, again], strict=True
    ):
        assert number == expected_number and re.search(pattern, message), (number, message, pattern)

    manifest.write_text("\n".join(lines))
    for stream in (False, True):
        config = PrepareConfig(
            out=str(folder / f"out{stream}"),
            corpus="jsonl",
            path=str(manifest),
            skip_bad=True,
            splits=("train",),
            stream=stream,
            min_seconds=0.5,
            max_seconds=5,
        )
        report = toy_prepare(config)
        assert {p.source for p in report.problems} == {
            f"{manifest}:{number}" for number, _ in expected
        }
        assert report.text().encode().count(b"m.jsonl:") >= len(ROWS) - 2
        assert load_prepared(folder / f"out{stream}", "train")["id"] == ["u0", f"u{len(ROWS) - 1}"]


@pytest.mark.parametrize(
    ("part", "message"), [("half", "cut off"), ("flipped", "damaged"), ("no", "damaged")]
)
def test_a_manifest_that_breaks_off(part: str, message: str, tmp_path):
    """The rows before the break are read; the break itself has a line."""
    rows = [line(id=f"c{i}") + "\n" for i in range(5000)]
    raw = gzip.compress("".join(rows).encode())
    middle = len(raw) // 2
    broken = {
        "half": raw[:middle],
        "flipped": raw[:middle] + bytes([raw[middle] ^ 0xFF]) + raw[middle + 1 :],
        "no": b"no",
    }
    (tmp_path / "m.jsonl.gz").write_bytes(broken[part])
    read, problems = read_corpus("jsonl", tmp_path / "m.jsonl.gz")
    assert message in problems[-1].message
    assert problems[-1].source == f"{tmp_path}/m.jsonl.gz:{len(read) + len(problems)}"
    assert len(read) > (1000 if part != "no" else -1)
    assert part != "half" or all(u.id == f"c{i}" for i, u in enumerate(read))


def test_a_folder_without_permission_or_names_of_another_encoding(tmp_path):
    write_libritts(tmp_path, {"dev-clean": 2})
    [chapter] = {p.parent for p in tmp_path.glob("dev-clean/100/*/*.wav")}
    wav = next(chapter.glob("*.wav"))
    for ending, data in ((b".wav", wav.read_bytes()), (b".normalized.txt", b"Hi.")):
        with open(os.fsencode(chapter) + b"/caf\xe9" + ending, "wb") as file:
            file.write(data)
    rows, problems = read_corpus("libritts", tmp_path)
    assert len(rows) == 2 and len(problems) == 1 and "U+DC" in problems[0].message
    str(problems[0]).encode()


def test_a_string_that_is_not_utf8_in_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    count = 1500  # rows are read in batches
    raw = [b"Hi."] * count
    raw[1200] = b"caf\xe9"
    text = pa.Array.from_buffers(pa.string(), count, pa.array(raw, pa.binary()).buffers())
    pq.write_table(
        pa.table(
            {
                "id": [f"u{i}" for i in range(count)],
                "text": text,
                "speaker": ["s"] * count,
                "duration": [0.5] * count,
                "audio": [{"bytes": wav_bytes(0.5, 200)}] * count,
            }
        ),
        tmp_path / "data.parquet",
    )
    rows, problems = read_corpus("datasets", tmp_path / "data.parquet")
    assert len(rows) == count - 1 and [p.source.rpartition(":")[2] for p in problems] == ["1201"]
    assert rows[1200].id == "u1201"


def test_a_copy_is_not_called_as_another_utterance(folder):
    (folder / "m.jsonl").write_text(line(id="g") + "\n" + line(id="g@0.9") + "\n")
    config = PrepareConfig(
        out=str(folder / "out"),
        corpus="jsonl",
        path=str(folder / "m.jsonl"),
        splits=("train",),
        speeds=(1.0, 0.9),
    )
    with pytest.raises(DataError, match="'g@0.9'"):
        toy_prepare(config)
