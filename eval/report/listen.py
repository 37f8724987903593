"""Listening section of the report: every sample with its players, its chunks and its transcript;
and a spectrogram that shows where each pass ended, how many tokens it kept, and the phonemes."""

import bisect
import difflib
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dcar.audio import load_audio
from dcar.storage import replacing
from dcar.text.languages import DEFAULT, language_of
from dcar.tokens.alignment import PhonemeAligner
from eval.report.blocks import Bar, Picture, file_uri
from eval.results.types import RECORDING, RESYNTHESIS, Record, Result, Sample, SpokenSample

logger = logging.getLogger(__name__)

# one hue, light to dark: chunk sizes are ordered
CHUNK_COLORS = ["#dbe7f5", "#b3cfe9", "#84b3da", "#5595c9", "#2f75b2", "#185593", "#0a386b"]
FIRST_SIZES = [1, 2, 4, 6, 9, 12, 15]
"""Smallest chunk of each colour."""
PICTURE = "Spectrogram, phonemes and chunk ends"
WINDOW, STEP = 1024, 256  # samples of a frame of the spectrogram, and from one to the next
NAMED = 80  # number of chunks above which their sizes are not written, because they would overlap
# chunk ends per inch above which their lines are faint, so that they do not hide the picture
CLOSE = 8.0
END_COLOR = "#c8442b"  # of the lines at the ends of chunks
WIDTH = 9.0  # of the picture, in inches
ChunkSpan = tuple[float, float, int]  # start and end in seconds, tokens
PhonemeSpan = tuple[float, float, str]  # start and end in seconds, phoneme (empty: silence)
HINTS = {RECORDING: "as recorded", RESYNTHESIS: "the recording's own tokens through the vocoder"}


def shade(size: int) -> str:
    """Return the colour of a chunk of so many tokens."""
    return CHUNK_COLORS[bisect.bisect(FIRST_SIZES, size) - 1]


def ink(size: int) -> str:
    """Return the text colour on that shade."""
    return "white" if size >= FIRST_SIZES[3] else "#1c2126"


def timeline(emitted: Sequence[int], sizes: Sequence[int]) -> Bar:
    """Return the chunks along time: a block's width is the length of the speech from one pass, its
    shade the size that was chosen.

    A method that verifies drafts chooses no size (`sizes` is empty): there the shade is the
    number of tokens kept.
    """
    return Bar(
        f"{len(emitted)} chunks",
        [
            (
                int(n),
                shade(int(size)),
                f"{int(size)} chosen, {int(n)} kept" if sizes else f"{int(n)} kept",
            )
            for n, size in zip(emitted, sizes or emitted, strict=True)
            if n > 0
        ],
    )


def marked(reference: str, hypothesis: str, language: str = DEFAULT) -> list[tuple[str, str]]:
    """Return the transcript in pieces (tag, words or characters): "ins" wrong or extra ones, "del"
    missing ones, "span" correct ones."""
    rules = language_of(language)
    a, b = map(rules.split, rules.closest(reference, hypothesis))
    between = "" if rules.by_characters else " "
    parts = []
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            parts.append(("span", between.join(b[b0:b1])))
            continue
        parts += [
            (name, between.join(words))
            for name, words in (("del", a[a0:a1]), ("ins", b[b0:b1]))
            if words
        ]
    return parts


