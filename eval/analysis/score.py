"""`dcar score`: measure any audio with its text: word errors by recognisers, similarity to a
prompt, quality.

    dcar score audio=recordings/ recognizers=[moonshine,whisper-base] scorers=[dnsmos]
    dcar score audio=out.wav text="The tide came in." prompt=voice.wav scorers=[resemblyzer,dnsmos]
    dcar score audio=list.jsonl prompt=voice.wav out=scores.jsonl

`audio` is one file, a folder (the text of `a/b.wav` is in `a/b.txt` or `a/b.normalized.txt`, or in
`metadata.csv` as in LJSpeech), or a list: JSON lines with `audio`, `text` and, if it is not the
same for all, `prompt_audio`, with paths relative to the list; `offset` and `duration` (or `start`
and `end`) in seconds select a stretch of a file, as in manifests of NeMo. Prints one JSON line per
file, and a last one with `summary`: corpus WER with its 95 % interval by recogniser, the mean of
every scorer and the number scored.

All files and texts are checked before models are loaded. Those that cannot be measured (silent or
damaged audio, a text without words) are skipped, named in the log and in the summary's `left_out`,
and the exit status is 1.
"""

import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from dcar.audio import load_audio, load_segment
from dcar.config import check, load_config, setting
from dcar.config.commands import DeviceSettings
from dcar.corpus.folders import read_beside, recordings_in
from dcar.corpus.read import load_corpus
from dcar.corpus.rows import READ, BadRow, file_stamp, first_file, stretch_of
from dcar.errors import AudioError, ConfigError, DataError, TextError
from dcar.process import FAILED, claimed, own_device
from dcar.progress import Progress
from dcar.recognition.base import Recognizer, transcripts, unknown_characters
from dcar.recognition.load import load_recognizer
from dcar.storage import append_lines, digest_of, finish_last_line, json_lines, write_text
from dcar.text.bootstrap import corpus_interval
from dcar.text.languages import DEFAULT, error_rate_of, language_of, normalizers_of
from dcar.text.wer import WordErrors, corpus_wer, word_errors
from dcar.vocoder.base import PromptAudio
from dcar.voices.encoder import SpeakerEncoder
from eval.scorers.load import SIMILARITIES, load_scorers

logger = logging.getLogger(__name__)

MIN_SECONDS = 0.1
"""Minimum duration: shorter files contain no word, and recognisers fail on them."""
SHOWN = 20
"""Number of skipped files that the log names; the summary names all."""


@dataclass
class ScoreConfig(DeviceSettings):
    """Settings of `dcar score`."""

    audio: str = setting("", "A file, a folder with transcripts, or a list of JSON lines.")
    text: str = setting("", "Text of the audio, if it is one file.", prose=True)
    language: str = setting(
        DEFAULT,
        "Language of the texts, a code of ISO 639; rows of a list may name theirs as `language`.",
    )
    prompt: str = setting("", "Recording of the voice that similarities compare with.")
    recognizers: list[str] = setting(
        ["moonshine"],
        "Recognisers that transcribe, by names that dcar.recognition.load lists; empty = none.",
    )
    scorers: list[str] = setting(
        ["dnsmos"], "Scorers of similarity and quality, by names that eval.scorers.load lists."
    )
    out: str = setting("", "File to write the lines to as well.", place="file")
    batch_size: int = setting(16, "Number of files transcribed at once.", minimum=1)

    def __post_init__(self) -> None:
        check(self)
        self.language = language_of(self.language).code
        if not self.recognizers and not self.scorers:
            raise ConfigError("recognizers and scorers are both empty: nothing would be measured")


