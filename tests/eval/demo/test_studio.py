"""What the page does, without the page: every method speaks, limits hold for any request, chunks
lie where they sound."""

import itertools
import threading

import numpy as np
import pytest

from dcar.audio import save_audio
from dcar.errors import AudioError, ConfigError, TextError
from eval.demo.studio import POLICIES, VERIFIERS, chunk_spans

TEXT = "The tide came in. We left."


def tone(path, seconds: float):
    """A recording with something of a voice: a gliding buzz."""
    t = np.arange(int(24_000 * seconds)) / 24_000
    save_audio(
        path,
        (0.3 * np.sign(np.sin(2 * np.pi * (120 + 10 * np.sin(t)) * t))).astype(np.float32),
        24_000,
    )
    return path


def test_every_method_that_is_offered_speaks(studio):
    assert (
        studio.methods[:4] == list(POLICIES)
        and studio.start == "dcar@n4"
        and "car-16" in studio.methods
    )
    assert {"far", "sd", "typical"} <= set(studio.methods)
    assert len(set(studio.methods) & set(VERIFIERS)) >= 4
    for method in studio.methods:
        spoken, facts = studio.speak("Yes.", method=method)
        assert (
            facts.startswith(f"{method}: ")
            and "s end to end (RTF" in facts
            and facts.endswith(" per pass.")
        )
        assert np.abs(spoken.audio).max() > 0.01


def test_voices_are_different_people(studio, tmp_path):
    assert len(studio.voices) == 4
    first, second = (studio.speak("Yes.", voice=name)[0].audio for name in studio.voices[:2])
    assert not np.array_equal(first, second)
    own, _ = studio.speak(
        "Yes.", voice=studio.voices[0], recording=tone(tmp_path / "voice.wav", 1.5)
    )
    assert not np.array_equal(own.audio, first)


@pytest.mark.parametrize(
    ("request_", "error", "said"),
    [
        ({"text": "word " * 13}, TextError, "65 .*60"),
        ({"text": " "}, TextError, "^text "),
        ({"method": "car-99"}, ConfigError, "'car-99'.* dcar"),
        ({"method": "random-1-7"}, ConfigError, "'random-1-7'"),
        ({"method": "dcar@n99"}, ConfigError, "'dcar@n99'"),
        ({"method": "dcar@other@d0.5"}, ConfigError, "'dcar@other@d0.5'"),
        ({"method": "dcar@d1"}, ConfigError, "'dcar@d1'"),
        ({"method": "os.path.Class"}, ConfigError, "'os.path.Class'"),  # nothing is imported
        ({"voice": "nobody"}, ConfigError, "voice nobody: .*`dcar speak --voices`"),
        # no file is read
        ({"voice": "/etc/hostname"}, ConfigError, "voice /etc/hostname: .*`dcar speak --voices`"),
        ({"temperature": 9.0}, ConfigError, "temperature .*1.5"),
        ({"temperature": float("nan")}, ConfigError, "temperature .*1.5"),
    ],
)
def test_what_is_beyond_the_limits_is_refused(studio, request_, error, said):
    with pytest.raises(error, match=said):
        studio.speak(**{"text": "Yes.", **request_})


def test_recordings_beyond_the_limits_are_refused(studio, tmp_path):
    with pytest.raises(AudioError, match="21.0 s.*20 s"):
        studio.speak("Yes.", recording=tone(tmp_path / "long.flac", 21))
    (tmp_path / "large.wav").write_bytes(bytes(1_200_000))
    with pytest.raises(AudioError, match=r"1\.2 MB.* 1 MB"):
        studio.speak("Yes.", recording=tmp_path / "large.wav")
    (tmp_path / "text.wav").write_text("no sound")
    with pytest.raises(AudioError, match=r"text\.wav"):
        studio.speak("Yes.", recording=tmp_path / "text.wav")
    with pytest.raises(AudioError, match="short.wav: .*0.40 s"):
        studio.speak("Yes.", recording=tone(tmp_path / "short.wav", 0.4))
    with pytest.raises(AudioError, match=r"gone\.wav"):
        studio.speak("Yes.", recording=tmp_path / "gone.wav")


def test_two_at_once_speak_as_one_after_the_other(studio):
    """The same request is the same speech, another seed another one."""
    alone = [studio.speak(TEXT, temperature=0.8, seed=seed)[0].audio for seed in (1, 2)]
    assert not np.array_equal(*alone)
    found: dict[int, np.ndarray] = {}

    def ask(seed: int) -> None:
        found[seed] = studio.speak(TEXT, temperature=0.8, seed=seed)[0].audio

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(np.array_equal(a, found[s]) for a, s in zip(alone, (1, 2), strict=True))


def test_chunks_lie_where_they_sound(studio):
    spoken, _ = studio.speak(TEXT, method="car-3")
    spans = chunk_spans(spoken)
    assert sum(n for *_, n in spans) == sum(sum(c) for c in spoken.chunks)
    assert spans[-1][1] == pytest.approx(spoken.seconds, abs=0.02)
    assert all(b[0] >= a[1] - 1e-9 for a, b in itertools.pairwise(spans))
    gaps = [b[0] - a[1] for a, b in itertools.pairwise(spans)]
    assert max(gaps) == pytest.approx(spoken.pauses[0])  # between the sentences
