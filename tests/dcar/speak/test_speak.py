"""`dcar speak` end to end with random tiny models, and every input that it must refuse."""

import os
import pickle
import re
import sys
from copy import copy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile as sf
import torch
from safetensors import safe_open
from tiny_codecs import save_codec
from tiny_data import CODES, tiny_tokenizer, tiny_vocoder
from tiny_decoders import policy_of, tiny_decoder
from tones import chirp

import dcar
from dcar import audio
from dcar.cli import main as dcar_command
from dcar.decoding import Engine
from dcar.errors import AudioError, CheckpointError, ConfigError, TextError
from dcar.model.car import CARDecoder
from dcar.prompts.load import corpus_recordings
from dcar.sources.shipped import shipped
from dcar.speak import speaker as speaker_module
from dcar.speak.defaults import NUM_CANDIDATES, fixed_method
from dcar.speak.phrases import (
    BREATH_SECONDS,
    MAX_PHONEMES,
    PARAGRAPH_SECONDS,
    PAUSE_SECONDS,
    note_what_is_not_read,
)
from dcar.speak.phrases import phrases as phrases_of
from dcar.speak.speaker import Speaker, make_method
from dcar.speak.voice import read_voice, shipped_voices
from dcar.text.english.phonemes import normalize_text, phonemes_of, text_to_ids
from dcar.text.languages import language_of
from dcar.text.units import units_for
from dcar.tokens.kmeans import KMeansTokenizer
from dcar.tokens.load import load_tokenizer
from dcar.tokens.whisper import WhisperEncoder
from dcar.vocoder.acoustic import VocoderConfig
from dcar.vocoder.model import TokenVocoder
from dcar.voices.features import speaker_features
from eval.verifiers.drafters import HeadDrafter
from eval.verifiers.sd import SpeculativeDecoding
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig
from heads.policy import CandidatePolicy, CandidatePolicyConfig, ChunkPolicy
from launch.starter import make_voices