@dataclass(frozen=True)
class Item:
    """File to measure, or a stretch of it; text and prompt may be empty. `fault`: why its text
    cannot be read."""

    audio: Path
    text: str
    prompt: str
    fault: str = ""
    stretch: tuple[float, float] | None = None  # start and duration in seconds
    language: str = ""  # that of the settings

    def load(self) -> tuple[np.ndarray, int]:
        """Return waveform and rate. Raises AudioError."""
        if self.stretch is None:
            return load_audio(self.audio)
        return load_segment(self.audio, *self.stretch)

    @property
    def version(self) -> list[Any]:
        """Paths, contents and text, on which its row depends."""
        prompt = [self.prompt, file_stamp(Path(self.prompt))] if self.prompt else []
        rules = language_of(self.language).normalizer
        return [str(self.audio), file_stamp(self.audio), self.stretch, self.text, rules, *prompt]


def items_of(config: ScoreConfig) -> list[Item]:
    """Return the items that `audio` names, in order. Raises DataError if there are none,
    ConfigError for settings that do not fit together."""
    if not config.audio:
        raise ConfigError("audio is not set: give audio=FILE, FOLDER or LIST.jsonl")
    path = Path(config.audio)
    if path.is_dir():
        items = _folder(path, config)
    elif path.suffix.lower() == ".jsonl":
        items = list(_list(path, config))
    else:
        items = [Item(path, config.text, config.prompt)]
    if config.text and (path.is_dir() or path.suffix.lower() == ".jsonl"):
        raise ConfigError("text is for a single file; a folder or a list has its own texts")
    items = [item if item.language else replace(item, language=config.language) for item in items]
    if not items:
        raise DataError(f"{path}: no audio in it ({', '.join(READ)})")
    return items


def _folder(folder: Path, config: ScoreConfig) -> list[Item]:
    if (folder / "metadata.csv").is_file():
        return [
            Item(Path(str(u.audio)), u.text, config.prompt) for u in load_corpus("ljspeech", folder)
        ]
    files, texts = recordings_in(folder)
    return [_recording(file, texts, config.prompt) for file in files]


def _recording(file: Path, texts: Mapping[str, Path], prompt: str) -> Item:
    try:
        return Item(file, read_beside(file, texts), prompt)
    except UnicodeDecodeError as error:
        return Item(
            file, "", prompt, f"its text is not UTF-8 (byte {error.start + 1}); save it as UTF-8"
        )


def _list(file: Path, config: ScoreConfig) -> Iterator[Item]:
    if not file.is_file():
        raise DataError(f"{file}: there is no such list")
    for where, row in json_lines(file, "an item of a list", "write objects with audio and text"):
        try:
            audio, text, prompt = row["audio"], row.get("text") or "", row.get("prompt_audio")
            if not isinstance(text, str):
                raise TypeError(f"the text is {text!r}")
            part = stretch_of("", row)
            yield Item(
                first_file([file.parent / audio]),
                text,
                str(first_file([file.parent / prompt])) if prompt else config.prompt,
                stretch=None if isinstance(part, str) else (part.start, part.duration),
                language=language_of(row["language"]).code if row.get("language") else "",
            )
        except (BadRow, TextError) as error:
            raise DataError(f"{where}: {error}") from error
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{where}: not an object with audio and text ({type(error).__name__}: {error})"
            ) from error


def measurable(
    items: Sequence[Item], words: bool, voices: bool
) -> tuple[list[Item], list[dict[str, str]]]:
    """Return the items that can be measured, and those that cannot: `audio` and `reason`. All audio
    is decoded.

    words: their texts are compared with transcripts. voices: they are compared with prompts. Raises
    DataError if none is left.
    """
    prompt_fault = cache(_audio_fault)
    sound, left_out = [], []
    for item in items:
        fault = item.fault or _text_fault(item) if words else ""
        fault = fault or _audio_fault(item)
        if voices and not fault:
            fault = (
                prompt_fault(Item(Path(item.prompt), "", ""))
                if item.prompt
                else "give prompt=RECORDING, or prompt_audio in the list"
            )
        if fault:
            left_out.append({"audio": str(item.audio), "reason": fault})
        else:
            sound.append(item)
    named = [
        f"{row['audio']}: {row['reason'].removeprefix(row['audio'] + ': ')}" for row in left_out
    ]
    if not sound:
        raise DataError("\n".join([f"none of {len(items)} files can be measured:", *named[:5]]))
    for name in named[:SHOWN]:
        logger.warning("left out: %s", name)
    if left_out:
        logger.warning(
            "%d of %d files cannot be measured and are left out", len(left_out), len(items)
        )
    return sound, left_out


