"""Where the speech of a recording is, next to a hum and in long recordings."""

import numpy as np
import pytest
import soundfile as sf
from tones import noise

from dcar.prompts.load import corpus_recordings
from dcar.sources.shipped import ASSETS
from dcar.speak.voice import read_voice
from dcar.tokens.load import load_tokenizer
from dcar.voices.speech import EDGE_SECONDS, find_speech, speech_frames, windows

RATE = 24_000


def recording(name: str) -> np.ndarray:
    return corpus_recordings(str(ASSETS / "starter_prepared"))(name)[0]


def hum(seconds: float, *pitches: float) -> np.ndarray:
    """A hum in a quiet room, at −45 dB of full scale."""
    time = np.arange(round(seconds * RATE)) / RATE
    wave = sum(np.sin(2 * np.pi * pitch * time + pitch) for pitch in pitches)
    wave = wave / np.std(wave) + 0.2 * np.random.default_rng(0).normal(size=len(time))
    return (10 ** (-45 / 20) * wave).astype(np.float32)


@pytest.mark.parametrize("speaker", ["af_sarah_0024", "am_puck_0216"])
@pytest.mark.parametrize("pitches", [(100, 200, 300), (60, 120, 180), (233,)])
def test_a_hum_is_no_speech(speaker, pitches):
    wave = recording(speaker)
    part = find_speech(wave, RATE)
    noisy = hum(6 + len(wave) / RATE, *pitches)
    noisy[6 * RATE :][: len(wave)] += wave
    found = find_speech(noisy, RATE)
    assert found.start == pytest.approx(6 + part.start, abs=EDGE_SECONDS + 0.2)
    assert found.end == pytest.approx(6 + part.end, abs=EDGE_SECONDS + 0.2)
    assert not speech_frames(hum(3, *pitches), RATE).any()


@pytest.mark.parametrize("speaker", ["af_sarah_0024", "am_puck_0216"])
@pytest.mark.parametrize("peak", [-37, -63])
def test_the_level_of_a_prompt_does_not_change_its_voice(speaker, peak, caplog, tmp_path):
    """Of 16 bits, as recorders write them. At −63 dB a man's voice was measured an octave off."""
    wave = recording(speaker)
    quiet = wave / np.abs(wave).max() * 10 ** (peak / 20)
    for name, samples in (("ordinary", wave), ("quiet", quiet)):
        sf.write(tmp_path / f"{name}.wav", samples, RATE)
    tokenizer = load_tokenizer("starter")
    voices = [read_voice(tmp_path / f"{name}.wav", tokenizer) for name in ("ordinary", "quiet")]
    whole, same = (voice.features for voice in voices)
    # what is lost at -63 dB are the 16 bits
    assert float(whole[:256] @ same[:256]) > (0.97 if peak == -37 else 0.7)
    equal = np.mean(np.array(voices[0].tokens) == np.array(voices[1].tokens))
    assert equal > 0.9 or peak == -63
    assert abs(whole[256] - same[256]) < 0.03  # log F0
    notes = [r.getMessage() for r in caplog.records if "is quiet" in r.getMessage()]
    assert len(notes) == 1 and "quiet.wav" in notes[0]


def test_windows_end_in_pauses_and_have_no_long_silence():
    words = [recording(name) for name in ("af_sarah_0024", "am_puck_0216")] * 3
    gaps = [np.zeros(round(s * RATE), np.float32) for s in (0.3, 0.4, 0.3, 9.0, 0.4, 0.3)]
    wave = np.concatenate([part for pair in zip(words, gaps, strict=True) for part in pair])
    found = windows(wave, RATE, 10.0)
    assert len(found) > 2 and all(len(part) <= 10 * RATE for part in found)
    speech = sum(map(len, words)) / RATE
    assert speech - 1 < sum(map(len, found)) / RATE < speech + 2 * len(found) * EDGE_SECONDS
    for part in found:  # each from a pause to a pause
        assert np.abs(part[:120]).max() < 0.02 and np.abs(part[-120:]).max() < 0.02
    assert windows(wave, RATE, 60.0)[0] is wave


def test_windows_keep_a_quiet_speaker_after_a_loud_one():
    loud, quiet = recording("af_sarah_0024"), recording("am_puck_0216") / 50
    wave = np.concatenate([*[loud] * 7, *[quiet] * 7])
    assert sum(map(len, windows(wave, RATE, 10.0))) > 0.9 * len(wave)


def test_windows_of_a_recording_without_voice_are_cut_at_their_length():
    wave = noise(7.0, 0)
    found = windows(wave, 16_000, 3.0)
    assert [len(part) for part in found] == [48_000, 48_000, 16_000]
    np.testing.assert_array_equal(np.concatenate(found), wave)