RATE = 24_000


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Decoder, FAR decoder, policy, tokenizer and vocoder that belong together, and a voice."""
    folder = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(0)
    tokenizer = KMeansTokenizer(
        WhisperEncoder(), rng.normal(size=(CODES, 512)), np.zeros(512), np.ones(512), name="tiny"
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    identity = f"tiny@{tokenizer.checksum}"
    decoder = tiny_decoder(text_vocab_size=64, tokenizer=identity)
    decoder.save_pretrained(folder / "decoder")
    tiny_decoder(heads=1, seed=1, text_vocab_size=64, tokenizer=identity).save_pretrained(
        folder / "far"
    )
    policy_of(base=decoder.checksum()).save_pretrained(folder / "policy")
    tiny_vocoder().save_pretrained(folder / "vocoder")
    sf.write(folder / "voice.wav", chirp(1.6, 3), RATE)
    return folder


@pytest.fixture(autouse=True)
def arguments_restored(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))  # the command sets it for tools that read it
    monkeypatch.delenv("DCAR_TRACEBACK", raising=False)


def status_of(*arguments: str) -> int:
    """The exit status of `dcar speak`."""
    try:
        dcar_command(["speak", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def speak(models, tmp_path, capsys):
    """Run the command with the tiny models: (status, what it printed, what it complained, the
    output file)."""

    def run(
        text: str = "Good morning.", method: str = "dcar", **options
    ) -> tuple[int, str, str, Path]:
        out = tmp_path / "out.wav"
        settings = {
            "voice": models / "voice.wav",
            "out": out,
            "decoder": models / "decoder",
            "policy": models / "policy",
            "vocoder": models / "vocoder",
            "tokenizer": models / "tokenizer",
            "method": method,
            **options,
        }
        status = status_of(text, *(f"--{k}={v}" for k, v in settings.items() if v is not None))
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return status, shown.out, shown.err, out

    return run


@pytest.fixture
def refused(speak):
    """Checks that the command ends with this message, says nothing and writes nothing."""

    def check(message: str, text: str = "Good morning.", method: str = "dcar", **options) -> None:
        status, shown, complaint, out = speak(text, method, **options)
        last = complaint.splitlines()[-1]
        assert (
            (status, shown) == (1, "")
            and last.startswith("dcar speak: ")
            and re.search(message, last)
        ), last
        assert not out.exists()

    return check


@pytest.fixture
def parts(models) -> dict[str, Path]:
    """What stands beside a decoder."""
    return {name: models / name for name in ("policy", "tokenizer", "vocoder")}


# --- speaking -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dcar", "dcar-sampled", "car-3", "far"])
def test_speaks_with_every_method(speak, models, method):
    status, shown, _, out = speak(
        method=method, decoder=models / ("far" if method == "far" else "decoder")
    )
    assert status == 0
    wave, rate = sf.read(out)
    tokens, passes = map(int, re.search(r"(\d+) tokens in (\d+) passes", shown).groups())
    assert rate == RATE and len(wave) == tokens * 480 and np.abs(wave).max() > 0.001
    sizes = re.search(r"\|(\d+)\|", shown)[1]
    assert sum(map(int, sizes)) == tokens and passes >= len(sizes)
    if method == "far":
        assert set(sizes) == {"1"}
    if method == "car-3":
        assert set(sizes[:-1]) <= {"3"} and passes <= tokens // 3 + 1
    lines = shown.splitlines()
    assert lines[0].lower().startswith("good morning")
    assert lines[-1].startswith(f"{out}: {len(wave) / RATE:.2f} s by {method}, ")
    assert re.search(r" s by \S+, in \d+\.\d+ s \(\d+\.\d+ of real time\)$", lines[-1])


@pytest.mark.parametrize("method", ["dcar", "car-3", "far"])
def test_speaks_in_bfloat16(speak, models, parts, method):
    """The policy knows its decoder, although that is rounded."""
    status, shown, _, out = speak(
        method=method, decoder=models / ("far" if method == "far" else "decoder"), dtype="bfloat16"
    )
    assert status == 0 and sf.info(out).frames > 0 and f" s by {method}, " in shown
    model = Speaker.load(models / "decoder", **parts, dtype="bfloat16")
    pieces = list(model.stream("Good morning.", models / "voice.wav"))
    assert pieces[-1].result.tokens and model.decoder.norm.weight.dtype == torch.bfloat16


def streaming(models, *options: str) -> list[str]:
    given = [f"--{k}={models / k}" for k in ("decoder", "policy", "vocoder", "tokenizer")]
    return [
        "Good morning. Time for tea.",
        "--stream",
        f"--voice={models / 'voice.wav'}",
        *given,
        *options,
    ]


def test_streaming_writes_the_samples_to_a_pipe_and_nothing_to_a_terminal(
    models, tmp_path, monkeypatch, capfdbinary
):
    """Standard output carries the file's samples alone, the timeline goes to standard error."""
    monkeypatch.chdir(tmp_path)
    assert status_of(*streaming(models, "--out=out.wav")) == 0
    shown, (wave, rate) = capfdbinary.readouterr(), sf.read("out.wav")
    samples = np.frombuffer(shown.out, "<i2") / 32767
    assert rate == RATE and len(samples) == len(wave) and np.abs(samples - wave).max() < 1e-4
    assert shown.err.count(b" passes ") == 2
    Path("out.wav").unlink()
    assert status_of(*streaming(models)) == 0
    assert capfdbinary.readouterr().out == shown.out and not list(tmp_path.glob("*.wav"))
    screen, terminal = os.openpty()
    os.set_blocking(screen, False)
    with os.fdopen(terminal, "w") as shown:
        monkeypatch.setattr(sys, "stdout", shown)
        assert status_of(*streaming(models)) == 1
        with pytest.raises(BlockingIOError):  # nothing was written to it
            os.read(screen, 1)
    os.close(screen)
    said = capfdbinary.readouterr().err
    assert b"--stream" in said and b"Traceback" not in said


LONG = (
    "When the tide came in before we had packed the blankets and the lamps; the children, who had "
    "been digging for shells since the early morning, ran shouting to the steps of the old customs "
    "house, while their uncle tried to save the basket with the bread, the cheese and the bottles "
    "- all that was left of the long summer that we had spent together on the coast."
)


def phrases(text):
    return phrases_of(text, units_for(), language_of("en"))


def split_clauses(sentence):
    return [p.text for p in phrases(sentence)]


