"""`dcar score`: any audio and its text, measured: word errors by recognisers, similarity to a prompt, quality.

    dcar score audio=recordings/ recognizers=[moonshine,whisper-base] scorers=[dnsmos]
    dcar score audio=out.wav text="The tide came in." prompt=voice.wav scorers=[resemblyzer,dnsmos]
    dcar score audio=list.jsonl prompt=voice.wav out=scores.jsonl

`audio` is one file, a folder (the text of `a/b.wav` is in `a/b.txt` or `a/b.normalized.txt`, or in `metadata.csv` as
LJSpeech has it), or a list: JSON lines with `audio`, `text` and, if it is not the same for all, `prompt_audio`, paths
relative to the list. Prints one JSON line a file, and a last one with `summary`: corpus WER with its 95 % interval by
recogniser, mean of every scorer and how many were scored.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dcar.audio import load_audio
from dcar.config import check, load_config, setting
from dcar.corpus.folders import read_beside, recordings_in
from dcar.corpus.read import load_corpus
from dcar.corpus.rows import READ
from dcar.errors import ConfigError, DataError, TextError
from dcar.recognition.base import Recognizer
from dcar.recognition.load import load_recognizer
from dcar.storage import json_lines, write_text
from dcar.text.bootstrap import corpus_interval
from dcar.text.wer import NORMALIZER, WordErrors, corpus_wer, word_errors
from dcar.vocoder.base import PromptAudio
from dcar.voices.encoder import SpeakerEncoder
from eval.scorers.load import load_scorers


@dataclass
class ScoreConfig:
    """Settings of `dcar score`."""

    audio: str = setting("", "A file, a folder with transcripts, or a list of JSON lines.")
    text: str = setting("", "What is said, where audio is one file.")
    prompt: str = setting("", "Recording of the voice that similarities compare with.")
    recognizers: list[str] = setting(["moonshine"], "What hears the words, by names that dcar.recognition.load lists; "
                                                    "empty = none.")
    scorers: list[str] = setting(["dnsmos"], "Similarities, qualities, prosody, by names that eval.scorers.load lists.")
    out: str = setting("", "Write the lines to this file too.", place="file")
    batch_size: int = setting(16, "Files that a recogniser hears at once.", minimum=1)
    device: str = setting("cpu", "cpu or cuda.")

    def __post_init__(self) -> None:
        check(self)
        if not self.recognizers and not self.scorers:
            raise ConfigError("recognizers and scorers are both empty: nothing would be measured")


@dataclass(frozen=True)
class Item:
    """A file to be measured; text and prompt are empty where there are none."""

    audio: Path
    text: str
    prompt: str


def items_of(config: ScoreConfig) -> list[Item]:
    """What `audio` names, in order. DataError for what is not there, with the file and what to do."""
    if not config.audio:
        raise ConfigError("audio is not set: give audio=FILE, FOLDER or LIST.jsonl")
    path = Path(config.audio)
    if path.is_dir():
        found = _folder(path, config)
    elif path.suffix.lower() == ".jsonl":
        found = list(_list(path, config))
    else:
        found = [Item(path, config.text, config.prompt)]
    if config.text and (path.is_dir() or path.suffix.lower() == ".jsonl"):
        raise ConfigError("text is what one file says; a folder or a list has its own texts")
    if not found:
        raise DataError(f"{path}: no audio in it ({', '.join(READ)})")
    lost = [str(item.audio) for item in found if not item.audio.is_file()]
    if lost:
        raise DataError(f"{len(lost)} of {len(found)} audio files are not there: {', '.join(lost[:5])}")
    mute = [str(item.audio) for item in found if not item.text.strip()]
    if mute and config.recognizers:
        raise DataError(f"{len(mute)} of {len(found)} files have no text to compare with: {', '.join(mute[:5])}; write "
                        "it into a .txt file of the same name (one file: text=…), or measure without recognisers: "
                        "recognizers=[]")
    return found


def _folder(folder: Path, config: ScoreConfig) -> list[Item]:
    if (folder / "metadata.csv").is_file():
        return [Item(Path(str(u.audio)), u.text, config.prompt) for u in load_corpus("ljspeech", folder)]
    files, texts = recordings_in(folder)
    return [Item(file, read_beside(file, texts), config.prompt) for file in files]


def _list(file: Path, config: ScoreConfig) -> Iterator[Item]:
    if not file.is_file():
        raise DataError(f"{file}: there is no such list")
    for where, row in json_lines(file, "an item of a list", "write objects with audio and text"):
        try:
            audio, text, prompt = row["audio"], row.get("text") or "", row.get("prompt_audio")
            yield Item(file.parent / audio, text, str(file.parent / prompt) if prompt else config.prompt)
        except (KeyError, TypeError) as error:
            raise DataError(f"{where}: not an object with audio and text ({type(error).__name__}: {error})"
                            ) from error


def run(config: ScoreConfig) -> Iterator[dict[str, Any]]:
    """One row a file, then the summary. DataError, ConfigError; AudioError for a file that cannot be heard."""
    items, recordings, encoder = items_of(config), PromptAudio([]), cache(SpeakerEncoder)
    scorers = load_scorers(config.scorers, recordings, config.device)

    @cache
    def voice_of(prompt: str) -> np.ndarray:
        """Its features, by which scorers that compare recordings find it."""
        features = encoder().embed(*load_audio(prompt))
        recordings.add(features, partial(load_audio, prompt))
        return features

    alone = [str(item.audio) for item in items if not item.prompt]
    if alone and (compared := [s.spec for s in scorers.values() if s.kind == "similarity"]):
        raise ConfigError(f"{', '.join(compared)}: similar to whom? give prompt=RECORDING, or prompt_audio in the list "
                          f"({len(alone)} files have none, the first {alone[0]})")
    recognizers = {name: load_recognizer(name, device=config.device) for name in config.recognizers}
    rows: list[dict[str, Any]] = []
    errors: dict[str, list[WordErrors]] = {name: [] for name in recognizers}
    for start in range(0, len(items), config.batch_size):
        batch = items[start : start + config.batch_size]
        sounds = [load_audio(item.audio) for item in batch]
        heard = {name: _hear(recognizer, sounds) for name, recognizer in recognizers.items()}
        for i, (item, (wave, rate)) in enumerate(zip(batch, sounds, strict=True)):
            row: dict[str, Any] = {"audio": str(item.audio), "text": item.text, "seconds": len(wave) / rate}
            for name in recognizers:
                found = _errors(item, heard[name][i])
                errors[name].append(found)
                row.setdefault("heard", {})[name] = heard[name][i]
                row.setdefault("wer", {})[name] = found.rate
            row["scores"] = {name: s(wave, rate, voice_of(item.prompt) if s.kind == "similarity" else np.zeros(0))
                             for name, s in scorers.items()}
            rows.append(row)
            yield row
    yield {"summary": summary(rows, errors, list(scorers))}


def _hear(recognizer: Recognizer, sounds: Sequence[tuple[np.ndarray, int]]) -> list[str]:
    """Transcripts in order; files of one rate are heard together."""
    heard = [""] * len(sounds)
    for rate in sorted({rate for _, rate in sounds}):
        rows = [i for i, (_, own) in enumerate(sounds) if own == rate]
        for i, text in zip(rows, recognizer.transcribe([sounds[i][0] for i in rows], rate), strict=True):
            heard[i] = text
    return heard


def _errors(item: Item, heard: str) -> WordErrors:
    try:
        return word_errors(item.text, heard)
    except TextError as error:
        raise TextError(f"{item.audio}: {error}") from error


def summary(rows: Sequence[dict[str, Any]], errors: dict[str, list[WordErrors]],
            scorers: Sequence[str]) -> dict[str, Any]:
    """Of all rows: corpus WER with interval by recogniser, mean and count by scorer (None where none was scored)."""
    words = {}
    for name, found in errors.items():
        interval = corpus_interval([e.errors for e in found], [e.reference_words for e in found])
        total = corpus_wer(found)
        words[name] = {"wer": total.wer, "ci": [interval.low, interval.high], "S": total.substitutions,
                       "D": total.deletions, "I": total.insertions, "N": total.reference_words}
    scored = {name: [row["scores"][name] for row in rows if row["scores"][name] is not None] for name in scorers}
    return {"files": len(rows), "seconds": math.fsum(row["seconds"] for row in rows), "normalizer": NORMALIZER,
            "recognizers": words, "scorers": {name: {"mean": float(np.mean(v)) if v else None, "n": len(v)}
                                              for name, v in scored.items()}}


def main(arguments: Sequence[str] | None = None) -> None:
    config = load_config(ScoreConfig, arguments)
    lines = []
    # a bar where the lines go elsewhere; a row a file, and the summary
    for row in tqdm(run(config), desc="score", unit="file", total=len(items_of(config)) + 1,
                    disable=True if sys.stdout.isatty() else None):
        lines.append(json.dumps(row, ensure_ascii=False))
        print(lines[-1], flush=True)
    if config.out:
        write_text(config.out, "".join(line + "\n" for line in lines))
