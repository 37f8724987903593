"""`dcar prepare stream=true`: the same rows as the plain way, shared by files, restarts, damage,
memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soundfile as sf
from tiny_corpora import (
    rows_of,
    tone,
    toy_prepare,
    toy_settings,
    write_libritts,
    write_manifest,
    write_parquets,
)
from tiny_data import ToyTokenizer

from dcar.errors import DataError
from dcar.prepare.prepared import load_prepared, prepared_info
from dcar.prepare.run import PrepareConfig

ROOT = Path(__file__).parents[3]
TOYS = ROOT / "tests/toys"


def config(path: Path, out: Path, **changes: Any) -> PrepareConfig:
    return toy_settings(
        path, out, **{"corpus": "jsonl", "shard_size": 3, "stream": True, **changes}
    )


def manifest(folder: Path, rows: int = 10, name: str = "m.jsonl", **first: Any) -> Path:
    """`rows` utterances of 0.5, 0.6 … s in three splits; the fields `first` go into row 0."""
    waves = [tone(0.5 + i / 10, 200 + 20 * i) for i in range(min(rows, 10))]
    written = [
        {"speaker": f"s{i % 2}", "split": ("train", "dev", "train", "test")[i % 4]}
        for i in range(rows)
    ]
    return write_manifest(folder, [written[0] | first, *written[1:]], waves, name=name)


def test_streamed_is_the_same_as_plain(tmp_path):
    path = manifest(tmp_path / "c")
    toy_prepare(config(path, tmp_path / "streamed"))
    toy_prepare(config(path, tmp_path / "plain", stream=False))
    assert rows_of(tmp_path / "streamed") == rows_of(tmp_path / "plain")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "plain", "streamed"]
    again = ToyTokenizer()
    assert (
        toy_prepare(config(path, tmp_path / "streamed"), again).counts["train"]["utterances"] == 5
    )
    assert again.batches == []


def test_streamed_dataset_is_shared_by_files(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = write_parquets(tmp_path / "hf", files=4, rows=3)
    settings = dict(corpus="datasets", splits=("train",))
    both, second = config(folder, tmp_path / "both", **settings), ToyTokenizer()
    toy_prepare(both, second, process_index=1, num_processes=2)
    assert sum(map(len, second.batches)) == 6 and not (tmp_path / "both").exists()
    toy_prepare(both, process_index=0, num_processes=2)
    toy_prepare(config(folder, tmp_path / "one", **settings))
    assert rows_of(tmp_path / "both") == rows_of(tmp_path / "one")
    assert load_prepared(tmp_path / "both", "train").num_rows == 12


def test_interrupted_and_continued_with_another_number_of_processes(tmp_path):
    path = manifest(tmp_path / "c", rows=12)
    with pytest.raises(KeyboardInterrupt):
        toy_prepare(config(path, tmp_path / "p", splits=("train",)), ToyTokenizer(fail_after=2))
    rest = [ToyTokenizer(), ToyTokenizer()]
    for rank in (1, 0):
        toy_prepare(
            config(path, tmp_path / "p", splits=("train",)),
            rest[rank],
            process_index=rank,
            num_processes=2,
        )
    assert sum(len(b) for t in rest for b in t.batches) == 6 - 3  # rows 0 and 2, row 4 were done
    toy_prepare(config(path, tmp_path / "whole", splits=("train",)))
    assert rows_of(tmp_path / "p") == rows_of(tmp_path / "whole")


def test_an_incomplete_shard_is_made_again(tmp_path):
    path = manifest(tmp_path / "c")
    other = config(path, tmp_path / "p", wait_minutes=0.002)
    with pytest.raises(DataError, match="waited"):  # for the other, which comes later
        toy_prepare(other, process_index=0, num_processes=2)
    toy_prepare(other, process_index=1, num_processes=2)
    shard = sorted((tmp_path / ".p.partial").glob("*/train-*.parquet"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    again = ToyTokenizer()
    toy_prepare(config(path, tmp_path / "p"), again)
    assert 0 < sum(map(len, again.batches)) <= 3  # that chunk only
    toy_prepare(config(path, tmp_path / "whole"))
    assert rows_of(tmp_path / "p") == rows_of(tmp_path / "whole")


def test_bad_rows_and_repeated_ids(tmp_path):
    path = manifest(tmp_path / "c", audio="absent.wav")
    path.write_text(path.read_text() + "{broken\n")
    for _ in range(2):
        with pytest.raises(DataError, match=r"(?s)2 .*absent.wav.*m.jsonl:11: "):
            toy_prepare(config(path, tmp_path / "p"))
    skipped = ToyTokenizer()
    report = toy_prepare(config(path, tmp_path / "p", skip_bad=True), skipped)
    assert skipped.batches == []
    assert len(report.problems) == 2
    assert report.counts["train"]["utterances"] == 4
    twice = manifest(tmp_path / "d", name="d.jsonl", id="u5")
    with pytest.raises(DataError, match="(?s)1 .*'u5'"):
        toy_prepare(config(twice, tmp_path / "q", skip_bad=True))


def test_libritts_between_three_and_twenty_seconds(tmp_path):
    """filter_seconds leaves rows out without calling them bad, streamed or not."""
    subsets = {"train-clean-100": 3, "dev-clean": 2, "test-clean": 2}
    root = write_libritts(tmp_path / "LibriTTS", subsets, seconds=0.5)
    long = next((root / "train-clean-100").rglob("*.wav"))
    sf.write(long, tone(1.0, rate=24_000), 24_000)
    for stream in (True, False):
        chosen = dict(corpus="libritts", stream=stream, filter_seconds=(0.3, 0.7))
        report = toy_prepare(config(root, tmp_path / f"p{stream}", **chosen))
        assert report.problems == [] and report.filtered == 1
        counts = {s: c["utterances"] for s, c in report.counts.items()}
        assert counts == {"train": 2, "dev": 2, "test": 2}
    part = dict(corpus="libritts", subsets=("dev-clean",), splits=("dev",))
    chosen = toy_prepare(config(root, tmp_path / "sub", **part))
    assert chosen.counts["dev"]["utterances"] == 2
    assert prepared_info(tmp_path / "sub").corpus["subsets"] == ["dev-clean"]


@pytest.mark.slow  # three quarters of a minute
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Peak memory of a process over 80 and over 800 utterances of 0.5 s: the audio alone would
    add 11 MB a copy, the rows of the plain way with audio and tables several times that."""
    peaks = []
    for rows in (80, 800):
        path = manifest(tmp_path / str(rows), rows=rows)
        settings = ["corpus=jsonl", f"path={path}", "shard_size=40", "stream=true"]
        done = subprocess.run(
            [sys.executable, TOYS / "prepare_worker.py", *settings, f"out={tmp_path / f'p{rows}'}"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{TOYS}", "OMP_NUM_THREADS": "1"},
        )
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["utterances"] == rows
        peaks.append(result["peak_mb"])
    assert peaks[1] - peaks[0] < 12, peaks
