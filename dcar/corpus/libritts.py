"""LibriTTS (and LibriTTS-R, which has the same layout): `subset/speaker/chapter/ID.wav` with
`ID.normalized.txt`; and UniCATS test set B, a list of its ids."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dcar.corpus.rows import (
    BadRow,
    Part,
    Row,
    Utterance,
    canonical_split,
    file_part,
    first_file,
    is_companion,
    line_rows,
    row_of,
    warn_of_companions,
)
from dcar.errors import DataError

SUBSETS = (
    "train-clean-100 train-clean-360 train-other-500 dev-clean dev-other test-clean test-other"
).split()
TEXT = ".normalized.txt"


def libritts_parts(root: Path, subsets: Sequence[str] = ()) -> list[Part]:
    """Return one part per subset: those of the corpus folder `root` (all, or those named), or
    `root` itself if it is one.

    Raises DataError if a requested subset is missing, or nothing has this layout.
    """
    folders = _subsets(root)
    if folders == [root] and subsets and list(subsets) != [root.name]:
        raise DataError(
            f"{root}: is itself the subset {root.name}; give the folder above it to choose subsets"
        )
    absent = sorted(set(subsets) - {p.name for p in folders})
    if absent:
        raise DataError(
            f"{root}: no subset {', '.join(absent)} (found: {', '.join(p.name for p in folders)}); "
            f"LibriTTS has {', '.join(SUBSETS)}: unpack them from https://www.openslr.org/60"
        )
    return [Part(p.name, partial(_subset, p)) for p in folders if not subsets or p.name in subsets]


def _subsets(root: Path) -> list[Path]:
    """Return the subsets in a corpus folder, or the folder itself if it is one."""
    subsets = [root] if _is_subset(root) else [p for p in sorted(root.iterdir()) if _is_subset(p)]
    if not subsets:
        raise DataError(
            f"{root}: not the LibriTTS layout; expected subset/speaker/chapter/*.wav with {TEXT}"
        )
    return subsets


def _is_subset(folder: Path) -> bool:
    return any(
        p.name.lower().endswith((".wav", TEXT)) and not is_companion(p)
        for p in folder.glob("*/*/*")
    )


def _subset(subset: Path) -> Iterator[Row]:
    """Iterate over rows chapter by chapter, so that only one chapter's names are in memory."""
    split, companions = canonical_split(subset.name), 0
    for speaker in sorted(p for p in subset.iterdir() if p.is_dir()):
        for chapter in sorted(p for p in speaker.iterdir() if p.is_dir()):
            files = [p for p in chapter.iterdir() if p.name.lower().endswith((".wav", TEXT))]
            companions += sum(map(is_companion, files))
            wavs, texts = (
                {
                    str(p)[: -len(ending)]: p
                    for p in files
                    if p.name.lower().endswith(ending) and not is_companion(p)
                }
                for ending in (".wav", TEXT)
            )
            for stem in sorted({*wavs, *texts}):
                wav, text = wavs.get(stem, Path(f"{stem}.wav")), texts.get(stem)
                yield row_of(
                    f"{text}:1" if text else str(wav), _utterance, wav, text, speaker.name, split
                )
    warn_of_companions(subset, companions)


def _utterance(wav: Path, text: Path | None, speaker: str, split: str, source: str) -> Utterance:
    if text is None:
        raise BadRow(f"no transcript {wav.stem}{TEXT} next to it", wav.stem)
    try:
        return Utterance(wav.stem, _transcript(text), speaker, str(wav), split=split, source=source)
    except (UnicodeDecodeError, OSError) as error:
        raise BadRow(f"transcript not readable ({error})", wav.stem) from error


def _transcript(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig").strip()


def unicats_parts(list_file: Path, libritts: Path | None) -> list[Part]:
    """Return the part of test set B of UniCATS: lines `utterance-id prompt-id`; both are LibriTTS
    ids, found below `libritts`.

    The list is https://cpdu.github.io/unicats/resources/testsetB_utt2prompt (500 utterances, 37
    speakers).
    """
    if libritts is None:
        raise DataError(
            f"{list_file}: a UniCATS list names LibriTTS utterances; set audio_root to the "
            "LibriTTS folder"
        )
    if not list_file.is_file():
        raise DataError(f"{list_file}: not a file; give the list testsetB_utt2prompt")
    if not libritts.is_dir():
        raise DataError(f"{libritts}: this LibriTTS folder does not exist; correct audio_root")
    return [file_part(list_file, line_rows, partial(_unicats, libritts, _subsets(libritts)))]


def _unicats(root: Path, subsets: Sequence[Path], text: str, source: str) -> Utterance:
    fields = text.split()
    if len(fields) != 2:
        raise BadRow(f"{len(fields)} fields, expected: utterance-id prompt-id")
    try:
        (wav, spoken), (prompt_wav, prompt_text) = (_by_id(root, subsets, name) for name in fields)
    except (LookupError, OSError, UnicodeDecodeError) as missing:
        raise BadRow(str(missing), fields[0]) from missing
    return Utterance(
        fields[0],
        spoken,
        fields[0].split("_")[0],
        str(wav),
        split="test",
        prompt_audio=str(prompt_wav),
        prompt_text=prompt_text,
        source=source,
    )


def _by_id(root: Path, subsets: Sequence[Path], name: str) -> tuple[Path, str]:
    """Return (wav, transcript) of an utterance, whose id SPEAKER_CHAPTER_PARAGRAPH_SENTENCE
    names its folders. Raises LookupError with the reason if it is missing."""
    names = name.split("_")
    if len(names) < 3:
        raise LookupError(f"{name!r} is not a LibriTTS id (SPEAKER_CHAPTER_PARAGRAPH_SENTENCE)")
    for subset in subsets:
        wav = first_file([subset / names[0] / names[1] / f"{name}.wav"])
        if wav.is_file():
            text = first_file([wav.with_name(f"{name}{ending}") for ending in (TEXT, TEXT.upper())])
            if not text.is_file():
                raise LookupError(f"{name} has no {text.name} next to it in {subset.name}")
            return wav, _transcript(text)
    there = ", ".join(p.name for p in subsets)
    raise LookupError(
        f"{name} is in none of the subsets {there} of {root}; unpack the subset that contains it"
    )