def _text_fault(item: Item) -> str:
    try:
        word_errors(item.text, "", item.language)
    except TextError:
        return (
            f"no words in its text {item.text!r}; write them into a .txt file of the same name "
            "(one file: text=…), or measure without recognisers: recognizers=[]"
        )
    return ""


def _audio_fault(item: Item) -> str:
    try:
        wave, rate = item.load()
    except AudioError as error:
        return str(error)
    if len(wave) < MIN_SECONDS * rate:
        return f"{item.audio}: lasts {len(wave) / rate:.3f} s; give at least {MIN_SECONDS} s"
    return ""


def run(config: ScoreConfig) -> Iterator[dict[str, Any]]:
    """Return one row per file, then the summary. With `out`, rows are kept in `out`.part as they
    are made, and those of an interrupted run are used again. Raises DataError, ConfigError."""
    items, recordings, encoder = items_of(config), PromptAudio([]), cache(SpeakerEncoder)
    compared = [spec for spec in config.scorers if spec.partition(":")[0] in SIMILARITIES]
    if compared and not any(item.prompt for item in items):
        raise ConfigError(
            f"{', '.join(compared)}: nothing to compare with; give prompt=RECORDING, or "
            "prompt_audio in the list"
        )
    items, left_out = measurable(items, bool(config.recognizers), bool(compared))
    device = own_device(config.device)
    scorers = load_scorers(config.scorers, recordings, device)

    @cache
    def voice_of(prompt: str) -> np.ndarray:
        """Return the voice features by which scorers that compare recordings find a prompt."""
        features = encoder().embed(*load_audio(prompt))
        recordings.add(features, partial(load_audio, prompt))
        return features

    recognizers = {name: load_recognizer(name, device) for name in config.recognizers}
    rows: list[dict[str, Any]] = []
    errors: dict[str, list[WordErrors]] = {name: [] for name in recognizers}
    languages = {item.language for item in items}
    texts = [(item.language, item.text) for item in items]
    for recognizer in recognizers.values():
        # another language is refused now, not after the first files
        if unread := unknown_characters(recognizer, texts):
            logger.warning("%s: they count as errors", unread)
    rate_name = error_rate_of(languages).lower()
    measures = [*(r.name for r in recognizers.values()), *scorers]
    keys = [digest_of([measures, *item.version]) for item in items]
    part = part_of(config.out) if config.out else None
    known = kept_rows(part) if part else {}
    # a bar where the lines go elsewhere
    with Progress(total=len(items), desc="score", unit="file", disable=sys.stdout.isatty()) as bar:
        for start in range(0, len(items), config.batch_size):
            here = range(start, min(start + config.batch_size, len(items)))
            todo = [i for i in here if keys[i] not in known]
            sounds = [items[i].load() for i in todo]
            spoken_in = [items[i].language for i in todo]
            heard = {
                name: _transcripts(recognizer, sounds, spoken_in)
                for name, recognizer in recognizers.items()
            }
            for place, (i, (wave, rate)) in enumerate(zip(todo, sounds, strict=True)):
                known[keys[i]] = {
                    "audio": str(items[i].audio),
                    **stretch_entry(items[i]),
                    "text": items[i].text,
                    "seconds": len(wave) / rate,
                    **said(place, heard),
                    "scores": {
                        name: s(
                            wave,
                            rate,
                            voice_of(items[i].prompt) if s.kind == "similarity" else np.zeros(0),
                        )
                        for name, s in scorers.items()
                    },
                }
            if part:
                append_lines(part, [{"key": keys[i], "row": known[keys[i]]} for i in todo])
            for i in here:
                row = dict(known[keys[i]])
                for name in recognizers:
                    counted = word_errors(
                        items[i].text, row["transcripts"][name], items[i].language
                    )
                    errors[name].append(counted)
                    row.setdefault(error_rate_of({items[i].language}).lower(), {})[name] = (
                        counted.rate
                    )
                row["scores"] = row.pop("scores")  # last
                rows.append(row)
                bar.update()
                yield row
    rules = {"normalizer": normalizers_of(languages)}
    counted_by = {**summary(rows, errors, list(scorers), rate_name), **rules}
    yield {"summary": {**counted_by, "left_out": left_out}}


