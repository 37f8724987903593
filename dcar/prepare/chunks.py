"""Division of a corpus into chunks, from which shards are made: read whole, or streamed.

`WholeCorpus` reads and checks everything before tokenisation: splits, `limit`, copies, all bad
rows. Process 0 decodes all audio once and writes its verdict to a file that the other processes
wait for. Recordings without a text may first be transcribed by a recogniser; the transcripts are
kept in a file that a person can correct.

`StreamedCorpus` (`stream=true`) may be larger than memory or disk. Rows are read one at a time and
grouped into chunks by their place in the corpus. Memory holds one chunk; at the end, all
ids are needed to find repeated ones. Process p of n takes every n-th chunk, or every n-th
file if skipping rows costs as much as reading them (a dataset streamed from a hub). Departures from
a corpus that is read whole: bad rows are reported after everything was read, and a corpus without
splits is divided by a hash of each sentence, so that the shares of dev and test are met on average,
not exactly.
"""

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from textwrap import shorten

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.corpus.read import corpus_parts, examine, read_corpus, validate_corpus
from dcar.corpus.rows import (
    AudioSegment,
    Problem,
    Row,
    StoredAudio,
    Utterance,
    describe,
    file_stamp,
)
from dcar.corpus.texts import CorpusTexts
from dcar.errors import AudioError, ConfigError, DataError
from dcar.prepare.settings import SPLITS, PrepareConfig, PrepareReport, corpus_record, wait
from dcar.prepare.shards import Contents, CorpusPart, Loaded, UtteranceJob
from dcar.process import own_device, workers
from dcar.progress import Progress
from dcar.storage import append_lines, digest_of, finish_last_line, json_lines, write_text
from dcar.tracking import write_json

logger = logging.getLogger(__name__)


class WholeCorpus:
    """Chosen utterances of a corpus, and its bad rows."""

    def __init__(self, config: PrepareConfig, progress: bool, processes: int = 1):
        self.config, self.progress = config, progress
        utterances, self.problems = read_corpus(
            config.corpus,
            corpus_record(config)["path"],
            audio_root=config.audio_root,
            subsets=config.subsets,
        )
        with_text = with_transcripts(
            [u for u in utterances if in_range(u, config)],
            config.recognizer,
            f"{config.out}.transcripts.jsonl" if config.out else "",
            processes,
            own_device(config.device),
        )
        self.checked = len(utterances) + len(self.problems)
        self.filtered = len(utterances) - len(with_text)
        self.chosen = choose(with_text, config) if with_text else {}
        self.rows = [u for split_rows in self.chosen.values() for u in split_rows]

    def fingerprint(self, head: list) -> str:
        """Return the SHA-256 of everything that decides the result; an audio file is represented
        by its path, size and modification time. head: `settings_stamp`."""
        digest = hashlib.sha256(
            json.dumps([head, [str(p) for p in self.problems]], sort_keys=True).encode()
        )
        for u in self.rows:
            digest.update(
                json.dumps(
                    [u.id, u.text, u.speaker, u.split, u.duration, u.prompt_text, u.source]
                    + ([u.language] if u.language else [])
                ).encode()
            )
            for audio in (u.audio, u.prompt_audio):
                digest.update(f"{_path_of(audio)}:{_audio_version(audio)}".encode())
        return digest.hexdigest()

    def validate(self) -> list[Problem]:
        """Decode every chosen recording and return all bad rows."""
        config, texts = self.config, self.config.texts
        texts.note(texts.others(self.rows))
        return self.problems + validate_corpus(
            self.rows,
            config.min_seconds,
            config.max_seconds,
            texts,
            num_workers=workers(config.num_proc),
            progress=self.progress,
        )

    def begin(self, work: Path, rank: int, done: Callable[[], PrepareReport | None]) -> None:
        """Validate the corpus on process 0, unless that was already done in `work`; the other
        processes wait for the verdict, or for the finished result. Raises DataError if there are
        bad rows and skip_bad is false."""
        verdict = work / "validated.json"
        if rank == 0 and not verdict.exists():
            write_json(verdict, {"problems": [asdict(p) for p in self.validate()]})
        wait(
            lambda: verdict.exists() or done(),
            self.config.wait_minutes,
            f"process 0 to validate ({verdict})",
        )
        if done() is not None:
            return
        self.problems = [Problem(**p) for p in json.loads(verdict.read_text())["problems"]]
        if self.problems and not self.config.skip_bad:
            raise DataError(
                f"{len(self.problems)} problems in the {self.config.corpus} corpus; repair them "
                f"or set skip_bad=true:\n{describe(self.problems, 100)}"
            )

    def chunks(self, rank: int, world: int) -> list[CorpusPart]:
        """Return the chunks of this process: every n-th, each with rows of a single split."""
        size = self.config.shard_size
        shards = [
            (split, jobs[start : start + size])
            for split, jobs in self._jobs().items()
            for start in range(0, len(jobs), size)
        ]
        return [
            CorpusPart(f"{number:06d}", len(jobs), Contents({split: jobs}))
            for number, (split, jobs) in enumerate(shards)
            if number % world == rank
        ]

    def _jobs(self) -> dict[str, list[UtteranceJob]]:
        """Return the rows to tokenise, by split: good rows, and copies at other speeds. Raises
        DataError for an empty split or a repeated id."""
        config = self.config
        bad = {(p.id, p.source) for p in self.problems}
        jobs: dict[str, list[UtteranceJob]] = {}
        for split, rows in self.chosen.items():
            good = [u for u in rows if (u.id, u.source) not in bad]
            jobs[split] = [
                UtteranceJob(u, speed) for speed in speeds_of(split, config) for u in good
            ]
        twice = [i for i, n in Counter(j.id for js in jobs.values() for j in js).items() if n > 1]
        if twice:  # a copy of A at 0.9 has the id A@0.9, which an utterance may have as well
            raise DataError(
                f"{len(twice)} ids are used twice, {twice[0]!r} among them, once for a copy at "
                "another speed; rename the utterances or remove that speed from speeds"
            )
        empty = [split for split, split_jobs in jobs.items() if not split_jobs]
        if empty or not jobs:
            why = [f"{len(self.problems)} are bad"]
            if self.filtered:
                why.append(f"{self.filtered} are outside the range of filter_seconds")
            if {"dev", "test"} & set(empty):
                why.append("dev_fraction and test_fraction decide how many are held out")
            raise DataError(
                f"no usable utterance is left in {', '.join(empty) or 'the corpus'}: of "
                f"{self.checked} "
                f"rows {'; '.join(why)}\n{describe(self.problems, 20)}".rstrip()
            )
        return jobs