def test_long_sentences_are_spoken_clause_by_clause(speak, models, tmp_path):
    parts = phrases("It began. " + LONG)
    assert parts[0].pause == PAUSE_SECONDS and len(parts) >= 3 and parts[-1].pause == 0
    assert {p.pause for p in parts[1:-1]} == {BREATH_SECONDS}
    sizes = [len(text_to_ids(p.text)) for p in parts[1:]]
    assert max(sizes) <= MAX_PHONEMES and min(sizes) > 0.25 * max(sizes)
    said, whole = " ".join(p.text for p in parts[1:]), normalize_text(LONG)
    assert said.replace(",", "") == whole.replace(",", "")  # every word, in order
    status, shown, _, out = speak(LONG, "car-3")
    tokens = [int(n) for n in re.findall(r"(\d+) tokens in", shown)]
    assert status == 0 and len(tokens) == len(parts) - 1
    assert len(sf.read(out)[0]) == sum(tokens) * 480 + (len(tokens) - 1) * int(
        BREATH_SECONDS * RATE
    )


def test_clauses_without_commas_end_before_conjunctions():
    words = (
        "the old miller carried seven heavy sacks of flour uphill to the village square every "
        "single morning "
    )
    sentence = (words * 2).strip() + " because " + (words * 2).strip() + "."
    first, second = split_clauses(sentence)
    assert first.endswith("morning") and second.startswith("because the old")
    far = "Well, " + sentence  # a comma that is there, but not where one would breathe
    assert [c.split()[0] for c in split_clauses(far)] == ["Well,", "because"]
    assert split_clauses("Short, and sweet.") == ["Short, and sweet."]


@pytest.mark.parametrize(
    "long",
    [
        "https://docs.example.com/document/d/1BxiMVs0XRA5nFMdKvBdBZjgmUUqptlbs74OgvE2upms/edit?"
        "usp=sharing&ouid=123456789012345678901&rtpof=true&sd=true",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "7" * 80,
        "a very long walk " * 40,
        "word " * 400,
        "A" * 2500,
        "9x" * 1200,
    ],
)
def test_no_part_of_a_text_is_too_long(long):
    said = phrases(f"It began. See {long} there. It ended.")
    assert (said[0].text, said[-1].text) == ("It began.", "It ended.")
    assert len(said) > 3 and all(len(phonemes_of(p.text)) <= MAX_PHONEMES for p in said)
    if len(long) < 1000:
        words = " ".join(p.text for p in said[1:-1]).replace(",", "")
        assert words == normalize_text(f"See {long} there.").replace(",", "")


@pytest.mark.parametrize("cores", [1, 2])
def test_a_speaker_says_and_streams_the_same(models, parts, monkeypatch, cores):
    """Voiced by phrase, as vocoders do that cannot stream; in pieces, on two cores while the
    next one is decoded."""
    for module in ("stream", "speaker"):
        monkeypatch.setattr(f"dcar.speak.{module}.cores", lambda: cores)
    monkeypatch.setattr(speaker_module, "PHRASES_AT_ONCE", 2)
    speaker = Speaker.load(models / "decoder", **parts, seed=3)
    voice = speaker.voice(models / "voice.wav")
    text = "Good morning. " + LONG
    by_phrase = copy(speaker)
    by_phrase.vocoder = SimpleNamespace(sample_rate=RATE, synthesize=speaker.vocoder.synthesize)
    spoken = by_phrase.generate(text, models / "voice.wav")
    pieces = list(speaker.stream(text, voice))
    streamed = speaker.join(text, pieces)
    assert len(pieces) >= len(streamed.results) == len(spoken.results) == len(phrases(text))
    assert [r.tokens for r in streamed.results] == [r.tokens for r in spoken.results]
    assert (
        streamed.audio.shape == spoken.audio.shape
        and np.abs(streamed.audio - spoken.audio).max() < 1e-4
    )
    assert spoken.sample_rate == RATE and spoken.seconds == len(spoken.audio) / RATE
    assert [sum(c) for c in spoken.chunks] == [len(r.tokens) for r in spoken.results]
    assert not np.array_equal(
        by_phrase.generate(text, voice, seed=4).audio[:2000], spoken.audio[:2000]
    )
    assert np.array_equal(by_phrase.generate(text, voice).audio, spoken.audio)
    again = [speaker.generate(text, voice) for _ in range(2)]  # by the engine of the first
    monkeypatch.setattr(speaker_module, "SMALL", 0)  # as large decoders are
    for said in [*again, speaker.generate(text, voice)]:
        assert [r.tokens for r in said.results] == [r.tokens for r in spoken.results]
        assert (
            said.audio.shape == spoken.audio.shape
            and np.abs(said.audio - spoken.audio).max() < 1e-4
        )
    with pytest.raises(TextError):
        speaker.stream("?!")  # at once, not at the first piece


