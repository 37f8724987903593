"""What a comparison says of the chunks themselves: why they end where they do, where an oracle would end them, and what
is heard there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcar.audio import load_audio
from eval.analysis.losses import loss_maps
from eval.analysis.reasons import watch
from eval.methods.registry import Entry
from eval.report.reasons_plots import draw_reasons
from eval.report.spectrum import save_picture, spectrum_picture
from eval.results.store import Record, Tools


def explain(tools: Tools, entries: Sequence[Entry], utterances: int, seed: int, out: Path) -> dict[str, Any]:
    """reasons (`eval.analysis.reasons.watch`) and losses (`eval.analysis.losses.loss_maps`) of `utterances` spread over
    all, and their pictures in `out`."""
    chosen = np.linspace(0, len(tools.items) - 1, min(utterances, len(tools.items))).round().astype(int)
    items = [tools.items[i] for i in chosen]
    policies = {"dcar" + (f"@{name}" if name else ""): policy for name, policy in tools.models.policies.items()}
    policies = {name: policy for name, policy in policies.items() if any(e.name == name for e in entries)}
    reasons: dict[str, Any] = watch(entries, [item.prompt for item in items], seed) if items else {}
    losses = loss_maps(tools.models.decoder, policies, items)
    draw_reasons(reasons, losses, out)
    return {"reasons": reasons, "losses": losses}


def sample_picture(tools: Tools, record: Record, text: str, audio: Path) -> Path | None:
    """Beside the audio of a record a picture of it: spectrogram, phonemes, and the chunks of its passes. None where
    nothing was spoken in passes, or the phonemes cannot be told."""
    if tools.aligner is None or not record.get("emitted") or not record["duration"]:
        return None
    rate = len(record["tokens"]) / record["duration"]  # tokens a second
    sounds = [(s.start / rate, s.end / rate, s.phoneme) for s in tools.aligner.align(record["tokens"], text)]
    ends = np.cumsum(record["emitted"]).tolist()
    chunks = [((end - n) / rate, end / rate, n) for end, n in zip(ends, record["emitted"], strict=True) if n]
    path = audio.with_suffix(".png")
    save_picture(path, spectrum_picture(*load_audio(audio), chunks, sounds, colors="Greys", width=9.0))
    return path
