"""Recognisers of installed packages on recordings, and speaker embeddings."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tones import noise

from dcar.audio import load_audio
from dcar.corpus.read import load_corpus
from dcar.errors import AudioError
from dcar.prompts.load import corpus_recordings
from dcar.recognition.base import in_windows
from dcar.recognition.load import load_recognizer
from dcar.recognition.pretrained import MoonshineRecognizer
from dcar.sources.shipped import ASSETS
from dcar.text.wer import word_errors
from dcar.voices.encoder import SpeakerEncoder


def spoken_sample() -> tuple[np.ndarray, int]:
    """The short recording of a man reading Beckett that ships inside useful-moonshine-onnx."""
    return load_audio(
        Path(importlib.util.find_spec("moonshine_onnx").origin).parent / "assets" / "beckett.wav"
    )


@pytest.mark.parametrize(
    "name", ["moonshine", pytest.param("whisper-base", marks=pytest.mark.slow)]
)
def test_words_are_heard_at_any_rate(name):
    judge = load_recognizer(name)
    wave, rate = spoken_sample()
    text = judge.transcribe([wave[: 5 * rate]], rate)[0].lower()
    assert "fail" in text or "tried" in text
    assert len(judge.transcribe([noise(1.0, 0)], 16_000)[0]) < 80
    if name == "whisper-base":
        assert judge.transcribe([np.zeros(16_000, np.float32)], 16_000) == [""]
    else:
        assert isinstance(judge, MoonshineRecognizer)
    with pytest.raises(AudioError):
        judge.transcribe([np.full(100, np.nan, np.float32)], 16_000)


def test_moonshine_does_not_hear_a_number_where_speech_begins_at_once():
    """Without silence around it, this shipped recording begins with a "1." that nobody said."""
    wave, rate = corpus_recordings(str(ASSETS / "starter_prepared"))("af_sarah_0024")
    judge = MoonshineRecognizer()
    assert judge.transcribe([wave], rate) == [
        "Empires rise slowly and tend to collapse in a hurry."
    ]
    judge.silence_seconds = 0.0
    assert judge.transcribe([wave], rate)[0].startswith("1.")


def test_a_long_recording_is_transcribed_in_windows():
    """Recordings that once made 100 words of errors in a loop, read as one window."""
    rows = [u for u in load_corpus("starter") if u.speaker == "af_heart"][:12]
    waves = [u.load()[0] for u in rows]
    rate = rows[0].load()[1]
    waves.insert(4, np.zeros(13 * rate, np.float32))
    whole, text = np.concatenate(waves), " ".join(u.text for u in rows)
    assert len(whole) > 50 * rate
    [found] = load_recognizer("moonshine").transcribe([whole], rate)
    assert word_errors(text, found).rate < 0.05


def test_silence_and_descriptions_of_sounds_are_no_words():
    asked = []

    def transcribe(parts):
        asked.extend(len(part) for part in parts)
        return ["[Music] The tide (upbeat music) came in. ♪♪", "[BLANK_AUDIO]"][: len(parts)]

    silence, room = np.zeros(34 * 16_000, np.float32), noise(1.0, 0)
    assert in_windows(transcribe, [silence, room, room], 16_000) == ["", "The tide came in.", ""]
    assert asked == [16_000, 16_000]


def test_speaker_embedding_is_of_unit_norm_and_of_one_voice():
    encoder = SpeakerEncoder()
    wave, rate = spoken_sample()
    half = len(wave) // 2
    one, two = encoder.embed(wave[:half], rate), encoder.embed(wave[half:], rate)
    assert one.shape == (256,) and np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
    buzz = encoder.embed(noise(3.0, 0), 16_000)
    assert one @ two > 0.75 > one @ buzz
    for bad in (
        np.zeros(16_000, np.float32),
        np.zeros(0, np.float32),
        np.full(100, np.inf, np.float32),
    ):
        with pytest.raises(AudioError):
            encoder.embed(bad, 16_000)


def test_an_embedding_does_not_depend_on_the_noise_of_a_room_around_speech():
    encoder = SpeakerEncoder()
    wave, rate = corpus_recordings(str(ASSETS / "starter_prepared"))("af_sarah_0024")
    room, half = noise(12.0, 0, rate) / 10, len(wave) // 2
    for parts in ((room, wave), (wave, room), (wave[:half], room, wave[half:])):
        assert encoder.embed(np.concatenate(parts), rate) @ encoder.embed(wave, rate) > 0.93
