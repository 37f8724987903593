"""Folders of recordings with texts beside them, tables with a header, recordings without a text."""

from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from tiny_corpora import tone

from dcar.corpus.read import Problem, Utterance, read_corpus, validate_corpus
from dcar.errors import DataError

KINDS = (("anna/one.wav", 8_000, 1), ("anna/two.flac", 44_100, 2), ("bob/one.mp3", 22_050, 1),
         ("bob/two.ogg", 48_000, 2), ("three.WAV", 11_025, 1))


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, rate, channels in KINDS:
        file = tmp_path / "voices" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        wave = np.repeat(tone(1.2, 200, rate)[:, None], channels, 1)
        sf.write(file, wave, rate)
        file.with_suffix(".txt").write_text(f"\ufeffThis is\n{file.stem}.", encoding="utf-8")
    return tmp_path / "voices"


def test_recordings_with_texts_beside_them(folder):
    rows, problems = read_corpus("folder", folder)
    assert problems == [] and [u.id for u in rows] == ["anna-one", "anna-two", "bob-one", "bob-two", "three"]
    assert [u.speaker for u in rows] == ["anna", "anna", "bob", "bob", "voices"] and {u.split for u in rows} == {None}
    assert rows[0].text == "This is one."
    assert validate_corpus(rows, 0.3, 20) == []


def test_what_cannot_be_used_is_listed(folder):
    (folder / "call.m4a").write_bytes(b"....ftypM4A")
    (folder / "lone.txt").write_text("Nobody says this.")
    (folder / "README.txt").write_text("About.")
    (folder / "three.txt").write_bytes(b"caf\xe9")
    (folder / "bob/two.txt").unlink()
    rows, problems = read_corpus("folder", folder)
    said = {Path(p.source).name: p.message for p in problems}
    assert set(said) == {"call.m4a", "lone.txt", "three.WAV"}
    assert "ffmpeg -i" in said["call.m4a"] and "without a recording" in said["lone.txt"]
    assert "not UTF-8 (byte 4)" in said["three.WAV"]
    [unwritten] = validate_corpus(rows, 0.3, 20)
    assert unwritten.id == "bob-two" and "transcribe=whisper-base" in unwritten.message


def test_splits_are_the_folders_of_that_name(folder):
    (folder / "anna").rename(folder / "train")
    (folder / "bob").rename(folder / "validation")
    rows, _ = read_corpus("folder", folder)
    assert {(u.split, u.speaker) for u in rows} == {("train", "voices"), ("dev", "voices"), (None, "voices")}


@pytest.mark.parametrize("table", [
    "file,transcript,speaker\nanna/one.wav,\"One, and \"\"two\"\".\",A\nthree.WAV,,B\n",
    "speaker;Path;Sentence\nA;anna/one.wav;One, and \"two\".\nB;three.WAV;\n",
    "\ufeffpath\tsentence\tclient_id\nanna/one.wav\tOne, and \"two\".\tA\n\nthree.WAV\t\tB\n",
])
def test_tables_with_a_header(folder, table: str):
    file = folder / "list.csv"
    file.write_text(table, encoding="utf-8")
    for place in (folder, file):
        rows, problems = read_corpus("folder", place)
        assert problems == [] and [(u.id, u.text, u.speaker) for u in rows] == [
            ("one", 'One, and "two".', "A"), ("three", "", "B")]
        assert [Path(str(u.audio)).exists() for u in rows] == [True, True]


def test_bad_rows_and_tables(folder):
    file = folder / "list.csv"
    file.write_text("id,audio,text,split\na,anna/one.wav,One.,validation\nb,anna/two.flac,Two, three.,train\n"
                    "c,,x,train\nd,gone.wav,Four.,train\ne,call.m4a,Five.,\n")
    rows, problems = read_corpus("folder", folder)
    assert [(u.id, u.split) for u in rows if isinstance(u, Utterance)] == [("a", "dev"), ("d", "train")]
    assert [(p.id, p.source.rpartition(":")[2]) for p in problems if isinstance(p, Problem)] == [
        ("b", "3"), ("c", "4"), ("e", "6")]
    assert "stand in quotes" in problems[0].message
    assert "no such audio file" in validate_corpus(rows, 0.3, 20)[0].message
    file.write_text("LJ001|Printing, in 1455\n")
    with pytest.raises(DataError, match="no column with recordings"):
        read_corpus("folder", folder)
    (folder / "other.tsv").write_text("")
    with pytest.raises(DataError, match="holds 2 tables"):
        read_corpus("folder", folder)
    with pytest.raises(DataError, match="no recordings in it"):
        read_corpus("folder", Path(__file__).parents[2] / "launch")