def test_a_stream_that_is_left_keeps_the_engine_and_one_that_fails_does_not(
    models, parts, monkeypatch
):
    monkeypatch.setattr(speaker_module, "PHRASES_AT_ONCE", 2)
    speaker = Speaker.load(models / "decoder", **parts, seed=3)
    said = speaker.generate(LONG, models / "voice.wav")
    (engine,) = speaker._engines.values()
    stream = speaker.stream(LONG, models / "voice.wav")
    next(stream)
    stream.close()
    assert list(speaker._engines.values()) == [engine]
    again = speaker.generate(LONG, models / "voice.wav")
    assert again.tokens == said.tokens
    monkeypatch.setattr(Engine, "_advance", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        speaker.generate(LONG, models / "voice.wav")
    assert not speaker._engines


def test_a_used_speaker_can_be_sent_to_another_process(models, parts):
    speaker = Speaker.load(models / "decoder", **parts, seed=3)
    said = speaker.generate("Good morning.", models / "voice.wav")
    sent = pickle.loads(pickle.dumps(speaker))  # its own bytes, as multiprocessing sends them
    assert not sent._engines and speaker._engines
    assert sent.generate("Good morning.", models / "voice.wav").tokens == said.tokens


def test_seeds_and_devices_that_do_not_exist_are_refused(models, parts):
    with pytest.raises(ConfigError, match="seed=-1 must be between 0 and 4294967295"):
        Speaker.load(models / "decoder", **parts, seed=-1)
    speaker = Speaker.load(models / "decoder", **parts, device="cpu")
    with pytest.raises(ConfigError, match="seed=-1"):
        speaker.generate("Good morning.", models / "voice.wav", seed=-1)
    with pytest.raises(ConfigError, match="cuda"):
        Speaker.load(models / "decoder", **parts, device="cuda:97")


def test_a_vocoder_that_hears_prompts_gets_the_recording(models, parts):
    """One that takes the voice from a recording finds that of every voice it is asked for, and
    is not streamed."""
    speaker = Speaker.load(models / "decoder", **parts)
    heard = []

    class Hearing:
        sample_rate = RATE

        def synthesize(self, token_lists, speakers):
            heard.extend(speaker._recordings(row)[1] for row in speakers)
            return [np.zeros(480 * len(tokens), np.float32) for tokens in token_lists]

    speaker.vocoder = Hearing()
    assert speaker.generate(
        "Good morning. Good night.", models / "voice.wav"
    ).seconds > 0 and heard == [RATE, RATE]
    with pytest.raises(ConfigError, match="--stream"):
        speaker.stream("Good morning.", models / "voice.wav")


def test_sentences_are_spoken_one_by_one_with_a_pause(speak, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, shown, _, _ = speak("It is 5 o'clock. Time for tea!", "car-2", out=None)
    lines = shown.splitlines()
    assert status == 0 and (lines[0], lines[3]) == ("It is five o'clock.", "Time for tea!")
    first, second = (int(n) for n in re.findall(r"(\d+) tokens in \d+ passes", shown))
    wave, pause = sf.read("out.wav")[0], int(PAUSE_SECONDS * RATE)  # the default
    assert len(wave) == (first + second) * 480 + pause
    assert not wave[first * 480 : first * 480 + pause].any()


# --- prompts --------------------------------------------------------------------------------------


def write_wave(path: Path, kind: str) -> Path:
    wave = chirp(1.6, 3)
    broken = np.where(np.arange(len(wave)) == 100, np.nan, wave)
    noise = 0.1 * np.random.default_rng(0).standard_normal(len(wave))
    waves = {"short": wave[: int(0.4 * RATE)], "nan": broken, "silent": 0 * wave, "unvoiced": noise}
    if kind in waves:
        sf.write(path, waves[kind], RATE, subtype="FLOAT")
    elif kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_text({"no bytes": "", "no audio": "this is a letter"}[kind])
    return path


def test_a_voice_is_the_middle_of_the_prompt(models, tmp_path):
    tokenizer = load_tokenizer(models / "tokenizer")
    voice = read_voice(models / "voice.wav", tokenizer, prompt_tokens=30)
    wave, _ = audio.load_audio(models / "voice.wav", 16_000)
    assert list(voice.tokens) == tokenizer.encode([wave], 16_000)[0][25:55].tolist()
    assert voice.features.shape == (298,) and np.isfinite(voice.features).all()
    # what encoders do not hear belongs to the voice
    whole, rate = audio.load_audio(models / "voice.wav")
    assert np.allclose(
        voice.features, speaker_features(whole, rate, voice.features[:256]), atol=1e-5
    )
    assert len(read_voice(models / "voice.wav", tokenizer, prompt_tokens=500).tokens) == 80
    with pytest.raises(AudioError, match="none.wav"):
        read_voice(tmp_path / "none.wav", tokenizer)


@pytest.mark.parametrize(
    ("before", "pause", "after", "level"),
    [
        (4, 0, 0, 0),
        (0, 0, 4, 0),
        (4, 0, 4, 0.01),
        (25, 0, 0, 0.001),
        (0, 6, 0, 0),
        (3, 12, 3, 0.001),
    ],
)
def test_a_voice_is_taken_from_speech(models, tmp_path, caplog, before, pause, after, level):
    """Not from the silence, digital or of a room, before, within or after it; a note says which
    seconds were taken."""

    def silence(seconds: float) -> np.ndarray:
        return level * np.random.default_rng(0).standard_normal(seconds * RATE)

    tokenizer = load_tokenizer(models / "tokenizer")
    first, second = chirp(1.5, 3), chirp(1.5, 3)
    save = tmp_path / "voice.wav"
    sf.write(
        save, np.concatenate([silence(before), first, silence(pause), second, silence(after)]), RATE
    )
    voice = read_voice(save, tokenizer)
    seconds = 3.0 + pause
    start, end, prompt_start, prompt_end = map(
        float, re.search(r"([\d.]+) to ([\d.]+) s .* ([\d.]+) to ([\d.]+) s ", caplog.text).groups()
    )
    assert before - 0.9 <= start <= before and before + seconds <= end <= before + seconds + 0.9
    assert len(voice.recording()[0]) / RATE == pytest.approx(end - start, abs=0.11)
    assert prompt_end - prompt_start == pytest.approx(1, abs=0.11) and len(voice.tokens) == 50
    places = [(0, 1.5), (1.5 + pause, 3 + pause)] if pause else [(0, 3)]
    assert any(
        at - 0.3 <= prompt_start - before and prompt_end - before <= to + 0.3 for at, to in places
    )
    sf.write(tmp_path / "plain.wav", np.concatenate([first, second]), RATE)
    plain = read_voice(tmp_path / "plain.wav", tokenizer)
    assert plain.features[:256] @ voice.features[:256] > 0.95
    np.testing.assert_allclose(voice.features[256:], plain.features[256:], atol=0.2)


def test_a_codec_encodes_a_voice_at_its_own_rate(tmp_path):
    sf.write(tmp_path / "voice.wav", chirp(1.5, 3), 24_000)
    codec = load_tokenizer(f"codec:{save_codec('encodec', tmp_path / 'codec')}")
    voice = read_voice(tmp_path / "voice.wav", codec, prompt_tokens=1000)
    recorded, rate = voice.recording()
    assert voice.tokens == tuple(codec.encode([recorded], rate)[0].tolist()) and rate == 24_000


# --- texts ----------------------------------------------------------------------------------------


def split_sentences(text: str) -> list[str]:
    return [phrase.text for phrase in phrases(text)]


def test_sentences_end_at_their_marks():
    assert split_sentences("Hello there. How are you? Fine!") == [
        "Hello there.",
        "How are you?",
        "Fine!",
    ]
    assert split_sentences("It costs $3.50 today.") == [
        "It costs three dollars and fifty cents today."
    ]
    assert split_sentences("Chapter One\n\nIt was a dark\nnight.") == [
        "Chapter One",
        "It was a dark night.",
    ]
    assert split_sentences("First.\r\n\r\n* * *\n \nSecond") == ["First.", "Second"]
    for one in ("Use Node.js now.", "Acme Co., in town", "9 a.m. ET, please", "README.md"):
        assert len(split_sentences(one)) == 1


def test_a_long_text_is_cut_where_its_sentences_end():
    written = [
        f"This is sentence number {n}, in which Dr. Smith came at 5 p.m. again."
        for n in range(1, 19)
    ]
    assert len(" ".join(written)) > 1105
    said = split_sentences(" ".join(written))
    assert len(said) == 18 and said == split_sentences(" ".join(written[:9])) + split_sentences(
        " ".join(written[9:])
    )
    assert len(split_sentences("word. " * 400)) == 400


def test_headings_and_items_stand_for_themselves():
    assert split_sentences("Chapter 1\nIt was a dark night, and\nPeter was alone.") == [
        "Chapter one",
        "It was a dark night, and Peter was alone.",
    ]
    assert split_sentences(
        "# To buy\nSoon.\n- bread\n- milk\n\n1. Open it\n   slowly\n2) Close it"
    ) == ["To buy", "Soon.", "bread", "milk", "one, Open it slowly", "two, Close it"]
    assert split_sentences("It was 5\n- no, 6 - o'clock.") == ["It was five, no, six, o'clock."]
    assert [p.pause for p in phrases("One\n\nTwo. Three.")] == [PARAGRAPH_SECONDS, PAUSE_SECONDS, 0]


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        ("Ich habe heute keine Zeit, aber morgen gehen wir in die Stadt.", True),
        ("Je ne sais pas pourquoi.", True),
        ("El perro es muy grande.", True),
        ("Wij zijn naar huis gegaan.", True),
        ("The tide came in.", False),
        ("The Sri Lankan cricketer Muttiah Muralitharan bowled.", False),
        ("Hello.", False),
        ("Dr. Schmidt and Mrs. van der Berg met in the old den.", False),
        ("No man was in, so he left.", False),
        ("1st 2nd 3rd 4th", False),
        ("x² + y³ = z", False),
    ],
)
def test_another_language_and_signs_that_are_not_read_are_noted(text, noted, caplog):
    note_what_is_not_read(text, language_of("en"))
    assert ("English" in caplog.text) == noted
    assert "left out" not in caplog.text
    note_what_is_not_read(f"{text} 😀 costs ½ € → 🎉, 20 °C × 2™, 3‰", language_of("en"))
    assert "left out: 😀 → 🎉 ‰\n" in caplog.text


