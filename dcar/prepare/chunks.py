"""A corpus as chunks that shards are made of: read whole, or as it is streamed.

`WholeCorpus` is read and checked before anything is tokenised: splits, `limit`, copies, every bad
row first. Process 0 decodes all audio once and leaves its verdict in a file that the others wait
for. Recordings without a text may be heard by a recogniser first; what it heard is kept in a file
that a person can correct.

`StreamedCorpus` (`stream=true`) may be larger than memory or disk. Rows are read one at a time and
cut into chunks by their place in the corpus. Memory holds one chunk; eight bytes an utterance are
kept at the end to find ids that were used twice. Process p of n takes every n-th chunk, or, where
passing over rows costs as much as reading them (a dataset streamed from a hub), every n-th file.
Departures from a corpus that is read whole: bad rows are reported after everything was read; one
without splits is divided by a hash of each sentence, so that the shares of dev and test are met on
average, not exactly.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.corpus.read import (
    AudioSegment,
    Problem,
    Row,
    StoredAudio,
    Utterance,
    corpus_parts,
    describe,
    examine,
    read_corpus,
    validate_corpus,
)
from dcar.errors import AudioError, ConfigError, DataError
from dcar.prepare.prepared import read_json
from dcar.prepare.settings import SPLITS, PrepareConfig, PrepareReport, corpus_record, wait
from dcar.prepare.shards import Chunk, Contents, Job, Loaded
from dcar.process import own_device, workers
from dcar.storage import digest_of, json_lines, write_text
from dcar.tracking import write_json

logger = logging.getLogger(__name__)


class WholeCorpus:
    """The chosen utterances of a corpus, and its bad rows."""

    def __init__(self, config: PrepareConfig, progress: bool, processes: int = 1):
        self.config, self.progress = config, progress
        utterances, self.problems = read_corpus(
            config.corpus,
            corpus_record(config)["path"],
            audio_root=config.audio_root,
            subsets=config.subsets,
        )
        heard = f"{config.out}.transcripts.jsonl" if config.out else ""
        kept = with_transcripts(
            [u for u in utterances if in_range(u, config)],
            config.transcribe,
            heard,
            processes,
            own_device(config.device),
        )
        self.checked, self.filtered = (
            len(utterances) + len(self.problems),
            len(utterances) - len(kept),
        )
        self.chosen = choose(kept, config) if kept else {}
        self.rows = [u for split_rows in self.chosen.values() for u in split_rows]

    def fingerprint(self, head: list) -> str:
        """SHA-256 over everything that decides the result; audio files count by path, size and
        time of change. head: `settings_stamp`."""
        digest = hashlib.sha256(
            json.dumps([head, [str(p) for p in self.problems]], sort_keys=True).encode()
        )
        for u in self.rows:
            digest.update(
                json.dumps(
                    [u.id, u.text, u.speaker, u.split, u.duration, u.prompt_text, u.source]
                ).encode()
            )
            for audio in (u.audio, u.prompt_audio):
                digest.update(_audio_stamp(audio))
        return digest.hexdigest()

    def validate(self) -> list[Problem]:
        """All bad rows."""
        config = self.config
        return self.problems + validate_corpus(
            self.rows,
            config.min_seconds,
            config.max_seconds,
            num_workers=workers(config.num_proc),
            progress=self.progress,
        )

    def begin(self, work: Path, rank: int, done: Callable[[], PrepareReport | None]) -> None:
        """Validate, on process 0, unless that was done in `work`; the others wait, or until the
        result is there. DataError where rows are bad and none may be skipped."""
        verdict = work / "validated.json"
        if rank == 0 and not verdict.exists():
            write_json(verdict, {"problems": [asdict(p) for p in self.validate()]})
        wait(
            lambda: verdict.exists() or done(),
            self.config.wait_seconds,
            f"process 0 to validate ({verdict})",
        )
        if done() is not None:
            return
        try:
            self.problems = [Problem(**p) for p in (read_json(verdict) or {})["problems"]]
        except (KeyError, TypeError):
            verdict.unlink(missing_ok=True)
            raise DataError(
                f"{verdict}: damaged, and removed; run again, the corpus is validated anew"
            ) from None
        if self.problems and not self.config.skip_bad:
            raise DataError(
                f"{len(self.problems)} problems in the {self.config.corpus} corpus; repair them "
                "or set "
                f"skip_bad:\n{describe(self.problems, 100)}"
            )

    def chunks(self, rank: int, world: int) -> list[Chunk]:
        """The chunks of this process: every n-th, of one split each."""
        size = self.config.shard_size
        shards = [
            (split, jobs[start : start + size])
            for split, jobs in self._jobs().items()
            for start in range(0, len(jobs), size)
        ]
        return [
            Chunk(f"{number:06d}", len(jobs), Contents({split: jobs}))
            for number, (split, jobs) in enumerate(shards)
            if number % world == rank
        ]

    def _jobs(self) -> dict[str, list[Job]]:
        """What is to be tokenised, by split: good rows, and copies at other speeds. DataError
        where a split is empty."""
        config = self.config
        bad = {(p.id, p.source) for p in self.problems}
        spoken = Counter(u.speaker for u in self.chosen.get("train", []))
        copied = {
            speaker
            for speaker, n in spoken.items()
            if not config.copies_below or n < config.copies_below
        }
        jobs = {
            split: [
                Job(u, split, speed)
                for speed in (config.speeds if split == "train" else (1.0,))
                for u in rows
                if (u.id, u.source) not in bad and (speed == 1.0 or u.speaker in copied)
            ]
            for split, rows in self.chosen.items()
        }
        twice = [i for i, n in Counter(j.id for js in jobs.values() for j in js).items() if n > 1]
        if twice:  # a copy of A at 0.9 is called A@0.9, and so may an utterance be
            raise DataError(
                f"{len(twice)} ids are used twice, {twice[0]!r} among them, once for a copy at "
                "another "
                "speed; rename the utterances or leave out that speed"
            )
        empty = [split for split, split_jobs in jobs.items() if not split_jobs]
        if empty or not jobs:
            why = [f"{len(self.problems)} are bad"]
            if self.filtered:
                why.append(f"{self.filtered} last longer or shorter than filter_seconds says")
            if {"dev", "test"} & set(empty):
                why.append("dev_fraction and test_fraction say how many are held out")
            raise DataError(
                f"no usable utterance is left in {', '.join(empty) or 'the corpus'}: of "
                f"{self.checked} "
                f"rows {'; '.join(why)}\n{describe(self.problems, 20)}".rstrip()
            )
        return jobs


class StreamedCorpus:
    """The parts of a corpus, none of which was read; what was found in it, its chunks say."""

    checked = filtered = 0
    problems: list[Problem] = []

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
        """SHA-256 over `settings_stamp` and the stamps of the parts (of manifests and lists; the
        files of a folder corpus and of a hub are not looked at one by one)."""
        return digest_of([*head, self.config.path, [[p.name, p.stamp] for p in self.parts]])

    def begin(self, work: Path, rank: int, done: Callable[[], PrepareReport | None]) -> None:
        """There is nothing to do before rows are read."""

    def chunks(self, rank: int, world: int) -> Iterator[Chunk]:
        """The chunks of this process; a name is the place in the corpus, for any number of
        processes."""
        running = 0
        for index, part in enumerate(self.parts):
            if part.costly and index % world != rank:
                continue
            for number, rows in enumerate(_batched(part.rows(), self.config.shard_size)):
                if part.costly or running % world == rank:
                    yield Chunk(
                        f"{index:05d}-{number:07d}", len(rows), partial(self._examined, rows)
                    )
                running += 1

    def _examined(self, rows: list[Row], pool: ThreadPoolExecutor) -> Contents:
        config = self.config
        chosen = [
            (u, split)
            for u in rows
            if isinstance(u, Utterance)
            if (split := split_of(u, config)) in config.splits
        ]
        kept = [(u, split) for u, split in chosen if in_range(u, config)]
        jobs: dict[str, list[Job]] = {split: [] for split in config.splits}
        loaded: dict[str, Loaded] = {}
        problems = [r for r in rows if isinstance(r, Problem)]
        examined = pool.map(
            lambda pair: examine(pair[0], config.min_seconds, config.max_seconds), kept
        )
        for (u, split), (found, audio, prompt) in zip(kept, examined, strict=True):
            problems += found
            if found or audio is None:
                continue
            loaded[u.source] = audio, prompt
            jobs[split] += [
                Job(u, split, speed) for speed in (config.speeds if split == "train" else (1.0,))
            ]
        return Contents(jobs, loaded, problems, len(rows), len(chosen) - len(kept))


def in_range(u: Utterance, config: PrepareConfig) -> bool:
    """Whether `filter_seconds` keeps an utterance; one without a readable duration is kept, for
    validation to name."""
    if not config.filter_seconds or (seconds := u.seconds()) is None:
        return True
    return config.filter_seconds[0] <= seconds <= config.filter_seconds[1]


def sentence(u: Utterance) -> str:
    """The text as corpora without splits are divided by: the same sentence must not stand in two
    splits."""
    return " ".join(u.text.lower().split())


def choose(utterances: list[Utterance], config: PrepareConfig) -> dict[str, list[Utterance]]:
    """Utterances of every wanted split, in corpus order, at most `limit` each.

    A corpus without splits is divided by sentence (never by row: the same sentence must not stand
    in two splits), ordered by a hash of the text, so that the division does not depend on the order
    of the files.
    """
    if all(u.split is None for u in utterances):
        sentences = sorted(
            {sentence(u) for u in utterances}, key=lambda t: hashlib.sha256(t.encode()).digest()
        )
        n = len(sentences)
        fractions = (config.dev_fraction, config.test_fraction)
        dev, test = (max(1, round(f * n)) if f > 0 and n >= 3 else 0 for f in fractions)
        place = {
            t: "dev" if i < dev else "test" if i < dev + test else "train"
            for i, t in enumerate(sentences)
        }
        split_of = [place[sentence(u)] for u in utterances]
    else:
        split_of = [u.split or "train" for u in utterances]
    chosen: dict[str, list[Utterance]] = {s: [] for s in config.splits}
    for u, split in zip(utterances, split_of, strict=True):
        if split in chosen and (config.limit is None or len(chosen[split]) < config.limit):
            chosen[split].append(u)
    if others := Counter(s for s in split_of if s not in (*SPLITS, *chosen)):
        logger.warning(
            "%d rows of other splits than train, dev and test are left out: %s; splits=[…] takes "
            "those that "
            "it names",
            others.total(),
            ", ".join(f"{s} ({n})" for s, n in sorted(others.items())),
        )
    absent = [s for s, rows in chosen.items() if not rows]
    if absent:
        if len(absent) == len(chosen):
            there = ", ".join(sorted(set(split_of))) or "no readable row"
            raise DataError(
                f"none of the splits {', '.join(absent)} is in the corpus (it has {there})"
            )
        logger.warning("the corpus has no split %s; it is left out", ", ".join(absent))
    return {s: rows for s, rows in chosen.items() if rows}


def _audio_stamp(audio: str | bytes | StoredAudio | AudioSegment | None) -> bytes:
    if audio is None:
        return b"-"
    if isinstance(audio, AudioSegment):
        return (
            _audio_stamp(audio.path) + f":{audio.start}:{audio.duration}:{audio.channel}".encode()
        )
    if isinstance(audio, bytes):
        return hashlib.sha256(audio).digest()
    if isinstance(audio, StoredAudio):
        return f"{getattr(audio.rows, '_fingerprint', '')}:{audio.index}".encode()
    stat = Path(audio).stat() if Path(audio).is_file() else None
    return (
        f"{audio}:{stat.st_size}:{stat.st_mtime_ns}".encode()
        if stat
        else f"{audio}:missing".encode()
    )


TRANSCRIBED_TOGETHER = 64
"""Recordings that are read and transcribed together."""


def with_transcripts(
    rows: list[Utterance], recognizer: str, file: str, processes: int, device: str = "cpu"
) -> list[Utterance]:
    """The rows, those without a text with what `recognizer` (a name, "" = none) heard; their source
    says so.

    device: of the recogniser. file: JSON lines with id, text and by, read first and written when
    all were heard; "" = none. What cannot be heard keeps its empty text. ConfigError where several
    processes would listen; DataError for a file that is none.
    """
    if not recognizer or all(u.text.strip() for u in rows):
        return rows
    known = _read_transcripts(Path(file)) if file else {}
    unheard = [u for u in rows if not u.text.strip() and u.id not in known]
    if unheard:
        if processes > 1:
            raise ConfigError(
                f"transcribe: {len(unheard)} recordings are to be heard first; run this in one "
                "process"
            )
        from dcar.recognition.load import load_recognizer

        listener = load_recognizer(recognizer, device)
        with tqdm(desc="transcribe", total=len(unheard), unit="utt") as bar:
            for start in range(0, len(unheard), TRANSCRIBED_TOGETHER):
                batch = unheard[start : start + TRANSCRIBED_TOGETHER]
                waves = {u.id: wave for u in batch if (wave := _sound(u)) is not None}
                texts = listener.transcribe(list(waves.values()), ENCODER_SAMPLE_RATE)
                known |= {
                    id_: {"id": id_, "text": text.strip(), "by": recognizer}
                    for id_, text in zip(waves, texts, strict=True)
                }
                bar.update(len(batch))
        if file:
            write_text(
                file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in known.values())
            )
    logger.info(
        "%d recordings have no text: what %s heard is taken%s",
        sum(not u.text.strip() for u in rows),
        recognizer,
        f"; correct it in {file}" * bool(file),
    )
    return [
        u
        if u.text.strip() or u.id not in known
        else replace(
            u, text=known[u.id]["text"], source=f"{u.source} (transcribed by {known[u.id]['by']})"
        )
        for u in rows
    ]


def _sound(u: Utterance) -> np.ndarray | None:
    """Return the waveform at 16 kHz, None if it cannot be read: validation reports the cause."""
    try:
        return u.load(ENCODER_SAMPLE_RATE)[0]
    except AudioError:
        return None


def _read_transcripts(file: Path) -> dict[str, dict[str, str]]:
    """By id, what was heard."""
    if not file.exists():
        return {}
    fix = "correct it, or remove the file: then the recordings are heard again"
    try:
        return {
            row["id"]: {name: str(row[name]) for name in ("id", "text", "by")}
            for _, row in json_lines(file, "a transcript as this command writes it", fix)
        }
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{file}: not a list of transcripts as this command writes it ({error}); {fix}"
        ) from error


def _batched(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def split_of(u: Utterance, config: PrepareConfig) -> str:
    """The utterance's own split, or one by a hash of its sentence: the same sentence never
    stands in two splits."""
    if u.split is not None:
        return u.split
    share = int.from_bytes(hashlib.sha256(sentence(u).encode()).digest()[:8], "big") / 2**64
    if share < config.dev_fraction:
        return "dev"
    return "test" if share < config.dev_fraction + config.test_fraction else "train"


def repeated_ids(files: Sequence[Path]) -> list[Problem]:
    """Ids that stand in the shards more than once, found by 64-bit hashes; then named by reading
    again."""
    import pyarrow.parquet as pq

    def ids() -> Iterator[str]:
        for file in files:
            yield from pq.read_table(file, columns=["id"])["id"].to_pylist()

    def hashed(name: str) -> int:
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")

    hashes = np.sort(np.fromiter((hashed(i) for i in ids()), dtype=np.uint64))
    twice = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    seen: set[str] = set()
    problems = []
    for name in ids() if twice else ():
        if hashed(name) in twice:
            if name in seen:
                problems.append(
                    Problem(name, name, f"id {name!r} was used before; make ids unique")
                )
            seen.add(name)
    return problems