class StreamedCorpus:
    """Parts of a corpus, none of them read yet; the results of reading are in its chunks."""

    checked = filtered = 0
    problems: Sequence[Problem] = ()

    def __init__(self, config: PrepareConfig):
        self.config = config
        self.parts = corpus_parts(
            config.corpus,
            config.path,
            audio_root=config.audio_root,
            subsets=config.subsets,
            streaming=True,
        )

    def fingerprint(self, head: list) -> str:
        """Return the SHA-256 of `settings_stamp` and of the stamps of the parts (of manifests
        and lists; the files of a folder corpus and of a hub are not examined one by one)."""
        return digest_of([*head, self.config.path, [[p.name, p.stamp] for p in self.parts]])

    def begin(self, work: Path, rank: int, done: Callable[[], PrepareReport | None]) -> None:
        """Do nothing: no row is read in advance."""

    def chunks(self, rank: int, world: int) -> Iterator[CorpusPart]:
        """Yield the chunks of this process. A chunk's name is its place in the corpus, for any
        number of processes."""
        running = 0
        for index, part in enumerate(self.parts):
            if part.costly and index % world != rank:
                continue
            for number, rows in enumerate(_batched(part.rows(), self.config.shard_size)):
                if part.costly or running % world == rank:
                    yield CorpusPart(
                        f"{index:05d}-{number:07d}", len(rows), partial(self._examined, rows)
                    )
                running += 1

    def _examined(self, rows: list[Row], pool: ThreadPoolExecutor) -> Contents:
        config, texts = self.config, self.config.texts
        utterances = [u for u in rows if isinstance(u, Utterance)]
        placed = [(u, split_of(u, config)) for u in utterances]
        chosen = [(u, split) for u, split in placed if split in config.splits]
        in_time = [(u, split) for u, split in chosen if in_range(u, config)]
        jobs: dict[str, list[UtteranceJob]] = {split: [] for split in config.splits}
        loaded: dict[str, Loaded] = {}
        problems = [r for r in rows if isinstance(r, Problem)]
        examined = pool.map(
            lambda pair: examine(pair[0], config.min_seconds, config.max_seconds, texts), in_time
        )
        for (u, split), (fault, audio, prompt) in zip(in_time, examined, strict=True):
            problems += fault
            if fault or audio is None:
                continue
            loaded[u.source] = audio, prompt
            jobs[split] += [UtteranceJob(u, speed) for speed in speeds_of(split, config)]
        others = other_splits((split for _, split in placed), config)
        left_out = len(chosen) - len(in_time)
        strange = texts.others(u for u, _ in in_time)
        return Contents(jobs, loaded, problems, len(rows), left_out, others, strange)


def speeds_of(split: str, config: PrepareConfig) -> tuple[float, ...]:
    """Return the speeds at which a split is tokenised: all of `speeds` for train, 1 for others."""
    return config.speeds if split == "train" else (1.0,)


