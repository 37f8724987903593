"""Speaking while decoding: audio of an utterance as its tokens come, and many utterances through one engine.

The vocoder is a stack of convolutions between tokens and waveform, so a sample depends on tokens near it only. A window
is therefore synthesised again with CONTEXT tokens on each side, and just its middle is given out: the pieces put
together are the waveform of the whole utterance (up to rounding), which a test holds them to. Two things reach further
and are carried along: the phase of the pulses, and the noise, which is addressed by sample.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from dcar.decoding.engine.run import Job, Plan, StaticEngine
from dcar.decoding.records import DecodeResult
from dcar.errors import ConfigError
from dcar.vocoder.model import TokenVocoder


@dataclass(frozen=True)
class AudioChunk:
    """Samples [n] that follow what was given before, and when they were there."""

    index: int  # of the job
    samples: np.ndarray
    seconds: float  # from the start of the stream
    result: DecodeResult | None = None  # with the last piece


def reach(vocoder: TokenVocoder) -> int:
    """Tokens on each side that a sample can depend on."""
    c = vocoder.config
    half = (c.kernel_size - 1) // 2
    tokens = half * sum(c.acoustic_dilations)
    frames = half * sum(c.renderer_dilations) + 2 + -(-c.n_fft // c.hop)  # convolutions, pitch lines, spectra both ways
    return tokens + -(-frames // c.frames_per_token) + 1


class StreamingVocoder:
    """Tokens of one utterance in, pieces of waveform out."""

    def __init__(self, vocoder: TokenVocoder, speaker: np.ndarray, context: int | None = None):
        """speaker [F]: voice features; context: tokens on each side of a window, by default all that matter."""
        self.vocoder, self.context = vocoder.eval(), reach(vocoder) if context is None else context
        if self.context < 0:
            raise ConfigError(f"context counts tokens and cannot be {context}")
        device = vocoder.renderer.noise.device
        self.speaker = torch.as_tensor(speaker, dtype=torch.float32, device=device)[None]
        self.tokens: list[int] = []
        self.given = 0  # tokens whose audio was given out
        self._start = 0  # first token of the next window
        # The pitch at a window's start lacks its left neighbours, so the phase of the pulses (cycles) is carried at a
        # token further in, where this window and the next both know it.
        self._anchor, self._cycles = 0, 0.0

    @torch.inference_mode()
    def push(self, tokens: Iterable[int], last: bool = False) -> np.ndarray:
        """Samples that are certain now: those `context` tokens behind the newest token, or all with `last`."""
        self.tokens += tokens
        end = len(self.tokens)
        ready = end if last else max(self.given, end - self.context)
        if ready == self.given:
            return np.zeros(0, np.float32)
        config, v = self.vocoder.config, self.vocoder
        per, renderer = config.samples_per_token, v.renderer
        start = self._start
        window = torch.tensor(self.tokens[start:end], device=self.speaker.device)[None]
        mask = torch.ones(1, end - start, device=window.device)
        log_mel, pitch = v.predict(window, mask, self.speaker)
        noise = renderer.noise.repeat(-(-end * per // len(renderer.noise)))[start * per : end * per][None]
        cycles = F.pad(renderer.cycles(pitch.log_f0)[0], (1, 0))  # before each sample of the window
        phase = self._cycles - cycles[(self._anchor - start) * per]
        frames = mask.repeat_interleave(config.frames_per_token, dim=1)
        wave = renderer(log_mel, pitch, frames, noise, phase.view(1, 1))[0].clamp(-1.0, 1.0)
        out = wave[(self.given - start) * per : (ready - start) * per].cpu().numpy().copy()
        self.given = ready
        if ready > 2 * self.context:  # until then windows start with the utterance
            self._start, self._anchor = ready - 2 * self.context, ready - self.context
            self._cycles = float(phase + cycles[(self._anchor - start) * per]) % 1.0
        return out


def stream_audio(engine: StaticEngine, jobs: Iterable[Job], plan: Plan, vocoder: TokenVocoder,
                 speakers: dict[int, np.ndarray], every: int = 25) -> Iterator[AudioChunk]:
    """Speak the jobs, rows being replaced as they finish, and give out audio as it becomes certain.

    speakers: voice features [F] by job index; every: tokens gathered before the vocoder runs (25 = half a second).
    The pieces of a job come in order; those of several jobs are interleaved. Errors: those of `StaticEngine.run`.
    """
    if every < 1:
        raise ConfigError(f"every counts tokens and must be at least 1, not {every}")
    started = time.perf_counter()
    voices: dict[int, StreamingVocoder] = {}
    held: dict[int, list[int]] = {}
    for progress in engine.run(jobs, plan, stream=True):
        index, done = progress.job.index, progress.result is not None
        if index not in voices:
            voices[index] = StreamingVocoder(vocoder, speakers[index])
            held[index] = []
        held[index] += progress.tokens
        if len(held[index]) < every and not done:
            continue
        samples = voices[index].push(held[index], last=done)
        held[index] = []
        if done:
            del voices[index], held[index]
        if len(samples) or done:
            yield AudioChunk(index, samples, time.perf_counter() - started, progress.result)