def stretch_entry(item: Item) -> dict[str, float]:
    """Return the entry of a stretch in its row; nothing for a whole file."""
    return dict(zip(("offset", "duration"), item.stretch or (), strict=False))


def said(place: int, transcripts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the transcripts of one file as an entry of its row, if there are any."""
    if not transcripts:
        return {}
    return {"transcripts": {name: texts[place] for name, texts in transcripts.items()}}


def part_of(out: str) -> Path:
    """Return the file of rows that an interrupted run leaves."""
    return Path(f"{out}.part")


def kept_rows(part: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of an interrupted run by the digest of what they depend on."""
    if not part.exists():
        return {}
    finish_last_line(part)
    lines = json_lines(part, "a measured row", "remove it to measure all files again")
    return {row["key"]: row["row"] for _, row in lines}


def _transcripts(
    recognizer: Recognizer, sounds: Sequence[tuple[np.ndarray, int]], languages: Sequence[str]
) -> list[str]:
    """Return transcripts in order; files of one rate are transcribed together."""
    heard = [""] * len(sounds)
    for rate in sorted({rate for _, rate in sounds}):
        rows = [i for i, (_, own) in enumerate(sounds) if own == rate]
        waves, spoken_in = [sounds[i][0] for i in rows], [languages[i] for i in rows]
        for i, text in zip(rows, transcripts(recognizer, waves, rate, spoken_in), strict=True):
            heard[i] = text
    return heard


def summary(
    rows: Sequence[dict[str, Any]],
    errors: dict[str, list[WordErrors]],
    scorers: Sequence[str],
    rate: str = "wer",
) -> dict[str, Any]:
    """Summarise all rows: corpus error rate, called `rate`, with interval by recogniser (None for
    few files), mean and count by scorer (None if none was scored)."""
    words = {}
    for name, counted in errors.items():
        interval = corpus_interval(
            [e.errors for e in counted], [e.reference_words for e in counted]
        )
        total = corpus_wer(counted)
        words[name] = {
            rate: total.wer,
            "ci": interval.ends,
            "S": total.substitutions,
            "D": total.deletions,
            "I": total.insertions,
            "N": total.reference_words,
        }
    scored = {
        name: [row["scores"][name] for row in rows if row["scores"][name] is not None]
        for name in scorers
    }
    return {
        "files": len(rows),
        "seconds": math.fsum(row["seconds"] for row in rows),
        "recognizers": words,
        "scorers": {
            name: {"mean": float(np.mean(v)) if v else None, "n": len(v)}
            for name, v in scored.items()
        },
    }


CONFIG = ScoreConfig


def main(arguments: Sequence[str] | None = None) -> int:
    config = load_config(CONFIG, arguments)
    with claimed(config.out, resumes=bool(config.out)):
        rows = []
        for row in run(config):
            rows.append(row)
            print(json.dumps(row, ensure_ascii=False), flush=True)
        if config.out:
            write_text(
                config.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            )
            part_of(config.out).unlink()
    return FAILED if rows[-1]["summary"]["left_out"] else 0