def test_text_comes_from_a_file_or_from_standard_input(speak, refused, tmp_path, monkeypatch):
    file = tmp_path / "page.txt"
    file.write_bytes("\ufeffOne.\n\nTwo.".encode())
    spoken = [speak("", "car-2", file=file)]
    monkeypatch.setattr(sys, "stdin", file.open(encoding="utf-8"))
    spoken.append(speak("-", "car-2"))
    assert all(
        status == 0 and shown.startswith("One.\n") and "\nTwo.\n" in shown
        for status, shown, _, _ in spoken
    )
    (tmp_path / "out.wav").unlink()
    file.write_bytes(b"caf\xe9")
    refused("page.txt: not UTF-8", "", file=file)
    refused("none.txt: ", "", file=tmp_path / "none.txt")
    refused("--file", "")
    refused("--file", "Twice.", file=file)


def test_a_long_text_is_written_as_it_is_spoken(speak, models, parts, tmp_path):
    """Of many phrases the sums are printed."""
    text = " ".join(f"Number {n}." for n in range(1, 26))
    status, shown, complaint, _ = speak(text, "car-3", out=(out := tmp_path / "new" / "a.flac"))
    assert f"made the folder {out.parent}" in complaint
    assert (
        status == 0
        and shown.splitlines()[0].startswith("25 phrases, ")
        and len(shown.splitlines()) == 2
    )
    spoken = dcar.load(models / "decoder", **parts, method="car-3").generate(
        text, models / "voice.wav"
    )
    wave = sf.read(out)[0]
    assert f"25 phrases, {sum(map(len, spoken.tokens))} tokens" in shown
    assert wave.shape == spoken.audio.shape and np.abs(wave - spoken.audio).max() < 1e-3


