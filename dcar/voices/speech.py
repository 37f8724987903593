"""Location of the speech in a recording, so that a prompt is not taken from its silence.

Speech is found by voiced frames, which room noise lacks however loud it is; 0.2 s around each
voiced frame count as speech, for consonants and short pauses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dcar.audio import resample
from dcar.voices.features import FRAME_HOP, SAMPLE_RATE, track_f0

FRAME_RATE = SAMPLE_RATE // FRAME_HOP
EDGE_SECONDS = 0.5
"""Silence that is kept before and after speech. Ordinary recordings begin and end with less and
stay unchanged."""
ENOUGH = 0.9
"""Share of the best stretch's speech from which a stretch counts as equally good."""
_BLOCK = 20 * SAMPLE_RATE
"""Samples whose pitch is tracked at once, so that long recordings need no more memory."""


@dataclass(frozen=True)
class SpeechPart:
    """Stretch of a recording that contains its speech."""

    start: float  # seconds
    end: float
    speech: np.ndarray  # bool [F], 100 frames per second, the first at `start`

    def cut(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        """Return this stretch [samples] of the recording, which may be at any rate."""
        return wave[round(self.start * sample_rate) : round(self.end * sample_rate)]


def find_speech(
    wave: np.ndarray, sample_rate: int, max_seconds: float = float("inf")
) -> SpeechPart:
    """Return the part of a recording [samples] from its first to its last speech, with at most
    EDGE_SECONDS of silence at either end.

    If that is longer than `max_seconds`, return the first stretch of that length whose speech is
    ENOUGH of the best one's. A recording without voiced speech is returned whole, up to
    `max_seconds`.
    """
    speech = speech_frames(wave, sample_rate)
    seconds, found = len(wave) / sample_rate, np.flatnonzero(speech)
    first, last = (found[0], found[-1] + 1) if len(found) else (0, len(speech))
    start = max(0.0, first / FRAME_RATE - EDGE_SECONDS)
    end = min(seconds, last / FRAME_RATE + EDGE_SECONDS)
    if end - start > max_seconds:
        frames = speech[int(start * FRAME_RATE) : int(end * FRAME_RATE)]
        start += most_speech(frames, int(max_seconds * FRAME_RATE), wanted=0) / FRAME_RATE
        end = start + max_seconds
    return SpeechPart(start, end, speech[int(start * FRAME_RATE) : int(end * FRAME_RATE)])


def speech_frames(wave: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return True for each frame of a recording [samples] that is speech, bool [F] at 100 Hz:
    within 0.2 s of a voiced frame that is at most 30 dB below the loudest one."""
    signal = torch.from_numpy(np.ascontiguousarray(resample(wave, sample_rate, SAMPLE_RATE)))
    voiced = torch.cat([track_f0(block)[1] for block in signal.split(_BLOCK)]).numpy()
    level = signal[: len(voiced) * FRAME_HOP].view(-1, FRAME_HOP).square().mean(1).sqrt().numpy()
    voiced &= level > 0.03 * level[voiced].max(initial=0)
    return _widened(voiced, FRAME_RATE // 5)


def without_silence(wave: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return a recording [samples] without the parts that are further than EDGE_SECONDS from
    speech. Ordinary recordings and those without voiced speech stay unchanged."""
    kept = _widened(speech_frames(wave, sample_rate), int(EDGE_SECONDS * FRAME_RATE))
    if kept.all() or not kept.any():
        return wave
    frames = np.arange(len(wave)) * FRAME_RATE // sample_rate
    return wave[kept[frames.clip(max=len(kept) - 1)]]


def _widened(frames: np.ndarray, count: int) -> np.ndarray:
    """Return bool [F], true within `count` frames of a true frame in `frames`."""
    return np.convolve(frames, np.ones(2 * count + 1))[count : count + len(frames)] > 0.5


def most_speech(speech: np.ndarray, length: int, wanted: int) -> int:
    """Return the start of a window of `length` frames that contains at least ENOUGH of the
    speech (bool [F]) of the best window; of several such windows, the one nearest to `wanted`.
    Return 0 if there are no more than `length` frames."""
    if len(speech) <= length:
        return 0
    summed = np.concatenate([[0], np.cumsum(speech)])
    held = summed[length:] - summed[:-length]
    good = np.flatnonzero(held >= ENOUGH * held.max())
    return int(good[np.abs(good - wanted).argmin()])
