"""Corpora: many layouts in, one list (or stream) of utterances out, and every bad row reported with file and line.

| kind | what is at `path` | split comes from |
| --- | --- | --- |
| folder | recordings, `NAME.wav` beside `NAME.txt`; or a table with a header (CSV, TSV) | folder or column, if there |
| starter | the corpus shipped with the project (default), or a folder of parquet files like it | file name |
| ljspeech | folder with `metadata.csv` (`id|text|normalized`) and `wavs/` | lists of ids, if there |
| jsonl | manifest(s): `id, audio, text, speaker[, prompt_audio, prompt_text, split]` | row or file name |
| libritts | `subset/speaker/chapter/*.wav` with `.normalized.txt` beside each (or one subset) | subset |
| libriheavy, lhotse | cut manifest(s), `*.jsonl` or `*.jsonl.gz` | file name |
| unicats | list `utterance-id prompt-id` of LibriTTS ids; `audio_root` is the LibriTTS folder | test |
| seed-tts-eval | `meta.lst`: `id|prompt text|prompt wav|text[|wav]` | test |
| datasets | Hugging Face `save_to_disk` folder, parquet file(s), or hub name (`org/name[:config]`) | split |

Reading never stops at a bad row: `read_corpus` returns utterances and problems, `load_corpus` raises one error that
lists them all, `corpus_parts` gives the pieces of a corpus to be read one row at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from dcar.corpus import cuts, folders, layouts, libritts, lists
from dcar.corpus.checked import checked_rows
from dcar.corpus.huggingface import dataset_parts
from dcar.corpus.rows import AudioSegment, Part, Problem, Row, StoredAudio, Utterance, canonical_split, describe
from dcar.corpus.validate import MIN_PROMPT_SECONDS, validate_corpus
from dcar.errors import DataError
from dcar.sources.shipped import shipped

__all__ = ["KINDS", "MIN_PROMPT_SECONDS", "AudioSegment", "Part", "Problem", "Row", "StoredAudio", "Utterance",
           "canonical_split", "corpus_parts", "describe", "load_corpus", "read_corpus", "validate_corpus"]

KINDS = ("starter", "folder", "ljspeech", "jsonl", "libritts", "libriheavy", "lhotse", "unicats", "seed-tts-eval",
         "datasets")


def corpus_parts(
    kind: str,
    path: str | Path | None = None,
    *,
    audio_root: str | Path | None = None,
    subsets: Sequence[str] = (),
    streaming: bool = False,
) -> list[Part]:
    """The pieces of a corpus in a fixed order; nothing is read before a piece's rows are asked for.

    audio_root: the LibriTTS folder of a `unicats` list; what relative paths of cut manifests are relative to.
    subsets: of `libritts`, all if empty. streaming: do not keep a `datasets` corpus on disk. Raises DataError if the
    corpus as a whole is unusable: unknown kind, no such path, not this layout, a setting that the kind does not have.
    """
    parts = _parts(kind, path, audio_root, subsets, streaming)
    return [replace(part, rows=partial(checked_rows, part.rows, part.name)) for part in parts]


def _parts(
    kind: str, path: str | Path | None, audio_root: str | Path | None, subsets: Sequence[str], streaming: bool
) -> list[Part]:
    if kind not in KINDS:
        raise DataError(f"unknown corpus kind {kind!r}; one of {', '.join(KINDS)}")
    if audio_root is not None and kind not in ("unicats", "libriheavy", "lhotse"):
        raise DataError(f"audio_root is for unicats, libriheavy and lhotse; a {kind} corpus says where its audio is")
    if subsets and kind != "libritts":
        raise DataError(f"subsets are those of libritts, not of a {kind} corpus")
    if kind == "datasets":
        if path is None:
            raise DataError("a corpus of kind 'datasets' needs a path: a save_to_disk folder, parquet, or a hub name")
        return dataset_parts(str(path), streaming)
    if path is None and kind != "starter":
        raise DataError(f"a corpus of kind {kind!r} needs a path")
    root = Path(path) if path is not None else shipped("corpus")
    if not root.exists():
        raise DataError(f"{root}: there is no such {kind} corpus; check the path")
    audio = Path(audio_root) if audio_root is not None else None
    match kind:
        case "starter":
            return layouts.starter_parts(root)
        case "folder":
            return folders.folder_parts(root)
        case "ljspeech":
            return layouts.ljspeech_parts(root)
        case "jsonl":
            return layouts.jsonl_parts(root)
        case "libritts":
            return libritts.libritts_parts(root, subsets)
        case "unicats":
            return lists.unicats_parts(root, audio)
        case "seed-tts-eval":
            return lists.seed_tts_parts(root)
        case _:
            return cuts.cut_parts(root, audio)


def read_corpus(
    kind: str,
    path: str | Path | None = None,
    split: str | None = None,
    *,
    audio_root: str | Path | None = None,
    subsets: Sequence[str] = (),
) -> tuple[list[Utterance], list[Problem]]:
    """All utterances of a corpus (of one split, if given) and the rows that could not be read.

    Raises DataError if the corpus as a whole is unusable (see `corpus_parts`) or empty.
    """
    utterances: list[Utterance] = []
    problems: list[Problem] = []
    for part in corpus_parts(kind, path, audio_root=audio_root, subsets=subsets):
        for row in part.rows():
            if isinstance(row, Problem):
                problems.append(row)
            elif split is None or row.split == split:
                utterances.append(row)
    if not utterances and not problems:
        raise DataError(f"{path or 'the shipped corpus'}: no utterances" + (f" in split {split!r}" if split else ""))
    return utterances, problems


def load_corpus(kind: str, path: str | Path | None = None, split: str | None = None) -> list[Utterance]:
    """Utterances of a corpus; raises DataError listing every row that could not be read."""
    utterances, problems = read_corpus(kind, path, split)
    if problems:
        raise DataError(f"{len(problems)} rows of the {kind} corpus {path} cannot be read:\n{describe(problems, 50)}")
    return utterances
