"""Corpora of the papers, each in its real layout: LibriTTS, lhotse and LibriHeavy cuts, UniCATS,
seed-tts-eval."""

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from tiny_corpora import RATE, tone, write_libritts

from dcar.corpus import huggingface
from dcar.corpus.read import read_corpus, validate_corpus
from dcar.corpus.rows import AudioSegment
from dcar.errors import AudioError, DataError


@pytest.fixture(scope="module")
def libritts(tmp_path_factory) -> Path:
    subsets = {
        "train-clean-100": 4,
        "train-clean-360": 2,
        "train-other-500": 2,
        "dev-clean": 2,
        "dev-other": 2,
        "test-clean": 4,
        "test-other": 2,
    }
    return write_libritts(tmp_path_factory.mktemp("LibriTTS"), subsets)


def test_libritts_reads_all_seven_subsets_and_those_asked_for(libritts):
    rows, problems = read_corpus("libritts", libritts)
    assert problems == []
    assert Counter(u.split for u in rows) == {"train": 8, "dev": 4, "test": 6}
    speakers = {u.speaker for u in rows if u.split == "train"}
    assert speakers == {"100", "101", "200", "201", "300", "301"}
    assert {u.split for u in read_corpus("libritts", libritts / "dev-clean")[0]} == {"dev"}
    chosen, _ = read_corpus("libritts", libritts, subsets=["train-clean-100", "dev-other"])
    assert Counter(Path(u.audio).parts[-4] for u in chosen) == {
        "train-clean-100": 4,
        "dev-other": 2,
    }


def test_audio_without_text_and_text_without_audio_in_libritts(tmp_path):
    [chapter] = write_libritts(tmp_path, {"dev-clean": 1}).glob("dev-clean/100/*")
    sf.write(chapter / "100_orphan.wav", tone(1.2), RATE)
    (chapter / "100_mute.normalized.txt").write_text("No audio for this.")
    (chapter / "100.trans.tsv").write_text("other files lie here too\n")
    rows, [problem] = read_corpus("libritts", tmp_path)
    assert problem.id == "100_orphan" and "100_orphan.normalized.txt" in problem.message
    [found] = validate_corpus(rows, 0.3, 5)
    assert found.id == "100_mute" and "100_mute.wav" in found.message


# --------------------------------------------------------------------------------------------------


def test_lhotse_cuts_give_the_samples_that_lhotse_gives(tmp_path):
    """A manifest that lhotse itself wrote: two stretches of one recording, and a whole one."""
    lhotse = pytest.importorskip("lhotse")
    sf.write(tmp_path / "long.flac", np.concatenate([tone(1.0, 200), tone(1.5, 400)]), RATE)
    sf.write(tmp_path / "short.wav", tone(0.8, 250), RATE)
    cuts = []
    for i, (file, start, duration, text, speaker) in enumerate(
        (
            ("long.flac", 0.0, 1.0, "Part 0.", "anna"),
            ("long.flac", 1.0, 1.5, "Part 1.", "anna"),
            ("short.wav", 0, 0.8, "Whole.", "ben"),
        )
    ):
        recording = lhotse.Recording.from_file(tmp_path / file, recording_id=file[:4])
        said = lhotse.SupervisionSegment(
            f"s{i}", file[:4], 0, duration, 0, text=text, speaker=speaker
        )
        place = dict(start=start, duration=duration, channel=0, recording=recording)
        cuts.append(lhotse.MonoCut(id=f"c{i}", supervisions=[said], **place))
    file = tmp_path / "my_cuts_train.jsonl.gz"
    lhotse.CutSet.from_cuts(cuts).to_file(file)
    rows, problems = read_corpus("lhotse", file)
    assert problems == [] and [(u.id, u.text, u.speaker, u.split) for u in rows] == [
        ("c0", "Part 0.", "anna", "train"),
        ("c1", "Part 1.", "anna", "train"),
        ("c2", "Whole.", "ben", "train"),
    ]
    assert isinstance(rows[1].audio, AudioSegment) and rows[2].audio == str(tmp_path / "short.wav")
    for row, cut in zip(rows, lhotse.CutSet.from_file(file), strict=True):
        wave, rate = row.load()
        assert rate == RATE
        np.testing.assert_allclose(wave, cut.load_audio()[0], atol=1e-6)
    assert validate_corpus(rows, 0.3, 28) == []


