"""Chunks over the spectrogram: where each pass of the decoder ended, and how many tokens it gave."""

from __future__ import annotations

import numpy as np

from dcar.speak.speaker import Spoken
from eval.report.listen import shade


def chunk_spans(spoken: Spoken) -> list[tuple[float, float, int]]:
    """Start and end in seconds, and tokens, of every chunk in the wave; the pauses between phrases have none."""
    spans, at = [], 0.0
    for chunks, pause in zip(spoken.chunks, spoken.pauses, strict=True):
        for tokens in chunks:
            spans.append((at, at + tokens / spoken.token_rate, tokens))
            at = spans[-1][1]
        at += pause
    return spans


def picture(spoken: Spoken) -> np.ndarray:
    """[height, width, 3] uint8: the spectrogram up to 8 kHz, under it a block for every chunk, as wide as it lasts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    heard, blocks = figure.subplots(2, 1, sharex=True, height_ratios=(6, 1))
    wave = np.concatenate((spoken.wave, np.zeros(max(0, 1024 - len(spoken.wave)), np.float32)))
    window = 1024
    frames = np.lib.stride_tricks.sliding_window_view(wave, window)[::256] * np.hanning(window)
    power = 20 * np.log10(np.abs(np.fft.rfft(frames, axis=1)) + 1e-5).T  # dB [bins, frames]
    heard.imshow(power, origin="lower", aspect="auto", cmap="magma", vmin=power.max() - 80, vmax=power.max(),
                 extent=(0, len(wave) / spoken.rate, 0, spoken.rate / 2000))
    heard.set_ylim(0, min(8, spoken.rate / 2000))
    heard.set_ylabel("kHz")
    spans = chunk_spans(spoken)
    heard.vlines([end for _, end, _ in spans], *heard.get_ylim(), color="white", lw=0.4, alpha=0.5)
    for start, end, tokens in spans:
        blocks.axvspan(start, end, color=shade(tokens), lw=0)
        if len(spans) <= 80:
            blocks.text((start + end) / 2, 0.5, str(tokens), ha="center", va="center", fontsize=6.5,
                        color="white" if tokens > 3 else "#1c2126")
    blocks.vlines([end for _, end, _ in spans], 0, 1, color="white", lw=0.6)
    blocks.set(ylim=(0, 1), yticks=[], xlim=(0, spoken.seconds), xlabel="seconds")
    blocks.set_ylabel("tokens\na pass", fontsize=8)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