def legend(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Return (colour, sizes) of the chunks in samples; sizes that share a colour are one entry."""
    decoded = [v.decoded for s in samples for v in s.voices if v.decoded]
    by_color: dict[str, list[int]] = {}
    for size in sorted({size for d in decoded for size in d.sizes}):
        by_color.setdefault(shade(size), []).append(size)
    return [
        (color, str(of[0]) if len(of) == 1 else f"{of[0]} to {of[-1]}")
        for color, of in by_color.items()
    ]


def listening(result: Result, folder: Path) -> dict[str, Any] | None:
    """Return the template's data on the samples whose audio was kept; None if there are none."""
    samples = [sample for measured in result.comparisons for sample in measured.samples]
    if not samples:
        return None
    return {
        "legend": legend(samples),
        "pictured": any(v.picture for s in samples for v in s.voices),
        "cards": [
            {
                "text": s.text,
                "id": s.id,
                "speaker": s.speaker,
                "prompt": file_uri(folder / s.prompt_audio) if s.prompt_audio else "",
                "voices": [_voice(v, s, folder) for v in s.voices],
                "language": s.language,
            }
            for s in samples
        ],
    }


def _voice(voice: SpokenSample, sample: Sample, folder: Path) -> dict[str, Any]:
    decoded, picture = voice.decoded, voice.picture
    counted = "characters" if language_of(sample.language).by_characters else "words"
    emitted = decoded.emitted if decoded else []
    facts = [
        HINTS.get(voice.method, ""),
        f"{voice.duration:.1f} s",
        f"{voice.words.errors} of {voice.words.reference_words} {counted} wrong",
        f"{sum(emitted) / len(emitted):.2f} tokens per pass" if emitted else "",
        "cut off by the length limit" if decoded and decoded.truncated else "",
    ]
    title = f"{PICTURE}: {voice.method}"
    return {
        "method": voice.method,
        "facts": ", ".join(filter(None, facts)),
        "transcript": marked(sample.text, voice.hypothesis, sample.language),
        "audio": file_uri(folder / voice.audio) if voice.audio else "",
        "bar": timeline(emitted, decoded.sizes) if decoded and emitted else None,
        "picture": Picture(title, file_uri(folder / picture)) if picture else None,
    }


def spectrum_picture(
    wave: np.ndarray,
    rate: int,
    chunks: Sequence[ChunkSpan],
    phonemes: Sequence[PhonemeSpan],
) -> np.ndarray:
    """Draw a picture [height, width, 3] uint8: the spectrogram up to 8 kHz with a line at the
    end of every chunk; under it the phonemes and a block for every chunk, as wide as it lasts and
    darker for more tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.0), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    spectrum, spoken, blocks = figure.subplots(3, 1, sharex=True, height_ratios=(6, 0.9, 0.9))
    ends = [end for _, end, _ in chunks]
    strength = 0.6 if len(ends) <= CLOSE * WIDTH else 0.15
    _spectrogram(spectrum, wave, rate)
    spectrum.vlines(ends, *spectrum.get_ylim(), color=END_COLOR, lw=0.6, alpha=strength)
    _phonemes(spoken, phonemes, ends, WIDTH / max(1e-3, len(wave) / rate), strength)
    _blocks(blocks, chunks)
    blocks.set(xlim=(0, len(wave) / rate))
    blocks.set_xlabel("seconds")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def save_picture(path: Path, picture: np.ndarray) -> None:
    """Write a picture [height, width, 3] as PNG with few colours, small enough to be embedded a
    dozen times."""
    from PIL import Image

    with replacing(path) as part:
        Image.fromarray(picture).quantize(48).save(part, format="png", optimize=True)


@cache
def font_with(text: str) -> Path | None:
    """Return a font of this machine that has all characters of a text: matplotlib's own, or the
    first that has them. Log, once for each text, that there is none."""
    from matplotlib import font_manager

    own = font_manager.findfont("DejaVu Sans")
    fonts = [f for f in font_manager.fontManager.ttflist if "LastResort" not in f.fname]
    # upright and of normal weight first
    fonts.sort(key=lambda f: (f.style != "normal", str(f.weight) not in ("400", "normal"), f.fname))
    for path in dict.fromkeys((own, *(font.fname for font in fonts))):
        try:
            known = font_manager.get_font(path).get_charmap()
        except (OSError, RuntimeError):  # a damaged font of the system
            continue
        if all(ord(c) in known for c in text):
            return Path(path)
    logger.warning("pictures: no font of this machine has %r, which is left out", text)
    return None


def _spectrogram(panel: Any, wave: np.ndarray, rate: int) -> None:
    padded = np.concatenate((wave, np.zeros(max(0, WINDOW - len(wave)), np.float32)))
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::STEP] * np.hanning(WINDOW)
    power = 20 * np.log10(np.abs(np.fft.rfft(frames, axis=1)) + 1e-5).T  # dB [bins, frames]
    panel.imshow(
        power,
        origin="lower",
        aspect="auto",
        cmap="Greys",
        vmin=power.max() - 80,
        vmax=power.max(),
        extent=(0, len(padded) / rate, 0, rate / 2000),
    )
    panel.set_ylim(0, min(8, rate / 2000))
    panel.set_ylabel("kHz")


def _phonemes(
    panel: Any,
    phonemes: Sequence[PhonemeSpan],
    ends: Sequence[float],
    inches: float,
    strength: float,
) -> None:
    """Write the phonemes under the spectrogram. inches: per second; strength: of the lines where
    chunks end. A phoneme without enough room is written one line lower."""
    low, before = False, -1.0
    for start, end, phoneme in phonemes:
        middle = (start + end) / 2
        panel.axvline(start, color="#9aa3ab", lw=0.4, ymin=0.86)
        if not phoneme:
            continue
        font = font_with(phoneme)
        if font is None:
            continue
        low = not low if (middle - before) * inches < 0.02 + 0.075 * len(phoneme) else False
        height = 0.24 if low else 0.66
        panel.text(middle, height, phoneme, ha="center", va="center", font=font, fontsize=7.5)
        before = middle
    panel.vlines(ends, 0, 1, color=END_COLOR, lw=0.6, alpha=strength)
    panel.set(ylim=(0, 1), yticks=[])
    panel.set_ylabel("phonemes", fontsize=8, rotation=0, ha="right", va="center")
    panel.spines[["top", "right", "bottom", "left"]].set_visible(False)
    panel.tick_params(axis="x", length=0)


def _blocks(panel: Any, chunks: Sequence[ChunkSpan]) -> None:
    for start, end, tokens in chunks:
        panel.axvspan(start, end, color=shade(tokens), lw=0)
        if len(chunks) <= NAMED:
            panel.text(
                (start + end) / 2,
                0.5,
                str(tokens),
                ha="center",
                va="center",
                fontsize=6.5,
                color=ink(tokens),
            )
    panel.vlines([end for _, end, _ in chunks], 0, 1, color="white", lw=0.6)
    panel.set(ylim=(0, 1), yticks=[])
    panel.set_ylabel("tokens\nper pass", fontsize=8, rotation=0, ha="right", va="center")


def sample_picture(aligner: PhonemeAligner | None, record: Record, audio: Path) -> Path | None:
    """Save a picture next to the audio of a record and return its path: spectrogram, phonemes
    and the chunk of each pass. None if the utterance was not decoded in passes, is empty, or its
    phonemes cannot be aligned."""
    if aligner is None or record.decoded is None or not record.duration:
        return None
    rate = len(record.tokens) / record.duration  # tokens per second
    emitted = record.decoded.emitted
    sounds = [
        (s.start / rate, s.end / rate, s.phoneme) for s in aligner.align(record.tokens, record.text)
    ]
    ends = np.cumsum(emitted).tolist()
    chunks = [((end - n) / rate, end / rate, n) for end, n in zip(ends, emitted, strict=True) if n]
    path = audio.with_suffix(".png")
    save_picture(path, spectrum_picture(*load_audio(audio), chunks, sounds))
    return path
