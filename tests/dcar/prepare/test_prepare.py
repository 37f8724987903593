"""Preparation: the whole path on a small corpus with a toy tokenizer and a toy speaker encoder;
faults and restarts."""

import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tiny_corpora import rows_of, tone, toy_prepare, toy_settings, write_manifest, write_starter
from tiny_data import ToyEncoder, ToyTokenizer
from tones import noise

from dcar.errors import AudioError, ConfigError, DataError, StorageError
from dcar.prepare import prepared
from dcar.prepare.prepared import load_prepared
from dcar.prepare.recordings import source_utterances
from dcar.prepare.run import PrepareConfig
from dcar.text.english.phonemes import text_to_ids


def test_the_whole_way(corpus, tmp_path):
    out = tmp_path / "prepared"
    report = toy_prepare(toy_settings(corpus, out, num_proc=4))
    assert report.exit_code == 0
    counts = {split: count["utterances"] for split, count in report.counts.items()}
    assert counts == {"train": 10, "dev": 3, "test": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prepared"]  # no shards are left behind
    rows = load_prepared(out, "train")
    # corpus order, although batches were sorted by length
    assert rows["id"] == [f"train_{i}" for i in range(10)]
    assert set(rows.column_names) == set(prepared.COLUMNS)
    original = source_utterances(out)
    for row in rows:
        wave, _ = original[row["id"]].load(16_000)
        assert row["speech"] == ToyTokenizer()._codes(wave).tolist()
        assert row["text_ids"] == text_to_ids(row["text"])
        assert row["duration"] == pytest.approx(len(wave) / 16_000)
        [embedding] = ToyEncoder().embed_windows([ToyEncoder().windows(wave, 16_000)])
        np.testing.assert_allclose(row["voice"][:256], embedding, atol=1e-6)
        assert (row["speed"], row["audio"], row["prompt_speech"]) == (1.0, "", [])
    info = prepared.prepared_info(out)
    assert info.tokenizer.identity == "toy@sha-toy"
    assert info.corpus == {"kind": "starter", "path": str(corpus)}
    assert info.counts["train"]["tokens"] == sum(map(len, rows["speech"]))


def test_run_again_does_nothing_and_changes_are_noticed(corpus, tmp_path):
    out = tmp_path / "p"
    toy_prepare(toy_settings(corpus, out))
    again = ToyTokenizer()
    report = toy_prepare(
        toy_settings(corpus, out, num_proc=3, batch_seconds=50, device="cpu"), again
    )
    assert report.counts["train"]["utterances"] == 10 and again.batches == []
    toy_prepare(toy_settings(corpus, out, limit=2), again)
    assert load_prepared(out, "train").num_rows == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p"]


def test_an_interrupted_run_continues_after_its_last_shard(corpus, tmp_path):
    out, whole = tmp_path / "p", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        toy_prepare(toy_settings(corpus, out), ToyTokenizer(fail_after=2))
    assert not out.exists()
    assert len(list((tmp_path / ".p.partial").glob("*/train-*.parquet"))) == 2
    rest = ToyTokenizer()
    toy_prepare(toy_settings(corpus, out), rest)
    assert sum(map(len, rest.batches)) == 15 - 8
    toy_prepare(toy_settings(corpus, whole))
    assert rows_of(out) == rows_of(whole)


@pytest.mark.parametrize("stream", [False, True])
def test_killed_before_it_cleans_up_the_next_run_does(corpus, tmp_path, stream: bool, monkeypatch):
    out = tmp_path / "p"
    settings = toy_settings(corpus, out, stream=stream)

    def killed(path: Path, *args: Any, **kwargs: Any) -> None:
        if Path(path).name == ".p.partial":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            toy_prepare(settings)
    assert (tmp_path / ".p.partial").is_dir() and out.is_dir()
    again = ToyTokenizer()
    assert toy_prepare(settings, again).counts["train"]["utterances"] == 10 and again.batches == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p"]


def test_shards_of_another_corpus_or_tokenizer_are_never_reused(corpus, tmp_path):
    out = tmp_path / "p"
    with pytest.raises(KeyboardInterrupt):
        toy_prepare(toy_settings(corpus, out), ToyTokenizer(fail_after=2))
    other = ToyTokenizer()
    other.checksum = "sha-other"
    toy_prepare(toy_settings(corpus, out), other)
    assert sum(map(len, other.batches)) == 15
    assert prepared.prepared_info(out).tokenizer.checksum == "sha-other"


def test_the_disk_fills_up(corpus, tmp_path, monkeypatch):
    real, calls = pq.write_table, []

    def full(table: Any, path: Path, **kwargs: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half a shard")
            raise OSError(28, "No space left on device")
        real(table, path, **kwargs)

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(StorageError, match="train-000001.parquet: .*Errno 28"):
        toy_prepare(toy_settings(corpus, tmp_path / "p"))
    assert [p.suffix for p in (tmp_path / ".p.partial").glob("*/*.parquet*")] == [".parquet"]
    rest = ToyTokenizer()
    toy_prepare(toy_settings(corpus, tmp_path / "p"), rest)
    assert sum(map(len, rest.batches)) == 15 - 4


def _process(settings: PrepareConfig, rank: int) -> int:
    tokenizer = ToyTokenizer()
    toy_prepare(settings, tokenizer, process_index=rank, num_processes=2)
    return sum(map(len, tokenizer.batches))


@pytest.mark.parametrize("stream", [False, True])
def test_two_processes_share_the_shards(corpus, tmp_path, stream):
    """Two operating-system processes that have nothing in common but the folder."""
    settings = toy_settings(corpus, tmp_path / "p", stream=stream)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        done = pool.starmap(_process, [(settings, 0), (settings, 1)], chunksize=1)
    assert sum(done) == 15 and min(done) > 0
    toy_prepare(toy_settings(corpus, tmp_path / "one"))
    assert rows_of(tmp_path / "p") == rows_of(tmp_path / "one")


def test_rank_comes_from_the_launcher(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DataError, match=r"0.003 minutes for process 0 .*validated.json"):
        toy_prepare(toy_settings(corpus, tmp_path / "p", wait_minutes=0.003))
    with pytest.raises(ConfigError, match="process 2 of 2"):
        toy_prepare(toy_settings(corpus, tmp_path / "p"), process_index=2)


def test_bad_rows_stop_the_run_unless_skipped(tmp_path):
    out = tmp_path / "p"
    corpus = write_starter(tmp_path / "c", audio={"bytes": b"junk", "path": "x"})
    for _ in range(2):  # the verdict of the first attempt is kept, and still a verdict
        with pytest.raises(DataError, match=r"(?s)skip_bad.*train.parquet:1"):
            toy_prepare(toy_settings(corpus, out))
    report = toy_prepare(toy_settings(corpus, out, skip_bad=True))
    assert [p.id for p in report.problems] == ["train_0"]
    assert load_prepared(out, "train")["id"] == [f"train_{i}" for i in range(1, 10)]
    # finished with rows skipped is not finished without
    with pytest.raises(DataError, match="1 problems"):
        toy_prepare(toy_settings(corpus, out))
    write_starter(corpus)  # repaired
    assert toy_prepare(toy_settings(corpus, out)).counts["train"]["utterances"] == 10


def test_broken_manifest_lines_can_be_repaired_or_removed(tmp_path):
    manifest = write_manifest(tmp_path, 6 * [{}], [tone(1.0)])
    rows = manifest.read_text()
    manifest.write_text(rows + "{broken")
    settings = toy_settings(manifest, tmp_path / "p", corpus="jsonl")
    with pytest.raises(DataError, match=r"m.jsonl:7: "):
        toy_prepare(settings)
    manifest.write_text(rows)
    counts = toy_prepare(settings).counts
    assert {s: n["utterances"] for s, n in counts.items()} == {"train": 4, "dev": 1, "test": 1}
    manifest.write_text("{broken")
    assert toy_prepare(replace(settings, validate=True)).exit_code == 1
    with pytest.raises(DataError, match="of 1 rows 1 "):
        toy_prepare(replace(settings, skip_bad=True))
    manifest.write_text(rows)
    with pytest.raises(DataError, match="of 6 rows 0 .*6 .*filter_seconds"):
        toy_prepare(replace(settings, filter_seconds=(15, 20)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_corpus_without_splits_is_divided_by_sentence(tmp_path, stream):
    forms = ["It’s line {}.", "it's line, {}"]  # the same words
    rows = [
        {"id": f"u{i}", "text": forms[i % 2].format(i // 2), "speaker": f"s{i % 2}"}
        for i in range(40)
    ]
    shares = dict(corpus="jsonl", stream=stream, dev_fraction=0.1, test_fraction=0.2)
    places = []
    for order, name in ((rows, "a"), (rows[::-1], "b")):
        manifest = write_manifest(tmp_path, order, [tone(1.0)])
        toy_prepare(toy_settings(manifest, tmp_path / name, **shares))
        split_rows = rows_of(tmp_path / name).items()
        places.append({i: split for split, columns in split_rows for i in columns["id"]})
    assert places[0] == places[1]  # the order of the manifest does not matter
    assert all(places[0][f"u{2 * i}"] == places[0][f"u{2 * i + 1}"] for i in range(20))
    sizes = sorted(list(places[0].values()).count(s) for s in ("train", "dev", "test"))
    assert min(sizes) > 0 and (stream or sizes == [4, 8, 28])


def test_prompts_are_tokenised_too(tmp_path):
    prompt = {"audio": "0.wav", "prompt_audio": "1.wav", "prompt_text": "Oh.", "split": "test"}
    late = {**prompt, "prompt_audio": "2.wav"}  # silence before and after it is not tokenised
    manifest = write_manifest(
        tmp_path,
        [prompt, {"audio": "0.wav", "split": "test"}, late],
        [tone(1.0), tone(1.25), np.pad(tone(1.25), 48_000) + noise(7.25) / 100],
    )
    toy_prepare(toy_settings(manifest, tmp_path / "out", corpus="jsonl", splits=("test",)))
    with_prompt, without, late = load_prepared(tmp_path / "out", "test")
    assert (len(with_prompt["prompt_speech"]), with_prompt["prompt_text"]) == (63, "Oh.")
    assert 63 < len(late["prompt_speech"]) <= 63 + 2 * 40
    assert len(with_prompt["prompt_voice"]) == 298
    assert (without["prompt_speech"], without["prompt_voice"]) == ([], [])
    assert with_prompt["audio"] == str(tmp_path / "0.wav")


@pytest.mark.parametrize("stream", [False, True])
def test_what_no_model_can_read_is_a_bad_row(tmp_path, stream):
    """A prompt that is too long for the tokenizer, and a recording without a voice, once stopped
    preparation at the same place every time."""
    rows = [
        {"audio": "0.wav", "speaker": "a", "split": "train"},
        {"audio": "0.wav", "prompt_audio": "1.wav", "prompt_text": "Oh.", "split": "train"},
        {"audio": "2.wav", "split": "train"},
    ]
    manifest = write_manifest(tmp_path, rows, [tone(1.0), tone(3.0), noise(1.25, 0, 24_000)])
    shared = dict(corpus="jsonl", splits=("train",), max_seconds=2.5, stream=stream)
    if not stream:
        report = toy_prepare(toy_settings(manifest, "", **shared, validate=True))
        assert [p.id for p in report.problems] == ["u1"] and "3.00 s" in str(report.problems[0])
    with pytest.raises((DataError, AudioError), match="u[12]"):
        toy_prepare(toy_settings(manifest, tmp_path / "strict", **shared))
    report = toy_prepare(toy_settings(manifest, tmp_path / "p", **shared, skip_bad=True))
    assert load_prepared(tmp_path / "p", "train")["id"] == ["u0"]
    assert [p.id for p in report.problems] == ["u1", "u2"]
    short = ToyTokenizer()
    short.max_seconds = 2.0
    with pytest.raises(ConfigError, match="toy reads at most 2 s; set max_seconds=2"):
        toy_prepare(toy_settings(manifest, tmp_path / "q", **shared), short)


def test_speed_copies_are_for_training_only(corpus, tmp_path):
    out = tmp_path / "p"
    toy_prepare(toy_settings(corpus, out, speeds=(1.0, 0.8), max_seconds=1.2))
    train, dev = load_prepared(out, "train"), load_prepared(out, "dev")
    assert dev.num_rows == 3
    by_id = {r["id"]: r for r in train}
    plain, slow = by_id["train_1"], by_id["train_1@0.8"]
    assert (slow["speaker"], slow["speed"]) == (plain["speaker"] + "@0.8", pytest.approx(0.8))
    assert slow["duration"] == pytest.approx(plain["duration"] / 0.8, rel=0.01)
    pitches = [np.mean(row["speech"][5:-5]) for row in (plain, slow)]
    assert pitches[1] == pytest.approx(0.8 * pitches[0], rel=0.1)
    assert "train_2" in by_id  # 1.0 s: its slow copy would be 1.25 s, beyond the limit
    assert "train_2@0.8" not in by_id


def test_the_prompt_of_a_copy_has_its_speed(tmp_path):
    """It is another speaker's voice, which the prompt at the former speed once contradicted."""
    row = {"audio": "0.wav", "prompt_audio": "1.wav", "prompt_text": "Oh.", "split": "train"}
    manifest = write_manifest(tmp_path, [row], [tone(1.0), tone(1.5)])
    shared = dict(corpus="jsonl", splits=("train",), speeds=(1.0, 0.8))
    toy_prepare(toy_settings(manifest, tmp_path / "p", **shared))
    plain, slow = load_prepared(tmp_path / "p", "train")
    pitches = [np.mean(row["prompt_speech"][5:-5]) for row in (plain, slow)]
    assert pitches[1] == pytest.approx(0.8 * pitches[0], rel=0.1)
    toy_prepare(toy_settings(manifest, tmp_path / "q", **shared, max_seconds=1.6))
    assert load_prepared(tmp_path / "q", "train").num_rows == 1  # 1.9 s of prompt are too long


def test_missing_splits(corpus, tmp_path, caplog):
    with pytest.raises(DataError, match=r"splits other .*dev, test, train"):
        toy_prepare(toy_settings(corpus, tmp_path / "p", splits=("other",)))
    assert list(
        toy_prepare(toy_settings(corpus, tmp_path / "p", splits=("train", "other"))).counts
    ) == ["train"]
    assert "split other" in caplog.text
    manifest = write_manifest(
        tmp_path, [{"split": s} for s in ("train", "validated", "other", "other")], [tone(0.6)]
    )
    for stream in (False, True):
        caplog.clear()
        out = tmp_path / f"q{stream}"
        toy_prepare(toy_settings(manifest, out, corpus="jsonl", stream=stream))
        assert "other (2), validated (1)" in caplog.text
        assert "no split dev, test; " in caplog.text
