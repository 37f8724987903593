"""The contract of every recogniser: a waveform says the same in any company, at any rate, and what
is no sound is refused."""

from pathlib import Path

import numpy as np
import pytest
from test_encoder import tiny
from tiny_nemo import save_ctc, save_transducer
from tiny_pretrained import save_ctc as save_transformers_ctc
from tiny_pretrained import save_whisper
from tones import noise

from dcar.errors import AudioError
from dcar.recognition.base import Recognizer
from dcar.recognition.load import load_recognizer

RATE = 16_000


def load(kind: str, folder: Path) -> Recognizer:
    if kind == "encoder":
        tiny(1).save_pretrained(folder / "ear")
        return load_recognizer(f"encoder:{folder / 'ear'}")
    if kind == "whisper":
        return load_recognizer(f"whisper:{save_whisper(folder / 'whisper')}")
    if kind == "ctc":
        save_transformers_ctc(folder / "ctc", "WavLM")
        return load_recognizer(f"ctc:{folder / 'ctc'}")
    pytest.importorskip("nemo")
    save = save_ctc if kind == "nemo ctc" else save_transducer
    return load_recognizer(f"nemo:{save(folder / 'model.nemo')}")


@pytest.mark.parametrize("kind", ["encoder", "whisper", "ctc", "nemo ctc", "nemo transducer"])
def test_contract(kind, tmp_path):
    recognizer = load(kind, tmp_path)
    assert isinstance(recognizer, Recognizer) and recognizer.name
    waves = [noise(seconds, i) for i, seconds in enumerate((0.7, 1.5, 0.05, 0.3))]
    texts = recognizer.transcribe(waves, RATE)
    assert len(texts) == 4 and all(isinstance(text, str) for text in texts) and any(texts)
    assert texts == [recognizer.transcribe([wave], RATE)[0] for wave in waves]
    assert texts[::-1] == recognizer.transcribe(waves[::-1], RATE)
    assert len(recognizer.transcribe([noise(0.5, 3, 24_000)], 24_000)) == 1
    assert recognizer.transcribe([], RATE) == []
    for broken in (np.zeros(0, np.float32), np.full(400, np.nan, np.float32)):
        with pytest.raises(AudioError):
            recognizer.transcribe([waves[0], broken], RATE)
    if hasattr(recognizer, "log_likelihood"):
        words = ["ab", "b", "a", "ab"]
        together = recognizer.log_likelihood(waves, RATE, words)
        alone = [
            recognizer.log_likelihood([wave], RATE, [text])[0]
            for wave, text in zip(waves, words, strict=True)
        ]
        assert together == pytest.approx(alone, rel=1e-3)
