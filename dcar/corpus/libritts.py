"""LibriTTS (and LibriTTS-R, which has the same layout): `subset/speaker/chapter/ID.wav` with `ID.normalized.txt`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dcar.corpus.rows import Part, Problem, Row, Utterance, canonical_split
from dcar.errors import DataError

SUBSETS = (
    "train-clean-100",
    "train-clean-360",
    "train-other-500",
    "dev-clean",
    "dev-other",
    "test-clean",
    "test-other",
)
TEXT = ".normalized.txt"


def libritts_parts(root: Path, subsets: Sequence[str] = ()) -> list[Part]:
    """One part a subset: those of the corpus folder `root` (all, or those named), or `root` itself if it is one.

    DataError where a subset that was asked for is not there, or nothing has this layout.
    """
    if _is_subset(root):
        if subsets and list(subsets) != [root.name]:
            raise DataError(f"{root}: is the subset {root.name}; give the folder above it to choose subsets")
        found = [root]
    else:
        found = sorted(p for p in root.iterdir() if p.is_dir() and _is_subset(p))
    if not found:
        raise DataError(f"{root}: not the LibriTTS layout; expected subset/speaker/chapter/*.wav with {TEXT}")
    absent = sorted(set(subsets) - {p.name for p in found})
    if absent:
        raise DataError(
            f"{root}: no subset {', '.join(absent)} (there: {', '.join(p.name for p in found)}); LibriTTS has "
            f"{', '.join(SUBSETS)}: unpack them from https://www.openslr.org/60"
        )
    return [Part(p.name, partial(_subset, p)) for p in found if not subsets or p.name in subsets]


def _is_subset(folder: Path) -> bool:
    return any(next(folder.glob(f"*/*/*{ending}"), None) for ending in (".wav", TEXT))


def _subset(subset: Path) -> Iterator[Row]:
    """Rows chapter by chapter, so that only one chapter's names are held."""
    split = canonical_split(subset.name)
    for speaker in sorted(p for p in subset.iterdir() if p.is_dir()):
        for chapter in sorted(p for p in speaker.iterdir() if p.is_dir()):
            wavs = {p.with_suffix("") for p in chapter.glob("*.wav")}
            texts = {p.with_name(p.name.removesuffix(TEXT)) for p in chapter.glob(f"*{TEXT}")}
            for stem in sorted(wavs | texts):
                yield _utterance(stem, speaker.name, split, stem in texts)


def _utterance(stem: Path, speaker: str, split: str, has_text: bool) -> Row:
    wav, txt = Path(f"{stem}.wav"), Path(f"{stem}{TEXT}")
    if not has_text:
        return Problem(stem.name, str(wav), f"no transcript {txt.name} beside it")
    try:
        text = read_transcript(txt)
    except (UnicodeDecodeError, OSError) as error:
        return Problem(stem.name, f"{txt}:1", f"transcript not readable ({error})")
    return Utterance(stem.name, text, speaker, str(wav), split=split, source=f"{txt}:1")


def read_transcript(path: Path) -> str:
    """The text of one `.normalized.txt`."""
    return path.read_text(encoding="utf-8-sig").strip()


class LibriTTSIndex:
    """Finds utterances of a LibriTTS folder by id: `SPEAKER_CHAPTER_PARAGRAPH_SENTENCE` names its own folders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.subsets = [root] if _is_subset(root) else sorted(p for p in root.iterdir() if p.is_dir() and _is_subset(p))
        if not self.subsets:
            raise DataError(f"{root}: not the LibriTTS layout; expected subset/speaker/chapter/*.wav with {TEXT}")

    def find(self, utterance_id: str) -> tuple[Path, Path]:
        """(wav, transcript) of an utterance; LookupError with the reason if it is not there."""
        names = utterance_id.split("_")
        if len(names) < 3:
            raise LookupError(f"{utterance_id!r} is no LibriTTS id (SPEAKER_CHAPTER_PARAGRAPH_SENTENCE)")
        for subset in self.subsets:
            wav = subset / names[0] / names[1] / f"{utterance_id}.wav"
            if wav.is_file():
                txt = wav.with_name(f"{utterance_id}{TEXT}")
                if not txt.is_file():
                    raise LookupError(f"{utterance_id} has no {txt.name} beside it in {subset.name}")
                return wav, txt
        there = ", ".join(p.name for p in self.subsets)
        raise LookupError(f"{utterance_id} is in none of the subsets {there} of {self.root}; unpack the one it is in")
