"""Location of the speech in a recording, so that a prompt is not taken from its silence, and long
recordings are transcribed in windows that begin and end in pauses.

Speech is found by voiced frames, which room noise lacks however loud it is; 0.2 s around each
voiced frame count as speech, for consonants and short pauses. A hum is voiced too, but moves
neither in pitch nor in level.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from dcar.audio import resample
from dcar.voices.features import FRAME_HOP, SAMPLE_RATE, raised, track_f0

FRAME_RATE = SAMPLE_RATE // FRAME_HOP
EDGE_SECONDS = 0.5
"""Silence that is kept before and after speech. Ordinary recordings begin and end with less and
stay unchanged."""
ENOUGH = 0.9
"""Share of the best stretch's speech from which a stretch counts as equally good."""
STEADY_FRAMES = FRAME_RATE // 2
STEADY_PITCH = 0.03
STEADY_DECIBELS = 2.0
"""A hum is what moves less than this in pitch (log F0; half a semitone) and in level for half a
second. Voiced speech of the starter corpus always moves by 3.4 dB or more."""
_BLOCK = 20 * SAMPLE_RATE
"""Samples whose pitch is tracked at once, so that long recordings need no more memory."""
NEAR_SECONDS = 2
"""Seconds within which `windows` compares levels, so that a quiet speaker after a loud one is
kept."""


@dataclass(frozen=True)
class SpeechPart:
    """Stretch of a recording that contains its speech."""

    start: float  # seconds
    end: float
    speech: np.ndarray  # bool [F], 100 frames per second, the first at `start`

    def cut(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        """Return this stretch [samples] of the recording, which may be at any rate."""
        return wave[round(self.start * sample_rate) : round(self.end * sample_rate)]

    def speech_of(self, count: int, rate: float) -> np.ndarray:
        """Return which of this stretch's `count` samples or tokens, `rate` a second, are speech:
        bool [count]."""
        frames = (np.arange(count) * FRAME_RATE / rate).astype(int)
        return self.speech[frames.clip(max=len(self.speech) - 1)]


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
    seconds, voiced = len(wave) / sample_rate, np.flatnonzero(speech)
    first, last = (voiced[0], voiced[-1] + 1) if len(voiced) else (0, len(speech))
    start = max(0.0, first / FRAME_RATE - EDGE_SECONDS)
    end = min(seconds, last / FRAME_RATE + EDGE_SECONDS)
    if end - start > max_seconds:
        frames = speech[int(start * FRAME_RATE) : int(end * FRAME_RATE)]
        start += most_speech(frames, int(max_seconds * FRAME_RATE), wanted=0) / FRAME_RATE
        end = start + max_seconds
    return SpeechPart(start, end, speech[int(start * FRAME_RATE) : int(end * FRAME_RATE)])


def speech_frames(wave: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return True for each frame of a recording [samples] that is speech, bool [F] at 100 Hz:
    within 0.2 s of a frame of `voiced_frames`."""
    return _widened(voiced_frames(wave, sample_rate), FRAME_RATE // 5)


def voiced_frames(wave: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return True for each voiced frame of a recording [samples] that is no hum and at most 30 dB
    below the loudest one, bool [F] at 100 Hz."""
    wave = raised(resample(wave, sample_rate, SAMPLE_RATE))
    signal = torch.from_numpy(np.ascontiguousarray(wave))
    log_f0, voiced = _pitch(signal)
    frames = signal[: len(voiced) * FRAME_HOP].view(-1, FRAME_HOP)
    power = frames.square().mean(1).numpy()
    hum = voiced & _steady(log_f0, power)
    if hum.any():
        # without it, because pitches far from those of most frames count as errors
        voiced = _pitch((frames * ~torch.from_numpy(hum)[:, None]).flatten())[1]
    level = np.sqrt(power)
    return voiced & (level > 0.03 * level[voiced].max(initial=0))


def _pitch(signal: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return log F0 [F] and voiced frames, bool [F], of a waveform at 24 kHz (`track_f0`)."""
    tracks = [track_f0(block) for block in signal.split(_BLOCK)]
    log_f0, voiced = (torch.cat(parts).numpy() for parts in zip(*tracks, strict=True))
    return log_f0, voiced


def _steady(log_f0: np.ndarray, power: np.ndarray) -> np.ndarray:
    """Return True for each frame [F] within half a second in which neither the pitch nor the level
    moves, averaged over 0.1 s."""
    if len(log_f0) < STEADY_FRAMES:
        return np.zeros(len(log_f0), bool)
    width = FRAME_RATE // 10
    averaged = np.convolve(np.pad(power, width // 2, mode="edge"), np.ones(width) / width, "same")
    decibels = 10 * np.log10(averaged[width // 2 :][: len(power)] + 1e-12)
    still = [
        np.ptp(np.lib.stride_tricks.sliding_window_view(track, STEADY_FRAMES), axis=1) < most
        for track, most in ((log_f0, STEADY_PITCH), (decibels, STEADY_DECIBELS))
    ]
    return np.convolve(still[0] & still[1], np.ones(STEADY_FRAMES)) > 0.5


def windows(wave: np.ndarray, sample_rate: int, seconds: float) -> list[np.ndarray]:
    """Return the speech of a recording [samples] in windows of at most `seconds`, for recognisers
    that were trained on such; the whole recording if it is no longer.

    Each window but the last ends in the longest pause of its second half. Silence of more than
    EDGE_SECONDS at either end of a window is left out, and so are windows without speech.
    """
    size = int(seconds * FRAME_RATE)
    if len(wave) <= seconds * sample_rate:
        return [wave]
    block = NEAR_SECONDS * sample_rate
    starts = range(0, len(wave), block)
    voiced = np.concatenate([voiced_frames(wave[i : i + block], sample_rate) for i in starts])
    if not voiced.any():  # whispered, or no speech at all
        voiced[:] = True
    ends = [0]
    while len(voiced) - ends[-1] > size:
        half = ends[-1] + size // 2
        ends.append(half + _longest_pause(voiced[half : ends[-1] + size]))
    spans, edge = [], int(EDGE_SECONDS * FRAME_RATE)
    for start, end in itertools.pairwise([*ends, len(voiced) + 1]):
        if len(frames := start + np.flatnonzero(voiced[start:end])):
            first, last = max(start, frames[0] - edge), min(end, frames[-1] + 1 + edge)
            spans.append(wave[first * sample_rate // FRAME_RATE : last * sample_rate // FRAME_RATE])
    return spans


def _longest_pause(voiced: np.ndarray) -> int:
    """Return the middle of the longest run of false frames in `voiced`, its length if there is
    none."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], voiced, [True]))))
    starts, ends = edges[::2], edges[1::2]
    if not len(starts):
        return len(voiced)
    longest = (ends - starts).argmax()
    return int(starts[longest] + ends[longest]) // 2


def without_silence(wave: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return a recording [samples] without the parts that are further than EDGE_SECONDS from
    speech. Ordinary recordings and those without voiced speech stay unchanged."""
    audible = _widened(speech_frames(wave, sample_rate), int(EDGE_SECONDS * FRAME_RATE))
    if audible.all() or not audible.any():
        return wave
    frames = np.arange(len(wave)) * FRAME_RATE // sample_rate
    return wave[audible[frames.clip(max=len(audible) - 1)]]


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
