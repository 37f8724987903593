"""Columns of a prepared split: what they hold, where they come from, and that nothing else is
read at a start."""

import hashlib
import re
from dataclasses import replace
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import soundfile
from many_rows import write_many
from tiny_data import tiny_split, write_prepared
from tiny_training import trainer_of

from dcar.model.car import CARConfig, CARDecoder
from dcar.model.load import load_decoder
from dcar.prepare import columns, prepared
from dcar.prepare.columns import FILE, SCHEMA, Split
from dcar.prepare.prepared import load_prepared, load_split, prepared_info
from dcar.prompts import load
from dcar.prompts.load import corpus_recordings, load_prompts
from dcar.recognition.ctc import frames_needed
from dcar.train.plan import data_identity
from dcar.train.settings import TrainConfig
from eval.compare.config import CompareConfig
from eval.compare.tools import load_tools


def slow(rows) -> dict[str, list]:
    """The columns, computed row by row."""

    def ranks(values: list) -> list[int]:
        place = {value: i for i, value in enumerate(sorted(set(values)))}
        return [place[value] for value in values]

    made = list(rows)
    return {
        "speech_tokens": [len(r["speech"]) for r in made],
        "text_units": [len(r["text_ids"]) for r in made],
        "ctc_frames": [frames_needed(r["text_ids"]) for r in made],
        "duration": [r["duration"] for r in made],
        "has_prompt": [int(len(r["prompt_speech"]) > 0) for r in made],
        "speaker": ranks([r["speaker"] for r in made]),
        "id_rank": ranks([r["id"] for r in made]),
        "digest_rank": ranks([hashlib.sha256(r["id"].encode()).digest() for r in made]),
    }


def held(split: Split) -> dict[str, list]:
    assert {name: str(column.dtype) for name, column in split.columns.items()} == SCHEMA
    return {name: column.tolist() for name, column in split.columns.items()}


@pytest.fixture(scope="module")
def rows():
    """Utterances of many lengths, some of them empty, some with repeated phonemes, some with a
    prompt of their own."""
    rng = np.random.default_rng(1)

    def changed(row, i):
        return {
            "speech": rng.integers(0, 12, rng.integers(0, 9)).tolist(),
            "id": f"é{i * 7 % 50}",
            "text_ids": rng.integers(1, 4, rng.integers(0, 12)).tolist(),
            "speaker": f"s{rng.integers(4)}",
            "prompt_speech": [3, 4] if i % 5 == 2 else [],
        }

    return tiny_split("train", 50).map(changed, with_indices=True)


@pytest.mark.parametrize("at_once", [1, 7, 50, 1000])
def test_columns_are_those_of_the_rows(rows, at_once, monkeypatch):
    monkeypatch.setattr(columns, "READ_AT_ONCE", at_once)
    split = Split.of(rows)
    assert held(split) == slow(rows)
    assert split.largest_token == max(map(max, filter(len, rows["speech"])))
    assert split.largest_text_id == 3
    part = Split.of(rows.select([4, 2, 40]))  # indices of a filter or a slice
    assert held(part) == slow(rows.select([4, 2, 40]))
    nothing = Split.of(rows.select([]))
    assert len(nothing) == 0 and nothing.largest_token == nothing.largest_text_id == -1
    silent = Split.of(rows.filter(lambda row: not row["speech"]))
    assert len(silent) and silent.largest_token == -1


def test_a_split_followed_by_another(rows):
    """Speakers of both are told apart by name, whatever numbers they had."""
    first = rows.filter(lambda row: row["speaker"] != "s1")
    other = tiny_split("dev", 9, speakers=3).map(
        lambda row: {"speaker": row["speaker"].replace("s2", "a")}
    )
    both = datasets.concatenate_datasets([first, other])
    joined, whole = Split.of(first).followed_by(Split.of(other), both), Split.of(both)
    for name, column in joined.columns.items():
        assert column.tolist() == whole.columns[name].tolist()
        assert column.dtype == whole.columns[name].dtype
    assert (joined.largest_token, joined.largest_text_id) == (
        whole.largest_token,
        whole.largest_text_id,
    )


def test_rows_are_found_by_id(rows):
    split = Split.of(rows)
    assert [split.find(name) for name in rows["id"]] == list(range(50))
    assert [split.find(name) for name in ("", "a", "é7x", "ê")] == [None] * 4


def test_a_folder_without_columns_is_read(tmp_path):
    data = write_prepared(
        tmp_path / "data", train=8, speech=lambda rng: [1] * int(rng.integers(1, 9))
    )
    assert not (data / "train" / FILE).exists()
    assert held(load_split(data, "train")) == slow(load_prepared(data, "train"))


# --- starts on many rows --------------------------------------------------------------------------

MANY = 200_000


@pytest.fixture(scope="module")
def many(tmp_path_factory, harmonic_wav):
    return str(
        write_many(
            tmp_path_factory.mktemp("many") / "data",
            MANY,
            tokens=12,
            voice=2,
            audio=str(harmonic_wav),
        )
    )


