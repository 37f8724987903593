"""Recordings without a text: heard once, marked, kept where they can be corrected."""

import json
from pathlib import Path

import pytest
import soundfile as sf
from tiny_corpora import RATE, tone, toy_prepare, toy_settings

from dcar.errors import ConfigError, DataError
from dcar.prepare import chunks
from dcar.prepare.prepared import load_prepared
from dcar.recognition import load

TRAIN = {"corpus": "folder", "splits": ("train",), "dev_fraction": 0, "test_fraction": 0}


class Listener:
    heard = 0

    def transcribe(self, waves, sample_rate):
        Listener.heard += len(waves)
        return [" This was heard. " for _ in waves]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    for name in ("one", "two", "three"):
        sf.write(tmp_path / f"{name}.wav", tone(1.2), RATE)
    (tmp_path / "one.txt").write_text("This was written.")
    (tmp_path / "two.wav").write_bytes(b"no audio")
    monkeypatch.setattr(load, "load_recognizer", lambda name, device: Listener())
    Listener.heard = 0
    return tmp_path


def test_what_was_heard_is_marked_and_can_be_corrected(folder):
    out = folder / "out" / "prepared"
    settings = toy_settings(folder, out, **TRAIN, recognizer="any", skip_bad=True)
    report = toy_prepare(settings)
    assert [p.id for p in report.problems] == ["two", "two"]  # neither audio nor text
    rows = {row["id"]: row for row in load_prepared(out, "train")}
    assert (rows["one"]["text"], rows["three"]["text"]) == ("This was written.", "This was heard.")
    assert rows["three"]["source"] == f"{folder / 'three.wav'} (transcribed by any)"
    assert Listener.heard == 1
    kept = out.with_name("prepared.transcripts.jsonl")
    stat = (folder / "three.wav").stat()
    assert json.loads(kept.read_text()) == {
        "id": "three",
        "text": "This was heard.",
        "by": "any",
        "audio": f"{stat.st_size}:{stat.st_mtime_ns}",
    }
    kept.write_text(kept.read_text().replace("heard.", "corrected."))
    toy_prepare(settings)
    assert {r["text"] for r in load_prepared(out, "train")} == {
        "This was written.",
        "This was corrected.",
    }
    assert Listener.heard == 1
    kept.write_text('{"id": 1}')
    with pytest.raises(DataError, match="prepared.transcripts.jsonl: "):
        toy_prepare(settings)


def test_a_recording_that_changed_is_transcribed_again(folder, caplog):
    """The old sentence was once the text of the new recording, said to be by the second model."""
    caplog.set_level("INFO")
    (folder / "two.wav").unlink()
    sf.write(folder / "four.wav", tone(1.2), RATE)
    out = folder / "out" / "prepared"
    toy_prepare(toy_settings(folder, out, **TRAIN, recognizer="first"))
    assert Listener.heard == 2
    sf.write(folder / "three.wav", tone(1.5), RATE)
    toy_prepare(toy_settings(folder, out, **TRAIN, recognizer="second"))
    assert Listener.heard == 3
    rows = {row["id"]: row for row in load_prepared(out, "train")}
    assert rows["three"]["source"] == f"{folder / 'three.wav'} (transcribed by second)"
    assert rows["four"]["source"] == f"{folder / 'four.wav'} (transcribed by first)"
    assert "transcripts by first (1), second (1) are used" in caplog.text
    assert "transcribed again (1): three" in caplog.text


def test_where_nothing_can_listen(folder):
    with pytest.raises(ConfigError, match="2 recordings"):
        settings = toy_settings(folder, folder / "p", corpus="folder", recognizer="any")
        toy_prepare(settings, process_index=0, num_processes=2)


def test_an_interrupted_transcription_goes_on_where_it_was(folder, monkeypatch):
    """A last line that was not completed is no fault, and its recording is transcribed again."""
    (folder / "two.wav").unlink()
    for number in range(5):
        sf.write(folder / f"more{number}.wav", tone(1.2), RATE)
    monkeypatch.setattr(chunks, "TRANSCRIBED_TOGETHER", 2)
    transcribe = Listener.transcribe

    def stops(self, waves, sample_rate):
        if Listener.heard == 4:
            raise KeyboardInterrupt
        return transcribe(self, waves, sample_rate)

    out = folder / "out" / "prepared"
    monkeypatch.setattr(Listener, "transcribe", stops)
    with pytest.raises(KeyboardInterrupt):
        toy_prepare(toy_settings(folder, out, **TRAIN, recognizer="any"))
    kept = out.with_name("prepared.transcripts.jsonl")
    lines = kept.read_text().splitlines()
    assert len(lines) == 4
    kept.write_text("\n".join([*lines[:3], lines[3][:20]]))
    monkeypatch.setattr(Listener, "transcribe", transcribe)
    toy_prepare(toy_settings(folder, out, **TRAIN, recognizer="any"))
    assert Listener.heard == 4 + 3 and len(kept.read_text().splitlines()) == 6
    assert len(load_prepared(out, "train")) == 7
