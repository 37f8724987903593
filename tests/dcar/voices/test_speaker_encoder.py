"""Speaker embeddings in batches are those of Resemblyzer one by one."""

import warnings

import numpy as np
import pytest
from tiny_vocoder import harmonic
from tones import noise

from dcar.audio import resample
from dcar.errors import AudioError
from dcar.voices import encoder as module
from dcar.voices.encoder import LOUDNESS_DBFS, SpeakerEncoder


@pytest.fixture(scope="module")
def encoder() -> SpeakerEncoder:
    return SpeakerEncoder()


def recordings() -> list[tuple[np.ndarray, int]]:
    """One window, several, a padded one, another rate, and noise in which no speech is found."""
    voices = [
        (harmonic(100.0 + 40 * i, seconds), 24_000) for i, seconds in enumerate((0.7, 1.7, 5.3))
    ]
    return [*voices, (resample(voices[1][0], 24_000, 16_000), 16_000), (0.01 * noise(1.0), 24_000)]


def test_batches_equal_embed_utterance(encoder, monkeypatch):
    from resemblyzer.audio import normalize_volume, trim_long_silences

    waves, rates = zip(*recordings(), strict=True)
    monkeypatch.setattr(module, "MOST_WINDOWS", 4)
    found = encoder.embed_all(waves, rates)
    assert found.shape == (5, 256) and found.dtype == np.float32
    for wave, rate, embedding in zip(waves, rates, found, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            audio = np.clip(
                normalize_volume(resample(wave, rate, 16_000), LOUDNESS_DBFS, increase_only=True),
                -1,
                1,
            )
            voiced = trim_long_silences(audio)
        voiced = voiced if len(voiced) >= 1600 else audio
        wanted = encoder.network.embed_utterance(voiced.astype(np.float32))
        np.testing.assert_allclose(embedding, wanted, atol=1e-5)
        np.testing.assert_allclose(encoder.embed(wave, rate), embedding, atol=1e-5)


def test_a_silent_recording_is_an_error(encoder):
    with pytest.raises(AudioError, match="silent"):
        encoder.embed_all([harmonic(100.0, 1.0), np.zeros(24_000, np.float32)], [24_000, 24_000])