@pytest.fixture(scope="module")
def harmonic_wav(tmp_path_factory):
    path = tmp_path_factory.mktemp("audio") / "a.wav"
    soundfile.write(path, np.random.default_rng(0).normal(size=16_000) / 10, 16_000)
    return path


@pytest.fixture
def read(monkeypatch):
    """How many rows were read, each time; nothing may read them all."""
    counted: list[int] = []
    real = datasets.arrow_dataset.query_table

    def query(*args, **kwargs):
        counted.append(len(found := real(*args, **kwargs)))
        return found

    def forbidden(*args, **kwargs):
        raise AssertionError("all rows are read")

    monkeypatch.setattr(datasets.arrow_dataset, "query_table", query)
    for place, name in (
        (datasets.Dataset, "__iter__"),
        (datasets.Dataset, "iter"),
        (columns, "scan"),
        (prepared, "scan"),
        (load, "source_utterances"),
    ):
        monkeypatch.setattr(place, name, forbidden)
    return counted


def test_stage_one_reads_the_rows_of_its_batches(many, read, tmp_path):
    shape = CARConfig(
        **data_identity(prepared_info(many)),
        hidden_size=8,
        num_layers=1,
        num_attention_heads=2,
        ffn_size=8,
        bos=True,
    )
    config = TrainConfig(
        data=many, out=str(tmp_path / "out"), model=shape, per_device_train_batch_size=4
    )
    trainer = trainer_of(config, CARDecoder(shape))
    assert not read and len(trainer.train_dataset) == MANY
    batch = next(iter(trainer.get_train_dataloader()))
    # speech, text, and the speech of the prompt
    assert len(batch["speech_ids"]) == 4 and 0 < sum(read) <= 4 * 3


def test_eight_prompts_cost_eight_rows(many, read):
    items = load_prompts(many, "train", load_decoder("starter"), 5, 0, limit=8, min_seconds=0.2)
    assert len({i.utterance_id for i in items}) == 8 and all(i.duration >= 0.2 for i in items)
    assert 8 < sum(read) <= 8 * 3  # the row, and twice that of its prompt


@pytest.fixture
def without_models(monkeypatch):
    for name in ("load_recognizer", "load_scorers", "vocoder_for", "vocoder_identity"):
        monkeypatch.setattr(f"eval.compare.tools.{name}", lambda *args, **kwargs: {})


@pytest.mark.usefixtures("without_models")
@pytest.mark.parametrize("texts", ["split", "short"])
def test_a_comparison_reads_what_it_speaks(many, read, texts):
    tools = load_tools(
        CompareConfig(
            data=many, split="train", decoder="starter", limit=4, texts=[texts], prompt_seeds=[0, 5]
        ),
        "cpu",
    )
    spoken = 80 if texts == "short" else 4
    assert len(tools.sets[texts][0]) == len(tools.sets[texts][5]) == spoken
    # of every prompt seed row and prompt, 60 utterances to align by, and a search for one recording
    assert sum(read) <= 2 * 3 * spoken + 60 + 2 * 20


@pytest.mark.usefixtures("without_models")
def test_part_of_a_list_keeps_its_prompts(many):
    config = CompareConfig(data=many, split="train", decoder="starter", limit=4)
    few = load_tools(replace(config, texts=["split", "short:10"]), "cpu")
    whole = load_tools(replace(config, texts=["short"]), "cpu")
    assert len(few.items) == 4 and len(few.sets["short"][0]) == 10
    assert all(item in whole.items for item in few.sets["short"][0])


def test_characters_that_a_recogniser_does_not_know_are_named(
    many, without_models, monkeypatch, caplog
):
    judge = SimpleNamespace(name="judge", unknown=lambda text: set(text) & set("aeiou"))
    monkeypatch.setattr("eval.compare.tools.load_recognizer", lambda *args, **kwargs: judge)
    items = load_tools(
        CompareConfig(data=many, split="train", decoder="starter", limit=4), "cpu"
    ).items
    texts = {item.text for item in items}
    strange = {text for text in texts if judge.unknown(text)}
    said = rf"judge does not know \d characters of {len(strange)} of {len(texts)} texts \((. )*.\)"
    (message,) = [m for m in caplog.messages if "does not know" in m]
    assert strange and re.search(said, message) and "errors of every method" in message


def test_a_recording_is_read_from_the_path_in_its_row(many, read, monkeypatch):
    recording = corpus_recordings(many)
    name = load_prepared(many, "train")[MANY // 2]["id"]
    wave, rate = recording(name)
    assert rate == 16_000 and len(wave) == 16_000 and sum(read) <= 1 + 25
    monkeypatch.setattr(load, "source_utterances", lambda folder: {f"{folder} listed": None})
    with pytest.raises(KeyError):  # of what has no row, the corpus is asked
        recording("nobody")