# --- voices ---------------------------------------------------------------------------------------


def test_a_policy_for_another_temperature_causes_one_note(caplog):
    model = dcar.load()
    assert not caplog.records
    for _ in range(2):
        model.using(policy="starter-t1.0", temperature=0.3)
    model.using(temperature=1.1)
    model.using(policy="starter-t1.0", temperature=1.0)
    model.using(method="car-5", temperature=1.2)
    hot, own = (record.getMessage() for record in caplog.records)
    assert "starter-t1.0 was trained at temperature 1, but tokens are drawn at 0.3" in hot
    assert "starter-t0.4 was trained at temperature 0.4, but tokens are drawn at 1.1" in own


def test_shipped_voices_by_name(capsys):
    dcar_command(["speak", "--voices"])
    names = re.findall(r"^  ([ab][fm]_\w+) ", capsys.readouterr().out, re.M)
    voices, unseen, _ = shipped_voices()
    assert names == list(voices) and len(names) == 28 and set(names[:4]) == unseen
    model = dcar.load()
    first = model.voice(None)
    assert model.voice("af_sarah").tokens == first.tokens != model.voice("bm_lewis").tokens
    with pytest.raises(ConfigError, match=r"af_sara.*af_sarah"):
        model.voice("af_sara")
    with pytest.raises(ConfigError, match="voice nobody: .*`dcar speak --voices`"):
        model.voice("nobody")


