"""Refusals of corpora: the error names the fault."""

from pathlib import Path

import datasets
import pytest
from tiny_corpora import write_libritts

from dcar.corpus.read import corpus_parts, load_corpus, read_corpus
from dcar.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unusable")
    for name in ("empty", "words", "starter", "lj", "lists", "headless"):
        (folder / name).mkdir()
    (folder / "words" / "a.txt").write_text("x")
    (folder / "starter" / "train.parquet").write_bytes(b"PAR1 no")
    datasets.Dataset.from_dict({"text": ["x"], "label": [1]}).save_to_disk(str(folder / "hf"))
    (folder / "bad.parquet").write_bytes(b"nothing")
    (folder / "m.jsonl").write_text("\n")
    (folder / "lj" / "metadata.csv").write_text("a\nb\n")
    (folder / "list").write_text("1_1_1_1 1_1_1_2\n")
    (folder / "headless" / "list.csv").write_text("LJ001|Printing, in 1455\n")
    for name in ("list.csv", "other.tsv"):
        (folder / "lists" / name).write_text("")
    write_libritts(folder / "LibriTTS", {"dev-clean": 1})
    return folder


@pytest.mark.parametrize(
    ("kind", "path", "words"),
    [
        ("csv", "empty", "'csv' ljspeech"),
        ("jsonl", None, "'jsonl' path"),
        ("datasets", None, "'datasets' path"),
        ("jsonl", "none", "/none jsonl"),
        ("jsonl", "empty", "/empty jsonl"),
        ("jsonl", "m.jsonl", "m.jsonl"),
        ("ljspeech", "empty", "metadata.csv"),
        ("ljspeech", "lj", "metadata.csv:1 metadata.csv:2"),
        ("libritts", "empty", "LibriTTS"),
        ("starter", "empty", "/empty train.parquet"),
        ("starter", "starter", "starter/train.parquet"),
        ("datasets", "hf", "Audio label"),
        ("datasets", "bad.parquet", "bad.parquet"),
        ("datasets", "words", "words save_to_disk"),
        ("folder", "headless", "list.csv:1: file_name"),
        ("folder", "lists", "list.csv other.tsv"),
        ("folder", "empty", "empty: .flac"),
        ("unicats", "list", "list audio_root"),
    ],
)
def test_unusable_corpora_say_so(kind, path, words, folder):
    with pytest.raises(DataError) as refused:
        load_corpus(kind, path and folder / path)
    assert all(word in str(refused.value) for word in words.split(" "))


def test_unusable_settings_say_so(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    libritts, hub = folder / "LibriTTS", "hf download nobody/nothing "
    for ask, words in (
        (lambda: read_corpus("libritts", libritts, subsets=["train-clean-960"]), "train-clean-960"),
        (lambda: read_corpus("ljspeech", libritts, subsets=["dev-clean"]), "libritts"),
        (lambda: corpus_parts("datasets", "nobody/nothing:clean"), hub),
        (lambda: corpus_parts("datasets", "nobody/nothing:clean", streaming=True), hub),
    ):
        with pytest.raises(DataError, match=words):
            ask()