def libriheavy_line(uid: str, start: float, duration: float, source: str, whole: float) -> dict:
    """As the README of k2-fsa/libriheavy shows its full manifests."""
    texts = ['"But why?" she asked.', "BUT WHY SHE ASKED"]
    supervision = {
        "id": uid, "recording_id": "small/100/book/01", "start": 0, "duration": duration, "channel": 0,
        "language": "English", "speaker": "100",
        "custom": {"texts": texts, "pre_texts": ["…", "…"], "begin_byte": 4993, "end_byte": 5120},
    }  # fmt: skip
    recording = {
        "id": "small/100/book/01", "sources": [{"type": "file", "channels": [0], "source": source}],
        "sampling_rate": RATE, "num_samples": round(whole * RATE), "duration": whole, "channel_ids": [0],
    }  # fmt: skip
    return {
        "id": uid, "start": start, "duration": duration, "channel": 0, "supervisions": [supervision],
        "recording": recording, "custom": {"text_path": "download/librilight_text/x.txt"}, "type": "MonoCut",
    }  # fmt: skip


@pytest.mark.parametrize("place", ["beside", "elsewhere"])
def test_libriheavy_full_manifest(tmp_path, place):
    """Audio paths are hard-coded to download/librilight/…: found above the manifest, or below
    audio_root."""
    relative = "download/librilight/small/100/book/01.flac"
    root = tmp_path / "disk" if place == "elsewhere" else None
    audio = root / "small/100/book/01.flac" if root else tmp_path / "work" / relative
    manifest = tmp_path / "work" / "download" / "libriheavy" / "libriheavy_cuts_small.jsonl.gz"
    for file in (audio, manifest):
        file.parent.mkdir(parents=True)
    sf.write(audio, np.concatenate([tone(1.0, 200), tone(1.0, 500)]), RATE)
    with gzip.open(manifest, "wt") as file:
        file.write(
            json.dumps(libriheavy_line("small/100/book/01_0", 1.0, 1.0, relative, 2.0)) + "\n"
        )
    [row], problems = read_corpus("libriheavy", manifest, audio_root=root)
    assert problems == []
    assert row.split == "train"
    assert row.text == '"But why?" she asked.'
    assert row.speaker == "100"
    # the second second, not the first
    np.testing.assert_allclose(row.load()[0], tone(1.0, 500), atol=1e-3)


def test_cuts_that_would_have_to_be_computed_or_make_no_sense_are_bad_rows(tmp_path):
    sf.write(tmp_path / "a.wav", tone(1.0), RATE)
    good = libriheavy_line("ok", 0, 1.0, "a.wav", 1.0)
    recording, supervision = good["recording"], good["supervisions"][0]
    url = [{"type": "url", "channels": [0], "source": "x"}]
    memory = [{"type": "memory", "channels": [0], "source": 10**12}]
    wrong_types: list[dict] = [
        {"recording": "x"},
        {"recording": [1]},
        {"supervisions": ["x"]},
        {"supervisions": 5},
        {"supervisions": {"a": 1}},
        {"start": float("nan")},
        {"start": float("inf")},
        {"duration": -1},
        {"duration": 10**400},
        {"channel": "x"},
        {"recording": {**recording, "sampling_rate": float("inf")}},
        {"recording": {**recording, "sources": memory}},
    ]
    cases = [
        ({**good, "type": "MixedCut"}, "MixedCut"),
        ({**good, "recording": None}, "features only"),
        ({**good, "recording": {**recording, "transforms": [{"name": "Speed"}]}}, "transforms"),
        ({**good, "recording": {**recording, "sources": url}}, "type 'url'"),
        ({**good, "channel": 3}, "channel 3"),
        ({**good, "supervisions": []}, "no supervision"),
        ({**good, "supervisions": [supervision, {**supervision, "speaker": "7"}]}, "2 speakers"),
        ({**good, "supervisions": [{**supervision, "custom": None}]}, "custom.texts"),
        # once read: a text of which a part is not in the audio
        ({**good, "supervisions": [{**supervision, "duration": 1.5}]}, "0…1.5 s"),
        ({**good, "supervisions": [{**supervision, "start": -0.5}]}, "-0.5…0.5 s"),
        ({k: v for k, v in good.items() if k != "duration"}, "duration"),
        *(({**good, **change}, "") for change in wrong_types),
        ([1, 2], "no cut"),
    ]
    manifest = tmp_path / "cuts_dev.jsonl"
    manifest.write_text(
        "\n".join(json.dumps(c) for c, _ in cases) + "\n{broken\n" + json.dumps(good) + "\n"
    )
    rows, problems = read_corpus("lhotse", manifest)
    assert [u.id for u in rows] == ["ok"] and len(problems) == len(cases) + 1
    for number, (problem, (_, message)) in enumerate(zip(problems, cases, strict=False), start=1):
        assert str(problem).startswith(f"{manifest}:{number}: ") and message in str(problem)


