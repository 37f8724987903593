"""What the page does, without the page: every method speaks, limits hold whoever asks, chunks lie where they sound."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from dcar.audio import save_audio
from dcar.errors import AudioError, ConfigError, TextError
from eval.demo.studio import POLICIES, VERIFIERS, DemoConfig, Studio, chunk_spans, phoneme_spans, with_dial

TEXT = "The tide came in. We left."


def tone(path, seconds: float):
    """A recording with something of a voice: a gliding buzz."""
    t = np.arange(int(24_000 * seconds)) / 24_000
    save_audio(path, (0.3 * np.sign(np.sin(2 * np.pi * (120 + 10 * np.sin(t)) * t))).astype(np.float32), 24_000)
    return path


def test_every_method_that_is_offered_speaks(studio):
    heads = studio.models.decoder.config.num_prediction_heads
    assert studio.methods[:4] == list(POLICIES) and studio.start == "dcar@n4" and f"car-{heads}" in studio.methods
    assert {"far", "sd", "typical"} <= set(studio.methods)
    assert len(set(studio.methods) & set(VERIFIERS)) >= 4
    for method in studio.methods:
        take = studio.speak("Yes.", method=method)
        assert take.facts.startswith(f"{method}: ") and "s end to end (RTF" in take.facts
        assert np.abs(take.spoken.wave).max() > 0.01


def test_a_policy_is_turned_and_nothing_else(studio):
    """Above 0 more tokens a pass, below 0 fewer; what has no dial keeps its name."""
    assert with_dial("dcar@n4", 0.5) == "dcar@n4@d0.5" and with_dial("car-5", 0.5) == "car-5"
    assert with_dial("dcar", 0.0) == "dcar"
    passes = [sum(r.target_passes for r in studio.speak(TEXT, method=with_dial("dcar@n4", dial)).spoken.results)
              for dial in (-2.0, 0.0, 2.0)]
    assert passes[0] > passes[1] >= passes[2] and studio.speak("Yes.", method="dcar@d-1").facts.startswith("dcar@d-1: ")


def test_voices_are_different_people(studio, tmp_path):
    assert len(studio.voices) == 4
    names = list(studio.voices)
    first, second = (studio.speak("Yes.", voice=name).spoken.wave for name in names[:2])
    assert not np.array_equal(first, second)
    own = studio.speak("Yes.", voice=names[0], recording=tone(tmp_path / "voice.wav", 1.5)).spoken.wave
    assert not np.array_equal(own, first)


@pytest.mark.parametrize(("request_", "error", "said"), [
    ({"text": "word " * 13}, TextError, "65 characters, this page speaks 60"),
    ({"text": " "}, TextError, "text is empty"),
    ({"method": "car-99"}, ConfigError, "unknown method 'car-99'; choose dcar"),
    ({"method": "random-1-7"}, ConfigError, "unknown method"),
    ({"method": "dcar@n99"}, ConfigError, "unknown method"),
    ({"method": "dcar@other@d0.5"}, ConfigError, "unknown method"),
    ({"method": "dcar@d9"}, ConfigError, "dial 9 must be between -2 and 2"),
    ({"method": "dcar@d-1000"}, ConfigError, "dial -1000 must be between -2 and 2"),  # as the registry reads it
    ({"method": "dcar@dNone"}, ConfigError, "unknown method"),
    ({"method": "car-5@d1"}, ConfigError, "unknown method"),
    ({"method": "dcar@d0." + 40 * "1"}, ConfigError, "unknown method"),
    ({"voice": "nobody"}, ConfigError, "unknown voice 'nobody'; choose"),
    ({"temperature": 9.0}, ConfigError, "between 0 and 1.5"),
    ({"temperature": float("nan")}, ConfigError, "between 0 and 1.5"),
])
def test_what_is_beyond_the_limits_is_refused(studio, request_, error, said):
    with pytest.raises(error, match=said):
        studio.speak(**{"text": "Yes.", **request_})


def test_recordings_beyond_the_limits_are_refused(studio, tmp_path):
    with pytest.raises(AudioError, match="lasts 4 s, this page takes 3"):
        studio.speak("Yes.", recording=tone(tmp_path / "long.wav", 4))
    (tmp_path / "large.wav").write_bytes(bytes(1_200_000))
    with pytest.raises(AudioError, match=r"1\.2 MB, this page takes 1 "):
        studio.speak("Yes.", recording=tmp_path / "large.wav")
    (tmp_path / "text.wav").write_text("no sound")
    with pytest.raises(AudioError, match=r"text\.wav"):
        studio.speak("Yes.", recording=tmp_path / "text.wav")
    with pytest.raises(AudioError, match="at least 1 s"):
        studio.speak("Yes.", recording=tone(tmp_path / "short.wav", 0.4))
    with pytest.raises(AudioError, match=r"gone\.wav"):
        studio.speak("Yes.", recording=tmp_path / "gone.wav")


def test_two_at_once_speak_as_one_after_the_other(studio):
    """The same request is the same speech, another seed another one."""
    alone = [studio.speak(TEXT, temperature=0.8, seed=seed).spoken.wave for seed in (1, 2)]
    assert not np.array_equal(*alone)
    found: dict[int, np.ndarray] = {}

    def ask(seed: int) -> None:
        found[seed] = studio.speak(TEXT, temperature=0.8, seed=seed).spoken.wave

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(np.array_equal(a, found[s]) for a, s in zip(alone, (1, 2), strict=True))


def test_chunks_lie_where_they_sound(studio):
    spoken = studio.speak(TEXT, method="car-3").spoken
    spans = chunk_spans(spoken)
    assert sum(n for *_, n in spans) == sum(sum(c) for c in spoken.chunks)
    assert spans[-1][1] == pytest.approx(spoken.seconds, abs=0.02)
    assert all(b[0] >= a[1] - 1e-9 for a, b in zip(spans, spans[1:], strict=False))
    gaps = [b[0] - a[1] for a, b in zip(spans, spans[1:], strict=False)]
    assert max(gaps) == pytest.approx(spoken.pauses[0])  # between the sentences
    assert studio.picture(replace(spoken, audio=spoken.audio[:900])).shape[2] == 3  # shorter than a window


def test_phonemes_lie_where_they_sound(studio, monkeypatch):
    spoken = studio.speak(TEXT, method="car-3").spoken
    spans = phoneme_spans(spoken, studio.aligner)
    assert [p for *_, p in spans if p][:5] == ["ð", "ə", "t", "ˈaɪ", "d"]
    assert all(a[1] <= b[0] + 1e-9 for a, b in zip(spans, spans[1:], strict=False))
    assert spans[-1][1] == pytest.approx(spoken.seconds, abs=0.02)
    height = studio.picture(spoken).shape[0]
    monkeypatch.setattr(studio, "aligner", None)
    assert height > studio.picture(spoken).shape[0] and phoneme_spans(spoken, None) == []  # a line more


def test_models_without_far_and_policy():
    studio = Studio.load(DemoConfig(far_decoder="", policy=""))
    assert "far" not in studio.methods and "dcar" not in studio.methods and studio.methods[0] == "car-1"
    assert Studio.load(DemoConfig(decoder="starter", policy="")).methods.count("far") == 1
