"""The part of the report to listen to: every sample with its players, chunk timelines and what the judge heard."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcar.text.wer import normalize_transcript
from eval.report.html import escape, file_uri, folded, heading, wide
from eval.results.store import RECORDING, RESYNTHESIS

# one hue, light to dark: chunk sizes are ordered
CHUNK_COLORS = ["#dbe7f5", "#b3cfe9", "#84b3da", "#5595c9", "#2f75b2", "#185593", "#0a386b"]


PICTURE = "Spectrogram, phonemes and chunk ends"


def shade(size: int) -> str:
    """The colour of a chunk of so many tokens."""
    return CHUNK_COLORS[min(size, len(CHUNK_COLORS)) - 1]


def ink(size: int) -> str:
    """The colour of what is written on that shade."""
    return "white" if size > 3 else "#1c2126"


def timeline(emitted: Sequence[int], actions: Sequence[int]) -> str:
    """Chunks along time: a block's width is what was spoken in one pass, its shade the size that was asked for.

    A method that verifies drafts asks for no size (`actions` is empty): there the shade is what was spoken.
    """
    blocks = "".join(
        f"<span style='flex:{int(n)} 1 0;background:{shade(int(a))}' "
        f"title='{f'{int(a)} asked, ' if actions else ''}{int(n)} spoken'></span>"
        for n, a in zip(emitted, actions or emitted, strict=True) if n > 0)
    return f"<div class=bar role=img aria-label='{len(emitted)} chunks'>{blocks}</div>"


def marked(reference: str, hypothesis: str) -> str:
    """The judge's words as HTML; wrong or extra ones marked, missing ones struck out."""
    a, b = normalize_transcript(reference).split(), normalize_transcript(hypothesis).split()
    parts = []
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            parts += [escape(" ".join(b[b0:b1]))]
            continue
        if a1 > a0:
            parts.append(f"<del>{escape(' '.join(a[a0:a1]))}</del>")
        if b1 > b0:
            parts.append(f"<ins>{escape(' '.join(b[b0:b1]))}</ins>")
    return " ".join(parts) or "<span class=soft>(nothing)</span>"


def listen_section(result: dict[str, Any], folder: Path) -> str:
    """The samples whose audio was kept; nothing where there are none."""
    samples = result.get("samples", [])
    if not samples:
        return ""
    sizes = sorted({a for s in samples for v in s["voices"] for a in v["actions"] or ()})
    legend = "".join(f"<span><i style='background:{shade(a)}'></i>{a}</span>" for a in sizes if a < len(CHUNK_COLORS))
    if most := [a for a in sizes if a >= len(CHUNK_COLORS)]:  # these share a colour
        said = str(most[0]) if len(most) == 1 else f"{most[0]} to {most[-1]}"
        legend += f"<span><i style='background:{shade(most[0])}'></i>{said}</span>"
    cards = "".join(_card(s, folder) for s in samples)
    pictured = any(v.get("picture") for s in samples for v in s["voices"])
    how = ("<p class=soft>The pictures of the first sentence show the sound itself: dark where it is loud, low tones "
           "below. A red line stands where a pass ended; under it the phonemes, as they were laid along the tokens (an "
           "estimate, a phoneme early or late at times), and the tokens of each pass.</p>" if pictured else "")
    return (heading("Listen") + "<p>Under every player: the chunks in which the tokens were spoken, and what the "
            "recogniser heard (<ins>wrong or extra words</ins>, <del>missing words</del>).</p>"
            f"<div class=legend><span>tokens asked for in one pass:</span>{legend}</div>{how}{cards}")


def _card(sample: dict[str, Any], folder: Path) -> str:
    prompt = ""
    if sample.get("prompt_audio"):
        prompt = ("<div class=voice><span class=name>prompt</span> <span class=soft>the voice to imitate</span>"
                  f"<audio controls preload=none aria-label='prompt: {escape(sample['speaker'])}' "
                  f"src='{file_uri(folder / sample['prompt_audio'])}'></audio></div>")
    voices = "".join(_voice(v, sample["text"], folder) for v in sample["voices"])
    return (f"<div class=card><h3>{escape(sample['text'])}</h3><p class=soft>{escape(sample['id'])}, speaker "
            f"{escape(sample['speaker'])}</p>{prompt}{voices}</div>")


def _voice(voice: dict[str, Any], text: str, folder: Path) -> str:
    s, d, i, n = voice["words"]
    facts = [f"{voice['duration']:.1f} s", f"{s + d + i} of {n} words wrong"]
    if voice["emitted"]:
        facts.append(f"{sum(voice['emitted']) / len(voice['emitted']):.2f} tokens a pass")
    if voice["truncated"]:
        facts.append("cut off by the length limit")
    hint = {RECORDING: "as recorded", RESYNTHESIS: "the recording's own tokens through the vocoder"}
    audio = ("<p class=soft>no audio: nothing was spoken</p>" if not voice["audio"] else
             f"<audio controls preload=none aria-label='{escape(voice['method'])}: {escape(text)}' "
             f"src='{file_uri(folder / voice['audio'])}'></audio>")
    bar = timeline(voice["emitted"], voice["actions"]) if voice["emitted"] else ""
    if voice["method"] in hint:
        facts.insert(0, hint[voice["method"]])
    seen = ""
    if voice.get("picture"):
        image = wide(f"{PICTURE}: {voice['method']}", folder / voice["picture"])
        seen = folded(PICTURE, image, voice["method"].startswith("dcar"))
    return (f"<div class=voice><span class=name>{escape(voice['method'])}</span> "
            f"<span class=soft>{escape(', '.join(facts))}</span>{audio}{bar}{seen}"
            f"<div>{marked(text, voice['hypothesis'])}</div></div>")