def test_shipped_voices_are_those_of_the_shipped_corpus(tmp_path):
    make_voices.main([f"out={tmp_path / 'voices.safetensors'}"])
    with (
        safe_open(tmp_path / "voices.safetensors", "numpy") as made,
        safe_open(shipped("voices"), "numpy") as ships,
    ):
        assert made.metadata() == ships.metadata()
        for name in ("tokens", "features"):
            assert np.array_equal(made.get_tensor(name), ships.get_tensor(name))


def test_a_recording_that_begins_with_silence_speaks(tmp_path):
    """Without babble until the length guard, as a prompt of silence does."""
    wave, rate = corpus_recordings(str(shipped("prepared")))("af_sarah_0024")
    sf.write(
        tmp_path / "late.wav",
        np.concatenate([np.zeros(4 * rate, np.float32), wave[: int(2.2 * rate)]]),
        rate,
    )
    spoken = dcar.load().generate(
        "The old miller carried seven sacks of flour to the village.", tmp_path / "late.wav"
    )
    assert 2 < spoken.seconds < 5 and not spoken.results[0].truncated


# --- models that do not fit -----------------------------------------------------------------------


def test_a_policy_decides_where_one_fits_the_decoder_or_is_asked_for(models):
    """The shipped policy belongs to the shipped decoder, whatever folder that is loaded from."""
    own = {"tokenizer": models / "tokenizer", "vocoder": models / "vocoder"}
    assert dcar.load(shipped("decoder")).method.name == "dcar@n4"
    assert dcar.load(models / "decoder", **own).method.name == "car-4"  # all of its heads
    for asked in ({"policy": models / "policy"}, {"dial": -0.5, "policy": models / "policy"}):
        assert dcar.load(models / "decoder", **own, **asked).method.kind == "dcar"
    with pytest.raises(CheckpointError, match="policy .*dcar train-policy"):
        dcar.load(models / "decoder", **own, num_candidates=4)
    assert (fixed_method(16), fixed_method(7)) == ("car-8", "car-7")


def test_a_policy_that_can_choose_among_draws_gets_several(models, parts, tmp_path):
    decoder = CARDecoder.from_pretrained(models / "decoder")
    torch.manual_seed(0)
    chunk_scorer = ChunkScorer(ChunkScorerConfig(32, 4, decoder.config.output_size, 4, 8))
    able = CandidatePolicy(
        CandidatePolicyConfig(
            32, 4, base_checksum=decoder.checksum(), chunk_scorer=chunk_scorer.config
        )
    )
    able.save_pretrained(tmp_path / "able")
    able = str(tmp_path / "able")
    drawn = {
        n: make_method("dcar", able, decoder, num_candidates=n).num_candidates for n in (0, 1, 9)
    }
    assert drawn == {0: NUM_CANDIDATES, 1: 1, 9: 9} and NUM_CANDIDATES > 1
    assert make_method("dcar", str(models / "policy"), decoder).num_candidates == 1
    with pytest.raises(ConfigError, match="chunk_scorer"):
        make_method("dcar", str(models / "policy"), decoder, num_candidates=4)
    said = [
        Speaker.load(models / "decoder", **{**parts, "policy": able}, num_candidates=n).generate(
            "Good morning.", models / "voice.wav"
        )
        for n in (0, NUM_CANDIDATES, 1)
    ]
    assert [r.tokens for r in said[0].results] == [r.tokens for r in said[1].results]
    assert all(r.tokens for spoken in said for r in spoken.results)


# --- a model for others to build on ---------------------------------------------------------------


