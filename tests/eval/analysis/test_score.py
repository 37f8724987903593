"""`dcar score`: files, folders and lists of any audio, measured; what is missing is said with
its file."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from tones import chirp

from dcar.audio import save_audio
from dcar.config import load_config
from dcar.errors import ConfigError, DataError
from dcar.process import INTERRUPTED, run_command
from eval.analysis import score as module
from eval.analysis.score import ScoreConfig, items_of, main, run

RATE = 24_000


class Listener:
    """Hears "a red house" in what is long, and nothing else."""

    name = "listener"
    asked: list[int] = []

    def transcribe(self, waves, sample_rate):
        self.asked.append(len(waves))
        return ["a red house" if len(wave) > sample_rate else "a mouse" for wave in waves]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Two voices, one long and one short file, at two rates."""
    Listener.asked = []
    monkeypatch.setattr(module, "load_recognizer", lambda name, device: Listener())
    out = tmp_path / "said"
    save_audio(out / "a.wav", chirp(1.5, 3), RATE)
    save_audio(out / "b.flac", chirp(0.8, 4, 16_000), 16_000)
    for name in "ab":
        (out / f"{name}.txt").write_text("A red\nhouse.\n")
    save_audio(tmp_path / "voice.wav", chirp(1.5, 3), RATE)
    return out


def test_characters_that_a_recogniser_does_not_know_are_named(folder, monkeypatch, caplog):
    monkeypatch.setattr(
        Listener, "unknown", lambda self, text: set(text) & set("hxy"), raising=False
    )
    list(run(ScoreConfig(audio=str(folder), recognizers=["one"], scorers=[])))
    said = (
        "recogniser listener does not know 1 characters of 2 of 2 texts (h): they count as errors"
    )
    assert caplog.messages.count(said) == 1


def test_a_folder_is_measured_line_by_line_and_together(folder, tmp_path, capsys):
    main(
        [
            f"audio={folder}",
            "recognizers=[one,two]",
            "scorers=[resemblyzer,dnsmos]",
            f"prompt={tmp_path / 'voice.wav'}",
            f"out={tmp_path / 'deep' / 'scores.jsonl'}",
        ]
    )
    printed = capsys.readouterr().out
    assert (tmp_path / "deep" / "scores.jsonl").read_text() == printed
    a, b, last = map(json.loads, printed.splitlines())
    assert (Path(a["audio"]).name, Path(b["audio"]).name) == ("a.wav", "b.flac") and a[
        "text"
    ] == "A red house."
    assert (a["seconds"], b["seconds"]) == (1.5, 0.8)
    assert a["wer"] == {"one": 0, "two": 0} and b["wer"]["one"] == pytest.approx(2 / 3)
    # each rate by itself
    assert b["transcripts"] == {"one": "a mouse", "two": "a mouse"} and Listener.asked == [1] * 4
    voice, quality = a["scores"]
    assert a["scores"][voice] == pytest.approx(1, abs=1e-3)  # it is what the prompt is
    assert b["scores"][voice] < a["scores"][voice]
    assert 1 <= a["scores"][quality] <= 5
    together = last["summary"]
    assert together["files"] == 2 and together["seconds"] == pytest.approx(2.3)
    assert together["recognizers"]["one"]["wer"] == pytest.approx(2 / 6)
    assert together["recognizers"]["one"]["ci"] is None  # two files
    assert together["scorers"][voice]["n"] == 2
    assert together["scorers"][voice]["mean"] == pytest.approx(
        (a["scores"][voice] + b["scores"][voice]) / 2
    )


def test_an_interrupted_run_goes_on_where_it_was(folder, tmp_path, monkeypatch, capsys):
    """And measures again what has changed since."""
    for number in range(4):
        save_audio(folder / f"c{number}.wav", chirp(1.2, number), RATE)
        (folder / f"c{number}.txt").write_text("A red house.")
    arguments = [f"audio={folder}", "scorers=[]", "batch_size=2", f"out={tmp_path / 's.jsonl'}"]
    whole = list(run(load_config(ScoreConfig, arguments[:-1])))
    transcribe = Listener.transcribe

    def stops(self, waves, sample_rate):
        if sum(self.asked) >= 4:
            raise KeyboardInterrupt
        return transcribe(self, waves, sample_rate)

    Listener.asked.clear()
    monkeypatch.setattr(Listener, "transcribe", stops)
    assert run_command("score", lambda: main(arguments)) == INTERRUPTED
    assert "finished work is kept" in capsys.readouterr().err
    assert not (tmp_path / "s.jsonl").exists()
    with (tmp_path / "s.jsonl.part").open("a") as part:
        part.write('{"key": "a line that was be')
    save_audio(folder / "c0.wav", chirp(0.5, 9), RATE)
    monkeypatch.setattr(Listener, "transcribe", transcribe)
    Listener.asked.clear()
    main(arguments)
    assert sum(Listener.asked) == 3  # two that are missing, and the one that changed
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [r["audio"] for r in rows[:-1]] == [r["audio"] for r in whole[:-1]]
    assert rows[0] == whole[0] and rows[2]["transcripts"] == {"moonshine": "a mouse"}
    assert not (tmp_path / "s.jsonl.part").exists()


def test_an_interruption_without_a_file_promises_nothing(folder, monkeypatch, capsys):
    def stops(self, waves, sample_rate):
        raise KeyboardInterrupt

    monkeypatch.setattr(Listener, "transcribe", stops)
    assert run_command("score", lambda: main([f"audio={folder}", "scorers=[]"])) == INTERRUPTED
    assert capsys.readouterr().err.endswith("score: interrupted\n")


