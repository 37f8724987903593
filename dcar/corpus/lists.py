"""Test sets that are given as lists: UniCATS test set B (ids of LibriTTS) and seed-tts-eval (`.lst`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dcar.corpus.libritts import LibriTTSIndex, read_transcript
from dcar.corpus.rows import Part, Problem, Row, Utterance, file_stamp, is_file, text_lines
from dcar.errors import DataError


def unicats_parts(list_file: Path, libritts: Path | None) -> list[Part]:
    """Test set B of UniCATS: lines `utterance-id prompt-id`; both are LibriTTS ids, found below `libritts`.

    The list is https://cpdu.github.io/unicats/resources/testsetB_utt2prompt (500 utterances, 37 speakers).
    """
    if libritts is None:
        raise DataError(f"{list_file}: a UniCATS list names LibriTTS utterances; set audio_root to the LibriTTS folder")
    if not list_file.is_file():
        raise DataError(f"{list_file}: not a file; give the list testsetB_utt2prompt")
    if not libritts.is_dir():
        raise DataError(f"{libritts}: there is no such LibriTTS folder; correct audio_root")
    return [Part(list_file.name, partial(_unicats, list_file, LibriTTSIndex(libritts)), file_stamp(list_file))]


def _unicats(list_file: Path, index: LibriTTSIndex) -> Iterator[Row]:
    for line, text, error in text_lines(list_file):
        source = f"{list_file}:{line}"
        fields = text.split()
        if error is not None or len(fields) != 2:
            yield Problem("", source, error or f"{len(fields)} fields, expected: utterance-id prompt-id")
            continue
        try:
            (wav, txt), (prompt_wav, prompt_txt) = map(index.find, fields)
            spoken, prompt_text = read_transcript(txt), read_transcript(prompt_txt)
        except (LookupError, OSError, UnicodeDecodeError) as missing:
            yield Problem(fields[0], source, str(missing))
            continue
        yield Utterance(
            fields[0], spoken, fields[0].split("_")[0], str(wav), split="test", prompt_audio=str(prompt_wav),
            prompt_text=prompt_text, source=source,
        )  # fmt: skip


def seed_tts_parts(list_file: Path) -> list[Part]:
    """seed-tts-eval `meta.lst`: `id|prompt text|prompt wav|text[|wav]`, paths relative to the list.

    Without the fifth field the recording is `wavs/<id>.wav` beside the list, as the published test sets have it.
    """
    if not list_file.is_file():
        raise DataError(f"{list_file}: not a file; give the list (meta.lst) of seed-tts-eval")
    return [Part(list_file.name, partial(_seed_tts, list_file), file_stamp(list_file))]


def _seed_tts(list_file: Path) -> Iterator[Row]:
    folder = list_file.parent
    for line, text, error in text_lines(list_file):
        source = f"{list_file}:{line}"
        fields = [f.strip() for f in text.split("|")]
        if error is not None or len(fields) not in (4, 5):
            yield Problem("", source, error or f"{len(fields)} fields, expected id|prompt text|prompt wav|text[|wav]")
            continue
        name, prompt_text, prompt_wav, spoken = fields[:4]
        if not name or not prompt_wav:
            yield Problem(name, source, "id and prompt wav must not be empty")
            continue
        wav = folder / fields[4] if len(fields) == 5 else folder / "wavs" / f"{name}.wav"
        if not is_file(wav):
            yield Problem(
                name, source, f"utterance {name} has no recording {wav}; the reference rows need it: unpack the "
                "wavs of the test set, or name them in a fifth field"
            )  # fmt: skip
            continue
        yield Utterance(
            name, spoken, Path(prompt_wav).stem, str(wav), split="test", prompt_audio=str(folder / prompt_wav),
            prompt_text=prompt_text, source=source,
        )  # fmt: skip