def test_generate_speaks_as_the_command_and_as_any_setting_says(models, parts, tmp_path, speak):
    model = dcar.load(models / "decoder", **parts, method="car-2")
    text = "Good morning."
    voice = models / "voice.wav"
    spoken = model.generate(text, voice, method="dcar", seed=3)
    _, _, _, out = speak(text, "dcar", seed=3)
    spoken.save(tmp_path / "same.wav")
    assert out.read_bytes() == (tmp_path / "same.wav").read_bytes()
    assert (
        spoken.audio.dtype == np.float32
        and spoken.sample_rate == RATE
        and "passes" in spoken.timeline()
    )
    assert spoken.tokens == [r.tokens for r in spoken.results]
    loaded = ChunkPolicy.from_pretrained(models / "policy")
    for settings in ({"policy": loaded}, {"policy": models / "policy", "method": "dcar"}):
        assert model.generate(text, voice, seed=3, **settings).tokens == spoken.tokens
    with pytest.raises(ConfigError, match="dial=-50 .*-2 and 2"):
        model.generate(text, voice, dial=-50.0)
    cold = model.generate(text, voice, temperature=0, seed=1).tokens
    assert (
        cold
        == model.generate(text, voice, top_k=1, seed=2).tokens
        != model.generate(text, voice, seed=1).tokens
    )
    assert model.method.name == "car-2" and model.seed == 0  # what is given to one call stays there
    with pytest.raises(ConfigError, match="chunk_scorer"):
        model.generate(text, voice, num_candidates=4)


class Three(dcar.ChunkRule):
    """A rule of a user's own."""

    def choose(self, state, features):
        return dcar.Choice(torch.full_like(state.generated, 3))


@pytest.mark.parametrize(
    "method", [Three(), SpeculativeDecoding(drafter=HeadDrafter(3))], ids=["rule", "verifier"]
)
def test_other_methods_speak_and_stream_the_same(models, parts, method):
    model = dcar.load(models / "decoder", **parts)
    text, voice = "Good morning. " + LONG, model.voice(models / "voice.wav")
    own = model.generate(text, voice, method=method)
    if isinstance(method, Three):
        assert own.tokens == model.generate(text, voice, method="car-3").tokens
    else:
        assert sum(sum(r.accepted) for r in own.results) and {r.method for r in own.results} == {
            "sd"
        }
    pieces = list(model.stream(text, voice, method=method))
    assert model.join(text, pieces).tokens == own.tokens


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"text": "   \n"}, "empty"),
        ({"text": "\U0001f600 \U0001f680"}, "letter digit"),
        ({"text": "?!"}, "letter digit"),
        ({"text": "你好"}, "你 好"),
        ({"text": "H\0e\0r\0"}, "NUL UTF-16"),
        ({"text": "word. " * 20_000}, "120000 characters"),
        *(
            ({"voice": kind}, words)
            for kind, words in {
                "missing": "bad.wav:",
                "no bytes": "0 bytes",
                "no audio": "readable",
                "short": "0.40 s",
                "nan": "1 of 38400",
                "folder": "bad.wav: folder",
                "silent": "silent",
                "unvoiced": "0 ms voiced",
            }.items()
        ),
        ({"method": "sing"}, "'sing' far, car-3"),
        ({"method": "car-"}, "'car-'"),
        ({"method": "car-9"}, "1..4"),
        ({"method": "car-0"}, "'car-0': size"),
        ({"voice": None}, "voice"),
        ({"out": "out.xyz"}, "'.xyz'"),
        *(({part: "nowhere"}, "nowhere") for part in ("decoder", "policy", "vocoder", "tokenizer")),
        ({"policy": "other policy"}, "000000000000"),
        ({"tokenizer": "other tokenizer"}, "tiny@"),
        ({"vocoder": "other vocoder"}, "vocoder another"),
        ({"vocoder": "other size"}, "vocoder 8 12"),
        ({"method": "car-3", "dial": 0.5}, "dial=0.5 'car-3'"),
        ({"method": "car-3", "num_candidates": 4}, "num_candidates=4 'car-3'"),
    ],
)
def test_refusals(options, words, refused, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stranger = ChunkPolicy.from_pretrained(models / "policy")
    stranger.config.base_checksum = "0" * 64
    stranger.save_pretrained(tmp_path / "other policy")
    tiny_tokenizer(tmp_path / "other tokenizer")
    config = vars(tiny_vocoder().config)
    for name, change in (
        ("size", {"vocab_size": 8}),
        ("vocoder", {"tokenizer_checksum": "another"}),
    ):
        TokenVocoder(VocoderConfig(**config | change)).save_pretrained(tmp_path / f"other {name}")
    if isinstance(options.get("voice"), str):
        options = {"voice": write_wave(tmp_path / "bad.wav", options["voice"])}
    refused(".*".join(map(re.escape, words.split(" "))), **options)
    if "text" in options:
        with pytest.raises(TextError):
            phrases(options["text"])