def in_range(u: Utterance, config: PrepareConfig) -> bool:
    """Return True if `filter_seconds` keeps an utterance. One without a readable duration is
    kept, so that validation reports it."""
    if not config.filter_seconds:
        return True
    seconds = u.seconds()
    return seconds is None or config.filter_seconds[0] <= seconds <= config.filter_seconds[1]


def sentence(u: Utterance, texts: CorpusTexts) -> str:
    """Return the words by which corpora without splits are divided, so that no sentence is in two
    splits, however it is written; the text itself if it has no words."""
    return texts.rules(u).canonical(u.text) or " ".join(u.text.lower().split())


def choose(utterances: list[Utterance], config: PrepareConfig) -> dict[str, list[Utterance]]:
    """Return the utterances of every wanted split, in corpus order, at most `limit` each.

    A corpus without splits is divided by sentence (never by row: no sentence may be in two splits),
    in the order of a hash of the text, so that the division does not depend on the order of the
    files. Raises DataError if the corpus has none of the splits.
    """
    if all(u.split is None for u in utterances):
        sentences = sorted(
            {sentence(u, config.texts) for u in utterances},
            key=lambda t: hashlib.sha256(t.encode()).digest(),
        )
        dev = _held_out(config.dev_fraction, len(sentences))
        test = _held_out(config.test_fraction, len(sentences))
        held_out = dict.fromkeys(sentences[:dev], "dev")
        held_out |= dict.fromkeys(sentences[dev : dev + test], "test")
        splits = [held_out.get(sentence(u, config.texts), "train") for u in utterances]
    else:
        splits = [u.split or "train" for u in utterances]
    chosen: dict[str, list[Utterance]] = {s: [] for s in config.splits}
    for u, split in zip(utterances, splits, strict=True):
        if split in chosen and (not config.limit or len(chosen[split]) < config.limit):
            chosen[split].append(u)
    absent = [s for s, rows in chosen.items() if not rows]
    if len(absent) == len(chosen):
        there = ", ".join(sorted(set(splits))) or "no readable row"
        raise DataError(
            f"none of the splits {', '.join(absent)} is in the corpus (it has {there}); set "
            "splits=[…] to some of these"
        )
    warn_of_splits(other_splits(splits, config), absent)
    return {s: rows for s, rows in chosen.items() if rows}


def other_splits(splits: Iterable[str], config: PrepareConfig) -> Counter[str]:
    """Return the number of rows of splits that are neither prepared nor train, dev or test."""
    return Counter(s for s in splits if s not in (*SPLITS, *config.splits))


def warn_of_splits(others: Counter[str], absent: Sequence[str]) -> None:
    """Log the rows of other splits, which are left out, and the splits without a row."""
    if others:
        logger.warning(
            "%d rows of splits other than train, dev and test are left out: %s; set splits=[…] to "
            "include them",
            others.total(),
            ", ".join(f"{s} ({n})" for s, n in sorted(others.items())),
        )
    if absent:
        logger.warning("the corpus has no split %s; it is left out", ", ".join(absent))


def _held_out(fraction: float, sentences: int) -> int:
    """Return the number of sentences to hold out; none if there are fewer than three."""
    if fraction == 0 or sentences < 3:
        return 0
    return max(1, round(fraction * sentences))


def _path_of(audio: str | bytes | StoredAudio | AudioSegment | None) -> str | None:
    """Return the path of a recording in a file of its own, or of which it is a part."""
    path = audio.path if isinstance(audio, AudioSegment) else audio
    return path if isinstance(path, str) else None


def _audio_version(audio: str | bytes | StoredAudio | AudioSegment | None) -> str:
    """Return what changes with a recording, wherever it lies: size and time of a file, its stretch
    of it, the digest of bytes, or the fingerprint of a dataset with the row; "" for None."""
    if audio is None:
        return ""
    if isinstance(audio, AudioSegment):
        return f"{_audio_version(audio.path)}:{audio.start}:{audio.duration}:{audio.channel}"
    if isinstance(audio, bytes):
        return hashlib.sha256(audio).hexdigest()
    if isinstance(audio, StoredAudio):
        return f"{getattr(audio.rows, '_fingerprint', '')}:{audio.index}"
    return file_stamp(Path(audio)) if Path(audio).is_file() else "missing"


TRANSCRIBED_TOGETHER = 64
"""Number of recordings that are read and transcribed together."""