def test_lists_and_single_files_and_ljspeech_folders(folder, tmp_path):
    listed = tmp_path / "list.jsonl"
    listed.write_text(
        json.dumps({"audio": "said/b.flac", "text": "Hi.", "prompt_audio": "voice.wav"})
        + "\n\n"
        + json.dumps({"audio": "said/a.wav", "text": "Ho."})
        + "\n"
    )
    first, second = items_of(ScoreConfig(audio=str(listed), prompt="other.wav"))
    assert (first.audio, first.text, first.prompt) == (
        folder / "b.flac",
        "Hi.",
        str(tmp_path / "voice.wav"),
    )
    assert (second.audio, second.prompt) == (folder / "a.wav", "other.wav")
    rows = list(run(ScoreConfig(audio=str(folder / "a.wav"), text="A red house.", scorers=[])))
    assert (
        rows[0]["wer"] == {"moonshine": 0}
        and rows[0]["scores"] == {}
        and rows[1]["summary"]["scorers"] == {}
    )
    # needs no text
    (quiet,) = list(run(ScoreConfig(audio=str(folder / "a.wav"), recognizers=[])))[:-1]
    assert "wer" not in quiet and len(quiet["scores"]) == 1
    lj = tmp_path / "lj"
    save_audio(lj / "wavs" / "x.wav", chirp(1.5, 3), RATE)
    (lj / "metadata.csv").write_text("x|No. 1|Number one\n")
    assert [(i.audio.name, i.text) for i in items_of(ScoreConfig(audio=str(lj)))] == [
        ("x.wav", "Number one")
    ]


def test_what_cannot_be_measured_is_refused(folder, tmp_path):
    def refused(error, match, **settings):
        with pytest.raises(error, match=match):
            list(run(ScoreConfig(**{"audio": str(folder), **settings})))

    refused(ConfigError, "^audio ", audio="")
    refused(ConfigError, "recognizers .*scorers", recognizers=[], scorers=[])
    refused(ConfigError, "resemblyzer: .*prompt=", scorers=["resemblyzer"])
    refused(ConfigError, "'dnsmoss'.* dnsmos", scorers=["dnsmoss"])
    refused(ConfigError, "^text ", text="A red house.")
    (tmp_path / "empty").mkdir()
    refused(DataError, "empty: ", audio=str(tmp_path / "empty"))
    for line, why in (
        ('{"text": "Hi."}', "audio .*text"),
        ("caf\xe9", "UTF-8"),
        ('{"audio": "said/a.wav", "text": 5}', "text .*5"),
    ):
        (tmp_path / "bad.jsonl").write_text(line + "\n", encoding="latin-1")
        refused(DataError, f"bad.jsonl:1: .*{why}", audio=str(tmp_path / "bad.jsonl"))
    assert np.isfinite(next(run(ScoreConfig(audio=str(folder / "a.wav"), text="Hi")))["seconds"])


def test_files_that_cannot_be_measured_are_left_out_by_name(folder, tmp_path, capsys):
    """Before models are loaded; the others are measured, and the exit status is not 0."""
    good = (folder / "a.wav").read_bytes()
    faults = {
        "letter": (b"a letter", b"Hi.", "readable"),
        "mute": (good, b"", "text ''"),
        "dots": (good, "…".encode(), "no words"),
        "latin": (good, b"caf\xe9", "UTF-8 .byte 4"),
        "alone": (good, None, "no words"),
        "empty": (b"", b"Hi.", "0 bytes"),
    }
    for name, (sound, text, _) in faults.items():
        (folder / f"{name}.wav").write_bytes(sound)
        if text is not None:
            (folder / f"{name}.txt").write_bytes(text)
    for name, wave in (("silent", np.zeros(RATE)), ("short", chirp(0.05, 3))):
        sf.write(folder / f"{name}.wav", wave, RATE)
        (folder / f"{name}.txt").write_text("Hi.")
    expected = {name: why for name, (_, _, why) in faults.items()}
    expected |= {"silent": "silent", "short": "0.05"}
    assert main([f"audio={folder}", "scorers=[]"]) == 1
    *rows, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [Path(row["audio"]).name for row in rows] == ["a.wav", "b.flac"]
    left_out = {Path(row["audio"]).stem: row["reason"] for row in last["summary"]["left_out"]}
    assert left_out.keys() == expected.keys() and last["summary"]["files"] == 2
    assert all(re.search(expected[name], why) for name, why in left_out.items())

    listed = tmp_path / "list.jsonl"
    lines = [
        {"audio": "said/a.wav", "text": "Hi.", "prompt_audio": "voice.wav"},
        {"audio": "said/b.flac", "text": "Hi."},
        {"audio": "said/b.flac", "text": "Hi.", "prompt_audio": "said/silent.wav"},
        {"audio": "nowhere.wav", "text": "Hi.", "prompt_audio": "voice.wav"},
    ]
    listed.write_text("\n".join(map(json.dumps, lines)))
    row, last = run(ScoreConfig(audio=str(listed), scorers=["resemblyzer"]))
    reasons = [why["reason"] for why in last["summary"]["left_out"]]
    assert row["scores"] and len(reasons) == 3
    for reason, words in zip(reasons, ("prompt=RECORDING", "silent", "not exist"), strict=True):
        assert words in reason