def test_a_cut_without_a_speaker_is_noted(tmp_path, caplog):
    cut = libriheavy_line("a", 0, 1.0, "a.wav", 1.0)
    del cut["supervisions"][0]["speaker"]
    (tmp_path / "cuts.jsonl").write_text(json.dumps(cut))
    [[row], _] = read_corpus("lhotse", tmp_path / "cuts.jsonl")
    assert row.speaker == "unknown"
    assert "cuts.jsonl: rows without a speaker" in caplog.text


def test_cuts_that_do_not_fit_their_recording_are_named(tmp_path):
    """A stretch that is not in it, and a sample rate that it does not have."""
    sf.write(tmp_path / "a.wav", tone(1.0), RATE)
    sf.write(tmp_path / "b.wav", tone(1.0, rate=24_000), 24_000)
    cuts = (
        libriheavy_line("far", 0.5, 1.0, "a.wav", 9.0),
        libriheavy_line("fast", 0, 1.0, "b.wav", 1.0),
    )
    (tmp_path / "cuts.jsonl").write_text("\n".join(map(json.dumps, cuts)))
    rows, _ = read_corpus("lhotse", tmp_path / "cuts.jsonl")
    with pytest.raises(AudioError, match=r"0.5…1.5 s .* 1.00 s"):
        rows[0].load()
    far, fast = map(str, validate_corpus(rows, 0.3, 28))
    assert "0.5…1.5 s" in far
    assert "24000 Hz" in fast and "16000 Hz" in fast


# --------------------------------------------------------------------------------------------------


def test_unicats_test_set_b(libritts, tmp_path):
    ids = sorted(p.stem for p in (libritts / "test-clean").rglob("*.wav"))
    file = tmp_path / "testsetB_utt2prompt"
    file.write_text(f"{ids[0]} {ids[1]}\n{ids[2]} {ids[3]}\n9_9_000001_000000 {ids[0]}\none\n")
    rows, problems = read_corpus("unicats", file, audio_root=libritts)
    assert [u.id for u in rows] == [ids[0], ids[2]] and {u.split for u in rows} == {"test"}
    assert Path(str(rows[0].prompt_audio)).stem == ids[1] and rows[0].prompt_text.startswith(
        "Sentence"
    )
    assert rows[0].text != rows[0].prompt_text and rows[0].speaker == ids[0].split("_")[0]
    assert ":3:" in str(problems[0]) and "9_9_000001_000000" in str(problems[0])
    assert "1 fields" in str(problems[1])


def test_seed_tts_eval_list(tmp_path):
    for name in ("prompt-wavs/p1.wav", "wavs/p1-a.wav", "real/b.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        sf.write(tmp_path / name, tone(1.2), RATE)
    (tmp_path / "meta.lst").write_text(
        "p1-a|The prompt.|prompt-wavs/p1.wav|Speak this.\n"
        "p1-b|The prompt.|prompt-wavs/p1.wav|Speak that.|real/b.wav\n"
        "p1-c|The prompt.|prompt-wavs/p1.wav|No recording.\n"
        "p1-d|two fields\n"
    )
    rows, problems = read_corpus("seed-tts-eval", tmp_path / "meta.lst")
    assert [(u.id, u.text, Path(str(u.audio)).name) for u in rows] == [
        ("p1-a", "Speak this.", "p1-a.wav"),
        ("p1-b", "Speak that.", "b.wav"),
    ]
    assert rows[0].prompt_text == "The prompt." and rows[0].load_prompt() is not None
    assert ":3:" in str(problems[0])
    assert "no recording" in str(problems[0])
    assert ":4:" in str(problems[1])
    assert validate_corpus(rows, 0.3, 28) == []


# ------------------------------------------------------------------------------------------------ s


def test_a_streamed_row_without_audio_is_listed_and_a_stream_that_breaks_off_says_so():
    class Stream:
        """Two rows, the second without audio; then the connection is lost."""

        features = None

        def __iter__(self):
            yield {"audio": {"bytes": b"RIFF"}, "text": "One.", "id": "a"}
            yield {"audio": None, "text": "Two.", "id": "b"}
            raise ConnectionError("reset by peer")

    columns = {
        "audio": "audio",
        "text": "text",
        "id": "id",
        "speaker": None,
        "split": None,
        "language": None,
    }
    found = huggingface._streamed(Stream(), columns, "hub/name", "train", 0)
    assert next(found).id == "a"
    assert str(next(found)).startswith("hub/name[train, file 0]:2: column 'audio' ")
    with pytest.raises(DataError, match="hub/name.*reset by peer"):
        next(found)
