"""Corpora: layouts written to disk as they are in the wild, and every way in which their rows
break."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile as sf
from tiny_corpora import RATE, encoded, tone

from dcar.corpus.read import corpus_parts, load_corpus, read_corpus
from dcar.corpus.read import validate_corpus as validate
from dcar.corpus.rows import Utterance, canonical_split
from dcar.errors import DataError


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))


@pytest.fixture
def ljspeech(tmp_path):
    (tmp_path / "LJ" / "wavs").mkdir(parents=True)
    for i in range(6):
        sf.write(tmp_path / "LJ" / "wavs" / f"LJ-{i}.wav", tone(1.2), RATE)
    return tmp_path / "LJ"


def test_ljspeech(ljspeech):
    lines = [
        'LJ-1|It cost $3 "then"|It cost three dollars',
        "LJ-2|Plain.",
        "",
        "LJ-3|Raw.|",
        "LJ-9|Gone.|Gone.",
        "no",
    ]
    written = "\r\n".join(lines).encode("utf-8-sig") + b"\r\nLJ-4|caf\xe9|x\r\n"
    (ljspeech / "metadata.csv").write_bytes(written)
    rows, problems = read_corpus("ljspeech", ljspeech)
    assert [(u.id, u.text, u.speaker, u.split) for u in rows[:3]] == [
        ("LJ-1", "It cost three dollars", "LJ", None),
        ("LJ-2", "Plain.", "LJ", None),
        ("LJ-3", "Raw.", "LJ", None),
    ]
    assert [p.source for p in problems] == [
        f"{ljspeech}/metadata.csv:6",
        f"{ljspeech}/metadata.csv:7",
    ]
    assert "1 fields" in problems[0].message and "(byte 9" in problems[1].message
    [found] = validate(rows, 0.5, 5)
    assert (found.id, found.source) == (
        "LJ-9",
        f"{ljspeech}/metadata.csv:5",
    ) and "LJ-9.wav" in found.message


def test_ljspeech_splits_by_lists_of_ids(ljspeech):
    (ljspeech / "metadata.csv").write_text("".join(f"LJ-{i}|The same words.\n" for i in range(6)))
    [stamp] = (part.stamp for part in corpus_parts("ljspeech", ljspeech))
    (ljspeech / "val.txt").write_text("LJ-1\n\nLJ-4\n")
    (ljspeech / "test.txt").write_text("/data/wavs/LJ-2.wav|The same words.\n")
    (ljspeech / "notes.txt").write_text("recorded in May\n")
    rows, problems = read_corpus("ljspeech", ljspeech)
    splits = "train dev test train dev train"
    assert [u.split for u in rows] == splits.split() and not problems
    assert [u.id for u in read_corpus("ljspeech", ljspeech, "dev")[0]] == ["LJ-1", "LJ-4"]
    assert corpus_parts("ljspeech", ljspeech)[0].stamp != stamp  # a changed list is noticed

    (ljspeech / "train.txt").write_text("LJ-0\nLJ-3\nLJ-9\n")
    rows, (lacking, unknown) = read_corpus("ljspeech", ljspeech)
    assert len(rows) == 5
    assert (lacking.id, lacking.source) == ("LJ-5", f"{ljspeech}/metadata.csv:6")
    assert (unknown.id, unknown.source) == ("LJ-9", f"{ljspeech}/train.txt:3")
    assert "train.txt, val.txt, test.txt" in lacking.message and "metadata.csv" in unknown.message

    (ljspeech / "train.txt").write_text("LJ-0\nLJ-4\n")
    with pytest.raises(DataError, match=r"val.txt:3: LJ-4 .*train.txt:2"):
        read_corpus("ljspeech", ljspeech)


def test_ljspeech_rows_may_name_files(ljspeech):
    """With their folder, their suffix, in capitals."""
    (ljspeech / "wavs/LJ-3.wav").rename(ljspeech / "wavs/LJ-3.WAV")
    for speaker in ("anna", "ben"):
        (ljspeech / "wavs" / speaker).mkdir()
        sf.write(ljspeech / "wavs" / speaker / "x.wav", tone(1.2), RATE)
    names = (
        "LJ-0",
        "wavs/LJ-1",
        "./wavs/LJ-2.wav",
        "LJ-3",
        "wavs\\LJ-4.WAV",
        "anna/x",
        "ben/x",
        str(ljspeech / "wavs/LJ-5.wav"),
    )
    (ljspeech / "metadata.csv").write_text("".join(f"{name}|The same words.\n" for name in names))
    (ljspeech / "dev.txt").write_text(
        "wavs/LJ-2.wav|The same words.\nDUMMY2/LJ-4.wav|x\n/data/wavs/ben/x\n"
    )
    rows, problems = read_corpus("ljspeech", ljspeech)
    assert not problems and validate(rows, 0.5, 5) == []
    assert [(u.id, u.split) for u in rows] == [
        ("LJ-0", "train"),
        ("LJ-1", "train"),
        ("LJ-2", "dev"),
        ("LJ-3", "train"),
        ("LJ-4", "dev"),
        ("anna/x", "train"),
        ("ben/x", "dev"),
        ("LJ-5", "train"),
    ]


def hugging_face(n: int, **columns) -> datasets.Dataset:
    audio = {"bytes": encoded(kind="FLAC", subtype="PCM_16"), "path": None}
    rows = datasets.Dataset.from_dict(
        {"audio": [audio] * n, "text": ["Good morning."] * n, **columns}
    )
    return rows.cast_column("audio", datasets.Audio(decode=False))


PUBLISHED = [  # files, and the splits of their rows
    (
        [
            "default/train/0000.parquet",
            "default/partial-test/0000.parquet",
            "default/other/0000.parquet",
        ],
        ["other", "test", "train"],
    ),
    (
        ["data/train-00000-of-00001.parquet", "data/validated-00000-of-00001.parquet"],
        ["train", "validated"],
    ),
    (["test/a.parquet", "validation/b.PARQUET"], ["dev", "test"]),
    (["a/x.parquet", "b/y.parquet"], [None, None]),
    (["clean/train.100/0000.parquet", "clean/test/0000.parquet"], ["test", "train"]),
]


@pytest.mark.parametrize("streaming", [False, True])
def test_splits_of_parquet_files_are_those_of_their_names_and_folders(streaming: bool, tmp_path):
    for number, (files, splits) in enumerate(PUBLISHED):
        folder = tmp_path / f"set {number} [v2] *"  # what datasets takes for a pattern
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            hugging_face(1, id=[file]).to_parquet(str(folder / file))
        rows = [
            row
            for part in corpus_parts("datasets", folder, streaming=streaming)
            for row in part.rows()
        ]
        assert sorted((u.split for u in rows), key=str) == sorted(splits, key=str)
    (folder / "other/test").mkdir(parents=True)
    hugging_face(1).to_parquet(str(folder / "other/test/0000.parquet"))
    with pytest.raises(DataError, match=r"\(clean, other\).*/other"):
        corpus_parts("datasets", folder, streaming=streaming)
    for inner in ("other", "other/test", "other/test/0000.parquet"):
        assert [u.split for u in load_corpus("datasets", folder / inner)] == ["test"]


def test_hugging_face_paths_and_bad_rows(tmp_path, caplog):
    path = str(tmp_path / "a.wav")
    sf.write(path, tone(1.2), RATE)
    audio = [
        {"bytes": None, "path": path},
        {"bytes": None, "path": None},
        {"bytes": b"", "path": "/no/such.wav"},
        None,
    ]
    # plain parquet, as written by pandas: nothing says that the column is audio but its name
    pq.write_table(
        pa.table({"audio": audio, "sentence": ["Fine.", "x", "y", None]}), tmp_path / "hf.parquet"
    )
    rows, [problem] = read_corpus("datasets", tmp_path / "hf.parquet")
    assert problem.source.rpartition(":")[2] == "4" and "'sentence'" in problem.message
    assert rows[0].speaker == "unknown"
    assert caplog.text.count("hf.parquet: rows without a speaker") == 1
    found = {p.id: p.message for p in validate(rows, 0.5, 5)}
    assert list(found) == ["hf_0000001", "hf_0000002"]
    assert "'audio'" in found["hf_0000001"] and "/no/such.wav" in found["hf_0000002"]


def test_a_duration_that_the_audio_does_not_have():
    u = Utterance("a", "Hello.", "s", encoded(1.0), duration=3.0, source="train.parquet:1")
    assert "3.00 s" in validate([u], 0.5, 5)[0].message


def test_split_names():
    names = {
        "train": "train Training train.clean.100 train-00000-of-00002 TRAIN_1",
        "dev": "val valid validation dev-other development",
        "test": "test-clean testing evaluation eval_2",
    }
    for split, found in names.items():
        assert {canonical_split(name) for name in found.split()} == {split}
    others = "other validated invalidated valentina value developer testimonials trainer"
    assert [canonical_split(name) for name in others.split()] == others.split()
