"""Folders of recordings with texts beside them, tables with a header, recordings without a text."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from tiny_corpora import tone

from dcar.corpus.read import read_corpus, validate_corpus
from dcar.corpus.rows import Problem, Utterance
from dcar.errors import DataError
from eval.analysis.score import ScoreConfig, items_of

KINDS = (
    ("anna/one.wav", 8_000, 1),
    ("anna/two.flac", 44_100, 2),
    ("bob/one.mp3", 22_050, 1),
    ("bob/two.ogg", 48_000, 2),
    ("three.WAV", 11_025, 1),
)


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, rate, channels in KINDS:
        file = tmp_path / "voices" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        wave = np.repeat(tone(1.2, 200, rate)[:, None], channels, 1)
        sf.write(file, wave, rate)
        file.with_suffix(".txt").write_text(f"\ufeffThis is\n{file.stem}.", encoding="utf-8")
    return tmp_path / "voices"


def test_what_cannot_be_used_is_listed(folder):
    (folder / "lone.txt").write_text("Nobody says this.")
    (folder / "README.txt").write_text("About.")
    (folder / "three.txt").write_bytes(b"caf\xe9")
    (folder / "bob/two.txt").unlink()
    rows, problems = read_corpus("folder", folder)
    said = {Path(p.source).name: p.message for p in problems}
    assert set(said) == {"lone.txt", "three.WAV"}
    assert "(byte 4)" in said["three.WAV"]
    [unwritten] = validate_corpus(rows, 0.3, 20)
    assert unwritten.id == "bob-two" and "recognizer=whisper-base" in unwritten.message


@pytest.mark.parametrize(
    "table",
    [
        'file,transcript,speaker\nanna/one.wav,"One, and ""two"".",A\nthree.WAV,,B\n',
        'speaker;Path;Sentence\nA;anna/one.wav;One, and "two".\nB;three.WAV;\n',
        '\ufeffpath\tsentence\tclient_id\nanna/one.wav\tOne, and "two".\tA\n\nthree.WAV\t\tB\n',
    ],
)
def test_tables_with_a_header(folder, table: str):
    file = folder / "list.csv"
    file.write_text(table, encoding="utf-8")
    for place in (folder, file):
        rows, problems = read_corpus("folder", place)
        assert problems == [] and [(u.id, u.text, u.speaker) for u in rows] == [
            ("one", 'One, and "two".', "A"),
            ("three", "", "B"),
        ]
        assert [Path(str(u.audio)).exists() for u in rows] == [True, True]


@pytest.mark.parametrize("ending", ["csv", "txt"])
def test_columns_are_known_by_their_usual_names_and_others_are_named(folder, caplog, ending):
    """Two speakers once were one, in silence; as .txt the table was a text without a recording."""
    (folder / f"metadata.{ending}").write_text(
        "audio_file|text|speaker_name|emotion_name\n"
        "anna/one.wav|One.|Anna|calm\nbob/one.mp3|Two.|Bob|calm\n"
    )
    rows, problems = read_corpus("folder", folder)
    assert problems == [] and [(u.text, u.speaker) for u in rows] == [
        ("One.", "Anna"),
        ("Two.", "Bob"),
    ]
    assert f"metadata.{ending}: columns that are not used: emotion_name" in caplog.text
    assert "speaker_name" not in caplog.text


def test_accents_of_two_forms_are_the_same_name(tmp_path):
    composed, apart = "caf\u00e9", "cafe\u0301"
    for folder, recording, text in (("a", composed, apart), ("b", apart, composed)):
        (tmp_path / folder).mkdir()
        sf.write(tmp_path / folder / f"{recording}.wav", tone(1.0), 24_000)
        (tmp_path / folder / f"{text}.txt").write_text("One.")
        rows, problems = read_corpus("folder", tmp_path / folder)
        assert problems == [] and [(u.id, u.text) for u in rows] == [(composed, "One.")]
    (tmp_path / "list.csv").write_text(
        f"audio,text,speaker\na/{apart}.wav,One.,{apart}\nb/{composed}.wav,Two.,{composed}\n"
    )
    rows, problems = read_corpus("folder", tmp_path / "list.csv")
    assert problems == [] and {u.speaker for u in rows} == {composed}
    assert all(Path(str(u.audio)).exists() for u in rows)
    line = {"id": "u", "audio": f"a/{apart}.wav", "text": "One.", "speaker": "s", "mood": "calm"}
    (tmp_path / "list.jsonl").write_text(json.dumps(line))
    [row], _ = read_corpus("jsonl", tmp_path / "list.jsonl")
    assert Path(str(row.audio)).exists()


@pytest.mark.parametrize(("separator", "ending"), [("\t", "tsv"), ("|", "csv")])
def test_quotes_are_text_where_tabs_or_bars_separate_fields(folder, separator: str, ending: str):
    """As Common Voice has them, unmatched among them."""
    texts = [
        '"Come here," he said to the painter.',
        '"Her lavender scarf fluttered.',
        "Plain.",
        'The villain said "soup"',
        'The ear has three tiny bones."',
    ]
    rows = [
        ("path", "sentence", "up_votes"),
        *((f"{i}", text, "2") for i, text in enumerate(texts)),
    ]
    file = folder / f"list.{ending}"
    file.write_text("".join(separator.join(row) + "\n" for row in rows))
    found, problems = read_corpus("folder", file)
    assert not problems and [u.text for u in found] == texts
    file.write_text(
        separator.join(('"path"', '"text"'))
        + "\n"
        + separator.join(('"a"', '"An ""old"" one."'))
        + "\n"
    )
    # a program that quotes its header
    assert [u.text for u in read_corpus("folder", file)[0]] == ['An "old" one.']


def test_a_quote_that_is_not_closed_takes_no_other_row_with_it(folder):
    file = folder / "list.csv"
    file.write_text(
        'path,sentence\nanna/one.wav,"Her scarf.\nbob/two.ogg,Plain.\nanna/two.flac,"Two\nlines, '
        'here."\n'
        'three.WAV,"Stop" he said.\nbob/one.mp3,"To the end.\n'
    )
    rows, problems = read_corpus("folder", file)
    assert [p.source.rpartition(":")[2] for p in problems] == ["2", "4", "6", "7"]
    assert all("quote" in p.message for p in problems)
    assert [u.text for u in rows] == ["Plain.", 'here."']  # the end of the row of two lines
    assert [p.id for p in validate_corpus(rows, 0.3, 20)] == ["lines"]


def test_capitals_are_found_and_companions_of_macos_left_out(folder, caplog):
    (folder / "anna/one.wav").rename(folder / "anna/ONE.WAV")
    (folder / "anna/one.txt").rename(folder / "anna/ONE.TXT")
    for name in ("anna/._ONE.WAV", "anna/._ONE.TXT", "bob/._list.csv"):
        (folder / name).write_bytes(b"\0\5\x16\7\xff")
    rows, problems = read_corpus("folder", folder)
    assert not problems
    assert next((u.id, u.text) for u in rows) == ("anna-ONE", "This is one.")
    assert len(rows) == 5
    assert "2 files named ._NAME" in caplog.text
    items = items_of(ScoreConfig(audio=str(folder / "anna")))
    assert [(i.audio.name, i.text) for i in items] == [
        ("ONE.WAV", "This is one."),
        ("two.flac", "This is two."),
    ]


def test_a_speaker_is_no_split_for_a_name_that_begins_like_one(folder, caplog):
    for name in ("Valerie", "Devon", "Testa", "Evalina", "Trainor", "dev_patel", "train-clean-100"):
        (folder / name).mkdir()
        sf.write(folder / name / "a.wav", tone(1.2), 16_000)
    rows, _ = read_corpus("folder", folder)
    assert {u.speaker: u.split for u in rows if u.id.endswith("-a")} == {
        "Valerie": None,
        "Devon": None,
        "Testa": None,
        "Evalina": None,
        "Trainor": None,
        "dev_patel": None,
        "voices": "train",
    }
    assert "train-clean-100" in caplog.text


def test_a_relative_path_names_the_same_speakers(folder, monkeypatch, caplog):
    """Below "." and in list.csv, speakers once had no name."""
    (folder / "list.csv").write_text("audio,text\nthree.WAV,One.\n")
    (folder / "metadata.csv").write_text("three|One.\n")
    monkeypatch.chdir(folder)
    for kind, path in (("folder", "list.csv"), ("ljspeech", ".")):
        assert [u.speaker for u in read_corpus(kind, path)[0]] == ["voices"]
    assert f"{folder}/list.csv: rows without a speaker" in caplog.text


def test_bad_rows_and_tables(folder):
    file = folder / "list.csv"
    file.write_text(
        "id,audio,text,split\na,anna/one.wav,One.,validation\nb,anna/two.flac,Two, three.,train\n"
        "c,,x,train\nd,gone.wav,Four.,train\n"
    )
    rows, problems = read_corpus("folder", folder)
    assert [(u.id, u.split) for u in rows if isinstance(u, Utterance)] == [
        ("a", "dev"),
        ("d", "train"),
    ]
    assert [(p.id, p.source.rpartition(":")[2]) for p in problems if isinstance(p, Problem)] == [
        ("b", "3"),
        ("c", "4"),
    ]
    assert "quotes" in problems[0].message
    assert "gone.wav" in validate_corpus(rows, 0.3, 20)[0].message


def test_linked_folders_are_read_and_loops_are_not(folder, tmp_path):
    """`Path.rglob` before Python 3.13 follows no link, and half of a corpus was left out."""
    outside = tmp_path / "other disk"
    (folder / "bob").rename(outside)
    (folder / "bob").symlink_to(outside)
    (outside / "back").symlink_to(folder)
    (folder / "anna" / "here").symlink_to(".")
    rows, problems = read_corpus("folder", folder)
    assert not problems
    assert {u.id for u in rows} == {"anna-one", "anna-two", "bob-one", "bob-two", "three"}
    assert len(items_of(ScoreConfig(audio=str(folder)))) == 5


STRETCHES = [
    ({"offset": 1.0, "duration": 0.5}, (1.0, 0.5)),  # NeMo, lhotse
    ({"start": 0.25, "end": 1.25}, (0.25, 1.0)),
    ({"begin_time": "0.5", "end_time": "1.5"}, (0.5, 1.0)),
    ({"duration": 2.0}, (0.0, 2.0)),  # that of the file
]


@pytest.mark.parametrize(("columns", "stretch"), STRETCHES, ids=str)
def test_a_stretch_of_a_recording_is_its_audio(tmp_path, columns, stretch):
    """Whole files were read for every row, and the columns named as not used."""
    rate = 16_000
    wave = np.linspace(-0.5, 0.5, 2 * rate, dtype=np.float32)
    sf.write(tmp_path / "long.wav", wave, rate, subtype="FLOAT")
    row = {"id": "a", "audio": "long.wav", "text": "Some words.", "speaker": "s", **columns}
    (tmp_path / "m.jsonl").write_text(json.dumps(row) + "\n")
    names = [name for name in row if name != "speaker"]
    lines = ["|".join(names), "|".join(str(row[name]) for name in names)]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    start, length = (round(seconds * rate) for seconds in stretch)
    for kind, path in (("jsonl", "m.jsonl"), ("folder", "table.csv")):
        [utterance], problems = read_corpus(kind, tmp_path / path)
        assert not problems and utterance.seconds() == stretch[1]
        assert np.array_equal(utterance.load()[0], wave[start : start + length])
    [item] = items_of(ScoreConfig(audio=str(tmp_path / "m.jsonl")))
    assert np.array_equal(item.load()[0], wave[start : start + length])


@pytest.mark.parametrize("columns", [{"offset": 1.0}, {"start": "late", "end": 2}])
def test_a_stretch_without_a_length_is_a_bad_row(tmp_path, columns):
    sf.write(tmp_path / "long.wav", tone(2.0), 16_000)
    row = {"id": "a", "audio": "long.wav", "text": "Some words.", "speaker": "s", **columns}
    (tmp_path / "m.jsonl").write_text(json.dumps(row) + "\n")
    rows, [problem] = read_corpus("jsonl", tmp_path / "m.jsonl")
    assert not rows and problem.source.endswith("m.jsonl:1") and "seconds" in problem.message
    with pytest.raises(DataError, match="m.jsonl:1: .*seconds"):
        items_of(ScoreConfig(audio=str(tmp_path / "m.jsonl")))
