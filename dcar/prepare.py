"""`dcar prepare`: corpus → validated, phonemised, tokenised datasets on disk, one per split.

The format is in `dcar.prepared`. The whole corpus is validated before anything is tokenised. Work is cut into shards of
`shard_size` utterances; a shard is one parquet file that appears complete or not at all, so an interrupted run
continues after its last shard. Several processes (`accelerate launch`, torchrun, a SLURM array) take every n-th shard
each; the first one assembles the datasets in a hidden folder and renames it, so `out_dir` is always whole. Shards carry
a fingerprint of corpus, tokenizer and settings: nothing stale is ever reused.

With `stream=true` (`dcar.prepare_stream`) rows are checked and tokenised as they are read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dcar.corpus import (
    KINDS,
    AudioSegment,
    Problem,
    StoredAudio,
    Utterance,
    describe,
    read_corpus,
    validate_corpus,
)
from dcar.errors import ConfigError, DataError
from dcar.prepared import (
    FORMAT_VERSION,
    assemble,
    check_out_dir,
    load_prepared,
    prepared_info,
    read_json,
    source_utterances,
    write_json,
)
from dcar.text import PHONEME_VERSION
from dcar.token_shards import Encoder, Job, check_shard, check_tokens, shard_is_there, tokenise, write_shard

if TYPE_CHECKING:
    from dcar.tokenizers import SpeechTokenizer

__all__ = [
    "PrepareConfig",
    "PrepareReport",
    "check_tokens",
    "load_prepared",
    "prepared_info",
    "run",
    "source_utterances",
]

logger = logging.getLogger(__name__)

SPLITS = ("train", "dev", "test")


@dataclass
class PrepareConfig:
    """Settings of `dcar prepare`."""

    out_dir: str = field(metadata={"help": "Folder to write; must be new, empty, or an earlier prepared corpus."})
    corpus: str = field(default="starter", metadata={"help": f"One of {', '.join(KINDS)}."})
    path: str | None = field(default=None, metadata={"help": "Where the corpus is; not needed for starter."})
    audio_root: str | None = field(
        default=None, metadata={"help": "unicats: the LibriTTS folder; lhotse, libriheavy: where audio paths start."}
    )
    subsets: tuple[str, ...] = field(default=(), metadata={"help": "libritts: subsets to read; all if empty."})
    splits: tuple[str, ...] = field(default=SPLITS, metadata={"help": "Splits to prepare."})
    dev_fraction: float = field(
        default=0.05, metadata={"help": "Share of sentences held out for dev where the corpus has no splits."}
    )
    test_fraction: float = field(
        default=0.05, metadata={"help": "Share of sentences held out for test where the corpus has no splits."}
    )
    tokenizer: str = field(
        default="starter", metadata={"help": "Name or folder of the speech tokenizer (starter: the shipped one)."}
    )
    min_seconds: float = field(default=0.3, metadata={"help": "Shorter utterances are bad rows."})
    max_seconds: float = field(default=28.0, metadata={"help": "Longer utterances are bad rows."})
    filter_seconds: tuple[float, ...] = field(
        default=(), metadata={"help": "[3,20] leaves out what is shorter or longer, without calling it a bad row."}
    )
    stream: bool = field(
        default=False,
        metadata={"help": "For corpora larger than memory or disk: rows are checked and tokenised as they are read."},
    )
    validate: bool = field(default=False, metadata={"help": "Only report every bad row; write nothing."})
    skip_bad: bool = field(default=False, metadata={"help": "Go on without the bad rows instead of stopping."})
    limit: int | None = field(default=None, metadata={"help": "At most this many utterances of each split."})
    speeds: tuple[float, ...] = field(
        default=(1.0,),
        metadata={"help": "Copies of the training split at these speeds (resampled: pitch changes, so new speakers)."},
    )
    copies_below: int = field(
        default=0,
        metadata={"help": "Copies only of speakers with fewer training utterances than this; 0 = of all speakers."},
    )
    shard_size: int = field(default=256, metadata={"help": "Utterances tokenised between two saves."})
    batch_seconds: float = field(default=120.0, metadata={"help": "Audio in one tokenizer batch, in seconds."})
    num_proc: int = field(default=1, metadata={"help": "Threads that read and check audio."})
    wait_seconds: float = field(default=3600.0, metadata={"help": "How long to wait for other processes."})

    def __post_init__(self) -> None:
        self.splits, self.speeds = tuple(self.splits), tuple(float(s) for s in self.speeds)
        self.subsets, self.filter_seconds = tuple(self.subsets), tuple(float(s) for s in self.filter_seconds)
        checks = {
            "splits must name at least one split, each once": 0 < len(set(self.splits)) == len(self.splits),
            "speeds must be different and within 0.5…2": 0 < len(set(self.speeds)) == len(self.speeds)
            and all(0.5 <= s <= 2 for s in self.speeds),
            "0 <= min_seconds < max_seconds": 0 <= self.min_seconds < self.max_seconds,
            "dev_fraction and test_fraction must be >= 0, their sum below 1": self.dev_fraction >= 0
            and self.test_fraction >= 0
            and self.dev_fraction + self.test_fraction < 1,
            "filter_seconds must be two durations, the first smaller": not self.filter_seconds
            or (len(self.filter_seconds) == 2 and 0 <= self.filter_seconds[0] < self.filter_seconds[1]),
            "limit counts rows before they are read: set stream=false for it": not (self.stream and self.limit),
            "validate reads the whole corpus: set stream=false for it": not (self.stream and self.validate),
            "limit must be at least 1": self.limit is None or self.limit >= 1,
            "copies_below must not be negative": self.copies_below >= 0,
            "shard_size and num_proc must be at least 1": self.shard_size >= 1 and self.num_proc >= 1,
            "batch_seconds must be positive": self.batch_seconds > 0,
        }
        for rule, holds in checks.items():
            if not holds:
                raise ConfigError(f"prepare: {rule}")


@dataclass(frozen=True)
class Throughput:
    """Audio tokenised by this process in this run, and the time that it took (both in seconds)."""

    audio: float
    wall: float

    @property
    def hours_per_hour(self) -> float:
        """Hours of audio in one hour of one process."""
        return self.audio / self.wall

    def __str__(self) -> str:
        return (
            f"{self.audio / 3600:.3f} h of audio tokenised by this process in {self.wall:.1f} s: "
            f"{self.hours_per_hour:.0f} h of audio per hour"
        )


@dataclass
class PrepareReport:
    """What a run did: `problems` are all bad rows; `counts` per split (empty where only validated)."""

    problems: list[Problem]
    counts: dict[str, dict[str, float]]
    out_dir: Path | None
    checked: int
    filtered: int = 0
    throughput: Throughput | None = None

    @property
    def exit_code(self) -> int:
        """1 where rows are bad and the run was only to validate, else 0."""
        return int(bool(self.problems) and self.out_dir is None)

    def text(self) -> str:
        """The report for a person: counts, then every bad row with file and line."""
        lines = [f"{self.checked} rows checked, {len(self.problems)} problems"]
        if self.filtered:
            lines.append(f"{self.filtered} rows left out by filter_seconds")
        if self.problems:
            lines.append(describe(self.problems))
        lines += [
            f"{split}: {c['utterances']:.0f} utterances, {c['seconds'] / 3600:.2f} h, {c['speakers']:.0f} speakers, "
            f"{c['tokens']:.0f} tokens"
            for split, c in self.counts.items()
        ]
        if self.throughput is not None:
            lines.append(str(self.throughput))
        return "\n".join(lines)


def run(
    config: PrepareConfig,
    *,
    tokenizer: SpeechTokenizer | None = None,
    speaker_encoder: Encoder | None = None,
    process_index: int | None = None,
    num_processes: int | None = None,
    progress: bool = True,
) -> PrepareReport:
    """Prepare a corpus (or, with `config.validate`, report on it). Every process returns when the datasets are there.

    `process_index` and `num_processes` default to RANK and WORLD_SIZE of the launcher. Raises DataError for bad rows
    (unless skip_bad), tokens outside the vocabulary, or an out_dir that holds something else.
    """
    rank = int(os.environ.get("RANK", "0")) if process_index is None else process_index
    world = int(os.environ.get("WORLD_SIZE", "1")) if num_processes is None else num_processes
    if not 0 <= rank < world:
        raise ConfigError(f"prepare: process {rank} of {world}: the index must be below the number of processes")
    progress = progress and rank == 0
    if config.stream:
        from dcar.prepare_stream import run_stream

        return run_stream(config, tokenizer, speaker_encoder, rank, world, progress)
    out = Path(config.out_dir)
    # absolute, so that prepared.json finds the corpus from any folder; a hub name stays as it is
    corpus_path = str(Path(config.path).resolve()) if config.path and Path(config.path).exists() else config.path
    utterances, problems = read_corpus(
        config.corpus, corpus_path, audio_root=config.audio_root, subsets=config.subsets
    )
    checked = len(utterances) + len(problems)
    utterances = [u for u in utterances if in_range(u, config)]
    filtered = checked - len(utterances) - len(problems)
    chosen = _choose(utterances, config) if utterances else {}
    rows = [u for split_rows in chosen.values() for u in split_rows]

    if config.validate:
        problems += _validate(rows, config, progress)
        return PrepareReport(problems, {}, None, checked, filtered)

    check_out_dir(out)
    tokenizer = tokenizer or make_tokenizer(config.tokenizer)
    fingerprint = _fingerprint(config, rows, problems, tokenizer, speaker_encoder)

    def finished() -> PrepareReport | None:
        done = read_json(out / "prepared.json")
        if done is None or done.get("fingerprint") != fingerprint or (done["skipped"] and not config.skip_bad):
            return None
        return PrepareReport([Problem(**p) for p in done["skipped"]], done["counts"], out, checked, filtered)

    if (report := finished()) is not None:
        logger.info("%s: already prepared from the same corpus, tokenizer and settings", out)
        return report

    work = out.parent / f".{out.name}.partial" / fingerprint[:16]
    work.mkdir(parents=True, exist_ok=True)
    verdict = work / "validated.json"
    if rank == 0 and not verdict.exists():
        found = problems + _validate(rows, config, progress)
        write_json(verdict, {"problems": [asdict(p) for p in found]})
    _wait(lambda: verdict.exists() or finished() is not None, config.wait_seconds, f"process 0 to validate ({verdict})")
    if (report := finished()) is not None:
        return report
    problems = [Problem(**p) for p in json.loads(verdict.read_text())["problems"]]
    if problems and not config.skip_bad:
        raise DataError(
            f"{len(problems)} problems in the {config.corpus} corpus; repair them or set skip_bad:\n"
            f"{describe(problems, 100)}"
        )
    bad = {(p.id, p.source) for p in problems}
    spoken = Counter(u.speaker for u in chosen.get("train", []))
    copied = {speaker for speaker, n in spoken.items() if not config.copies_below or n < config.copies_below}
    jobs = {
        split: [
            Job(u, split, speed)
            for speed in (config.speeds if split == "train" else (1.0,))
            for u in split_rows
            if (u.id, u.source) not in bad and (speed == 1.0 or u.speaker in copied)
        ]
        for split, split_rows in chosen.items()
    }
    empty = [split for split, split_jobs in jobs.items() if not split_jobs]
    if empty or not jobs:
        raise DataError(
            f"no usable utterance is left in {', '.join(empty) or 'the corpus'}; {len(problems)} rows are bad:\n"
            f"{describe(problems, 20)}"
        )

    shards = [
        (work / f"{split}-{start // config.shard_size:06d}.parquet", split_jobs[start : start + config.shard_size])
        for split, split_jobs in jobs.items()
        for start in range(0, len(split_jobs), config.shard_size)
    ]
    mine = [(file, js) for i, (file, js) in enumerate(shards) if i % world == rank]
    todo = [(file, js) for file, js in mine if not shard_is_there(file)]
    if len(todo) < len(mine):
        logger.info("%d of %d shards are there from an earlier run", len(mine) - len(todo), len(mine))
    if todo and speaker_encoder is None:
        from dcar.speaker import SpeakerEncoder

        speaker_encoder = SpeakerEncoder()
    started, audio_seconds = time.monotonic(), 0.0
    with (
        tqdm(total=sum(len(js) for _, js in todo), desc="tokenise", unit="utt", disable=not progress) as bar,
        ThreadPoolExecutor(config.num_proc) as pool,
    ):
        for file, shard_jobs in todo:
            assert speaker_encoder is not None
            table = tokenise(
                shard_jobs, tokenizer, speaker_encoder, config.max_seconds, config.batch_seconds, pool, bar
            )
            audio_seconds += write_shard(table, file)["seconds"]
    throughput = Throughput(audio_seconds, time.monotonic() - started) if todo else None

    if rank == 0:
        there = [f for f, _ in shards]
        _wait(lambda: all(map(shard_is_there, there)), config.wait_seconds, f"shards of other processes in {work}")
        for file, _ in shards:
            check_shard(file)
        by_split = {split: [f for f, js in shards if js[0].split == split] for split in jobs}
        made_by = {k: getattr(tokenizer, k) for k in ("name", "checksum", "vocab_size", "rate_hz")}
        record = {
            "fingerprint": fingerprint,
            "corpus": corpus_record(config),
            "tokenizer": {**made_by, "spec": config.tokenizer},
            "config": asdict(config),
            "filtered": filtered,
            "skipped": [asdict(p) for p in problems],
        }
        assemble(out, work, by_split, record)
    else:
        _wait(lambda: finished() is not None, config.wait_seconds, f"process 0 to assemble {out}")
    report = finished()
    assert report is not None
    report.throughput = throughput
    return report


# ------------------------------------------------------------------------------------------------------ what to prepare


def in_range(u: Utterance, config: PrepareConfig) -> bool:
    """Whether `filter_seconds` keeps an utterance; one without a readable duration is kept, for validation to name."""
    if not config.filter_seconds or (seconds := u.seconds()) is None:
        return True
    return config.filter_seconds[0] <= seconds <= config.filter_seconds[1]


def corpus_record(config: PrepareConfig) -> dict[str, Any]:
    """Where the corpus is, for prepared.json: absolute paths (a hub name stays as it is)."""

    def absolute(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path and Path(path).exists() else path

    record: dict[str, Any] = {"kind": config.corpus, "path": absolute(config.path)}
    if config.audio_root is not None:
        record["audio_root"] = absolute(config.audio_root)
    if config.subsets:
        record["subsets"] = list(config.subsets)
    return record


def _choose(utterances: list[Utterance], config: PrepareConfig) -> dict[str, list[Utterance]]:
    """Utterances of every wanted split, in corpus order, at most `limit` each.

    A corpus without splits is divided by sentence (never by row: the same sentence must not stand in two splits),
    ordered by a hash of the text, so that the division does not depend on the order of the files.
    """
    if all(u.split is None for u in utterances):
        sentences = sorted({_sentence(u) for u in utterances}, key=lambda t: hashlib.sha256(t.encode()).digest())
        n = len(sentences)
        fractions = (config.dev_fraction, config.test_fraction)
        dev, test = (max(1, round(f * n)) if f > 0 and n >= 3 else 0 for f in fractions)
        place = {t: "dev" if i < dev else "test" if i < dev + test else "train" for i, t in enumerate(sentences)}
        split_of = [place[_sentence(u)] for u in utterances]
    else:
        split_of = [u.split or "train" for u in utterances]
    chosen: dict[str, list[Utterance]] = {s: [] for s in config.splits}
    for u, split in zip(utterances, split_of, strict=True):
        if split in chosen and (config.limit is None or len(chosen[split]) < config.limit):
            chosen[split].append(u)
    absent = [s for s, rows in chosen.items() if not rows]
    if absent:
        if len(absent) == len(chosen):
            there = ", ".join(sorted(set(split_of))) or "no readable row"
            raise DataError(f"none of the splits {', '.join(absent)} is in the corpus (it has {there})")
        logger.warning("the corpus has no split %s; it is left out", ", ".join(absent))
    return {s: rows for s, rows in chosen.items() if rows}


def make_tokenizer(name_or_dir: str) -> SpeechTokenizer:
    """The tokenizer of a setting; imported here, because its packages are heavy."""
    from dcar.tokenizers import load_tokenizer

    return load_tokenizer(name_or_dir)


def _sentence(u: Utterance) -> str:
    return " ".join(u.text.lower().split())


def _validate(rows: list[Utterance], config: PrepareConfig, progress: bool) -> list[Problem]:
    return validate_corpus(rows, config.min_seconds, config.max_seconds, num_workers=config.num_proc, progress=progress)


def _fingerprint(
    config: PrepareConfig,
    rows: Sequence[Utterance],
    problems: Sequence[Problem],
    tokenizer: SpeechTokenizer,
    speaker_encoder: Encoder | None,
) -> str:
    """SHA-256 over everything that decides the result; audio files count by path, size and time of change."""
    settings = {k: v for k, v in asdict(config).items() if k not in _NOT_IN_FINGERPRINT}
    encoder = getattr(speaker_encoder, "name", type(speaker_encoder).__name__) if speaker_encoder else "default"
    head = [FORMAT_VERSION, settings, tokenizer.name, tokenizer.checksum, PHONEME_VERSION, encoder]
    digest = hashlib.sha256(json.dumps([head, [str(p) for p in problems]], sort_keys=True).encode())
    for u in rows:
        digest.update(json.dumps([u.id, u.text, u.speaker, u.split, u.duration, u.prompt_text, u.source]).encode())
        for audio in (u.audio, u.prompt_audio):
            digest.update(_audio_stamp(audio))
    return digest.hexdigest()


# where, whether and how fast to write; the tokenizer is in by its checksum
_NOT_IN_FINGERPRINT = {
    "out_dir",
    "tokenizer",
    "path",
    "validate",
    "skip_bad",
    "batch_seconds",
    "num_proc",
    "wait_seconds",
}


def _audio_stamp(audio: str | bytes | StoredAudio | AudioSegment | None) -> bytes:
    if audio is None:
        return b"-"
    if isinstance(audio, AudioSegment):
        return _audio_stamp(audio.path) + f":{audio.start}:{audio.duration}:{audio.channel}".encode()
    if isinstance(audio, bytes):
        return hashlib.sha256(audio).digest()
    if isinstance(audio, StoredAudio):
        rows = audio.rows
        return f"{getattr(rows, '_fingerprint', '')}:{audio.index}".encode()
    path = Path(audio)
    stat = path.stat() if path.is_file() else None
    return f"{audio}:{stat.st_size}:{stat.st_mtime_ns}".encode() if stat else f"{audio}:missing".encode()


def _wait(ready: Callable[[], bool], seconds: float, what: str) -> None:
    """Processes meet through files, which works for accelerate, torchrun and independent SLURM tasks alike."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise DataError(f"waited {seconds:g} s for {what}; did that process stop? run again to continue")
        time.sleep(0.05)


def main(arguments: list[str] | None = None) -> int:
    """Command line of `dcar prepare`: prints the report; 1 where `validate=true` found bad rows."""
    from dcar.config import load_config

    report = run(load_config(PrepareConfig, arguments))
    print(report.text())
    return report.exit_code
