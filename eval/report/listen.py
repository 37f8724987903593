"""The part of the report to listen to: every sample with its players, its chunks, and what the recogniser heard."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcar.text.wer import normalize_transcript
from eval.report.blocks import Bar, Picture, file_uri
from eval.results.store import RECORDING, RESYNTHESIS

# one hue, light to dark: chunk sizes are ordered
CHUNK_COLORS = ["#dbe7f5", "#b3cfe9", "#84b3da", "#5595c9", "#2f75b2", "#185593", "#0a386b"]
PICTURE = "Spectrogram, phonemes and chunk ends"
HINTS = {RECORDING: "as recorded", RESYNTHESIS: "the recording's own tokens through the vocoder"}


def shade(size: int) -> str:
    """The colour of a chunk of so many tokens."""
    return CHUNK_COLORS[min(size, len(CHUNK_COLORS)) - 1]


def ink(size: int) -> str:
    """The colour of what is written on that shade."""
    return "white" if size > 3 else "#1c2126"


def timeline(emitted: Sequence[int], actions: Sequence[int]) -> Bar:
    """Chunks along time: a block's width is what was spoken in one pass, its shade the size that was asked for.

    A method that verifies drafts asks for no size (`actions` is empty): there the shade is what was spoken.
    """
    return Bar(f"{len(emitted)} chunks", [
        (int(n), shade(int(a)), f"{f'{int(a)} asked, ' if actions else ''}{int(n)} spoken")
        for n, a in zip(emitted, actions or emitted, strict=True) if n > 0])


def marked(reference: str, hypothesis: str) -> list[tuple[str, str]]:
    """What was heard in pieces (tag, words): "ins" wrong or extra words, "del" missing ones, "span" the right ones."""
    a, b = normalize_transcript(reference).split(), normalize_transcript(hypothesis).split()
    parts = []
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            parts.append(("span", " ".join(b[b0:b1])))
            continue
        parts += [(name, " ".join(words)) for name, words in (("del", a[a0:a1]), ("ins", b[b0:b1])) if words]
    return parts


def legend(samples: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(colour, sizes) of the chunks in samples; sizes that share a colour are one entry."""
    named: dict[str, list[int]] = {}
    for size in sorted({a for s in samples for v in s["voices"] for a in v["actions"] or ()}):
        named.setdefault(shade(size), []).append(size)
    return [(color, str(of[0]) if len(of) == 1 else f"{of[0]} to {of[-1]}") for color, of in named.items()]


def listening(result: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """What the template shows of the samples whose audio was kept; None where there are none."""
    samples = result.get("samples", [])
    if not samples:
        return None
    return {"legend": legend(samples), "pictured": any(v.get("picture") for s in samples for v in s["voices"]),
            "cards": [{"text": s["text"], "id": s["id"], "speaker": s["speaker"],
                       "prompt": file_uri(folder / s["prompt_audio"]) if s.get("prompt_audio") else "",
                       "voices": [_voice(v, s["text"], folder) for v in s["voices"]]} for s in samples]}


def _voice(voice: dict[str, Any], text: str, folder: Path) -> dict[str, Any]:
    s, d, i, n = voice["words"]
    facts = [*([HINTS[voice["method"]]] if voice["method"] in HINTS else []), f"{voice['duration']:.1f} s",
             f"{s + d + i} of {n} words wrong"]
    if voice["emitted"]:
        facts.append(f"{sum(voice['emitted']) / len(voice['emitted']):.2f} tokens a pass")
    if voice["truncated"]:
        facts.append("cut off by the length limit")
    seen = voice.get("picture")
    return {"method": voice["method"], "facts": ", ".join(facts), "heard": marked(text, voice["hypothesis"]),
            "audio": file_uri(folder / voice["audio"]) if voice["audio"] else "",
            "bar": timeline(voice["emitted"], voice["actions"]) if voice["emitted"] else None,
            "picture": Picture(f"{PICTURE}: {voice['method']}", file_uri(folder / seen)) if seen else None}