def with_transcripts(
    rows: list[Utterance], recognizer: str, file: str, processes: int, device: str = "cpu"
) -> list[Utterance]:
    """Return the rows; those without a text get the transcript of `recognizer` (a name, "" = none),
    and their source says so.

    device: device of the recogniser. file: JSON lines with id, text, by and audio (size and time
    of the recording), read first, to which transcripts are appended as they are made; "" = none. A
    recording that changed since is transcribed again; otherwise its line may be corrected, and is
    used whichever recogniser made it. Recordings that cannot be read keep their empty text. Raises
    ConfigError if several processes would transcribe, DataError for a malformed file.
    """
    untold = [u for u in rows if not u.text.strip()]
    if not recognizer or not untold:
        return rows
    transcripts = _read_transcripts(Path(file)) if file else {}
    missing = [
        u for u in untold if transcripts.get(u.id, {}).get("audio") != _audio_version(u.audio)
    ]
    if missing:
        if processes > 1:
            raise ConfigError(
                f"recognizer: {len(missing)} recordings must be transcribed first; run dcar "
                "prepare once in a single process"
            )
        changed = [transcripts.pop(u.id)["id"] for u in missing if u.id in transcripts]
        if changed:
            logger.warning(
                "recordings that changed after their transcription are transcribed again (%d): %s",
                len(changed),
                shorten(", ".join(changed), 200),
            )
        for made in _transcribe(missing, recognizer, device):
            transcripts |= {row["id"]: row for row in made}
            if file:
                append_lines(Path(file), made)
        if file:  # one line each
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in transcripts.values()]
            write_text(file, "".join(lines))
    by = Counter(transcripts[u.id]["by"] for u in untold if u.id in transcripts)
    logger.info(
        "%d recordings have no text; transcripts by %s are used%s",
        len(untold),
        ", ".join(f"{name} ({count})" for name, count in sorted(by.items())) or recognizer,
        f"; correct them in {file}, or remove it to transcribe all of them again" if file else "",
    )
    return [_with_text(u, transcripts) for u in rows]


def _transcribe(
    rows: Sequence[Utterance], name: str, device: str
) -> Iterator[list[dict[str, str]]]:
    """Yield the transcripts of readable recordings in parts, made by the recogniser `name`."""
    from dcar.recognition.load import load_recognizer

    recognizer = load_recognizer(name, device)
    with Progress(desc="transcribe", total=len(rows), unit="utt") as bar:
        for start in range(0, len(rows), TRANSCRIBED_TOGETHER):
            batch = rows[start : start + TRANSCRIBED_TOGETHER]
            versions = {u.id: _audio_version(u.audio) for u in batch}
            waves = {u.id: wave for u in batch if (wave := _sound(u)) is not None}
            texts = recognizer.transcribe(list(waves.values()), ENCODER_SAMPLE_RATE)
            yield [
                {"id": i, "text": text.strip(), "by": name, "audio": versions[i]}
                for i, text in zip(waves, texts, strict=True)
            ]
            bar.update(len(batch))


def _with_text(u: Utterance, transcripts: Mapping[str, Mapping[str, str]]) -> Utterance:
    """Return an utterance with its transcript, if it lacks a text and has one."""
    if u.text.strip() or u.id not in transcripts:
        return u
    transcript = transcripts[u.id]
    return replace(
        u, text=transcript["text"], source=f"{u.source} (transcribed by {transcript['by']})"
    )


def _sound(u: Utterance) -> np.ndarray | None:
    """Return the waveform at 16 kHz, or None if it cannot be read: validation reports the cause."""
    try:
        return u.load(ENCODER_SAMPLE_RATE)[0]
    except AudioError:
        return None


def _read_transcripts(file: Path) -> dict[str, dict[str, str]]:
    """Return the transcripts in a file by id; none if the file does not exist."""
    if not file.exists():
        return {}
    finish_last_line(file)
    fix = "correct it, or remove the file to transcribe the recordings again"
    try:
        return {
            row["id"]: {name: str(row[name]) for name in ("id", "text", "by", "audio")}
            for _, row in json_lines(file, "a transcript as dcar prepare writes it", fix)
        }
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{file}: not a list of transcripts as dcar prepare writes it ({error}); {fix}"
        ) from error


def _batched(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def split_of(u: Utterance, config: PrepareConfig) -> str:
    """Return the utterance's own split, or one by a hash of its sentence: no sentence is ever in
    two splits."""
    if u.split is not None:
        return u.split
    words = sentence(u, config.texts)
    share = int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") / 2**64
    if share < config.dev_fraction:
        return "dev"
    return "test" if share < config.dev_fraction + config.test_fraction else "train"


def repeated_ids(files: Sequence[Path]) -> list[Problem]:
    """Return the ids that occur more than once in the shards."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    ids = pa.concat_tables([pq.read_table(file, columns=["id"]) for file in files])["id"]
    counts = pc.value_counts(ids)
    twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
    return [Problem(i, i, f"id {i!r} was used before; make ids unique") for i in twice]
