"""`dcar prepare`: corpus → validated, phonemised, tokenised datasets on disk, one per split.

The format is in `prepared.py`. The whole corpus is validated before anything is tokenised. Work is cut into shards of
`shard_size` utterances, each one parquet file that appears complete or not at all: an interrupted run continues after
its last shard. Several processes take every n-th shard each; the first one assembles the datasets in a hidden folder
and renames it. Shards carry a fingerprint of corpus, tokenizer and settings: nothing stale is ever reused.

With `stream=true` (`dcar.prepare.stream`) rows are checked and tokenised as they are read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from dcar.config import load_config
from dcar.corpus.read import AudioSegment, Problem, StoredAudio, Utterance, describe, read_corpus, validate_corpus
from dcar.errors import ConfigError, DataError
from dcar.prepare.prepared import (
    assemble,
    check_out_dir,
    clean_up,
    load_prepared,
    partial_folder,
    prepared_info,
    read_json,
    source_utterances,
)
from dcar.prepare.settings import (
    PrepareConfig,
    PrepareReport,
    Throughput,
    corpus_record,
    finished,
    in_range,
    make_speaker_encoder,
    make_tokenizer,
    prepared_record,
    sentence,
    settings_stamp,
    wait,
)
from dcar.prepare.shards import Encoder, Job, check_shard, check_tokens, shard_is_there, tokenise, write_shard
from dcar.prepare.transcripts import with_transcripts
from dcar.tracking import write_json

if TYPE_CHECKING:
    from dcar.tokens.base import SpeechTokenizer

__all__ = ["PrepareConfig", "PrepareReport", "check_tokens", "load_prepared", "prepared_info", "run",
           "source_utterances"]

logger = logging.getLogger(__name__)


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
    (unless skip_bad), tokens outside the vocabulary, or an out that holds something else.
    """
    rank = int(os.environ.get("RANK", "0")) if process_index is None else process_index
    world = int(os.environ.get("WORLD_SIZE", "1")) if num_processes is None else num_processes
    if not 0 <= rank < world:
        raise ConfigError(f"prepare: process {rank} of {world}: the index must be below the number of processes")
    progress = progress and rank == 0
    if config.stream:
        from dcar.prepare.stream import run_stream

        return run_stream(config, tokenizer, speaker_encoder, rank, world, progress)
    rows, problems, checked = _read(config)
    rows = with_transcripts(rows, config.transcribe, f"{config.out}.transcripts.jsonl" if config.out else "", world)
    filtered = checked - len(rows) - len(problems)
    chosen = _choose(rows, config) if rows else {}
    rows = [u for split_rows in chosen.values() for u in split_rows]
    if config.validate:
        return PrepareReport(problems + _validate(rows, config, progress), {}, None, checked, filtered)

    out = Path(config.out)
    check_out_dir(out)
    tokenizer = tokenizer or make_tokenizer(config.tokenizer)
    fingerprint = _fingerprint(config, rows, problems, tokenizer, speaker_encoder)

    def done() -> PrepareReport | None:
        return finished(config, fingerprint, checked, filtered)

    if (report := done()) is not None:
        logger.info("%s: already prepared from the same corpus, tokenizer and settings", out)
        if rank == 0:
            clean_up(out)
        return report
    work = partial_folder(out) / fingerprint[:16]
    work.mkdir(parents=True, exist_ok=True)
    verdict = work / "validated.json"
    if rank == 0 and not verdict.exists():
        write_json(verdict, {"problems": [asdict(p) for p in problems + _validate(rows, config, progress)]})
    wait(lambda: verdict.exists() or done() is not None, config.wait_seconds, f"process 0 to validate ({verdict})")
    if (report := done()) is not None:
        return report
    problems = _accepted(verdict, config)
    jobs = _jobs(chosen, problems, config, checked, filtered)
    shards = {split: {work / f"{split}-{start // config.shard_size:06d}.parquet": js[start : start + config.shard_size]
                      for start in range(0, len(js), config.shard_size)} for split, js in jobs.items()}
    files = {file: shard_jobs for split in shards.values() for file, shard_jobs in split.items()}
    mine = dict(list(files.items())[rank::world])
    throughput = _write_shards(mine, config, tokenizer, speaker_encoder, progress)
    if rank == 0:
        wait(lambda: all(map(shard_is_there, files)), config.wait_seconds, f"shards of other processes in {work}")
        for file in files:
            check_shard(file)
        record = prepared_record(config, tokenizer, fingerprint, problems, checked, filtered)
        assemble(out, work, {split: list(of_split) for split, of_split in shards.items()}, record, config.compress)
    wait(lambda: done() is not None, config.wait_seconds, f"process 0 to assemble {out}")
    report = done()
    assert report is not None
    report.throughput = throughput
    return report


def _read(config: PrepareConfig) -> tuple[list[Utterance], list[Problem], int]:
    """Utterances that `filter_seconds` keeps, bad rows, and the number of all rows."""
    utterances, problems = read_corpus(
        config.corpus, corpus_record(config)["path"], audio_root=config.audio_root, subsets=config.subsets
    )
    return [u for u in utterances if in_range(u, config)], problems, len(utterances) + len(problems)


def _accepted(verdict: Path, config: PrepareConfig) -> list[Problem]:
    """The bad rows that process 0 found; DataError where there are some and none may be skipped."""
    try:
        problems = [Problem(**p) for p in (read_json(verdict) or {})["problems"]]
    except (KeyError, TypeError):
        verdict.unlink(missing_ok=True)
        raise DataError(f"{verdict}: damaged, and removed; run again, the corpus is validated anew") from None
    if problems and not config.skip_bad:
        raise DataError(
            f"{len(problems)} problems in the {config.corpus} corpus; repair them or set skip_bad:\n"
            f"{describe(problems, 100)}"
        )
    return problems


def _jobs(
    chosen: dict[str, list[Utterance]], problems: list[Problem], config: PrepareConfig, checked: int, filtered: int
) -> dict[str, list[Job]]:
    """What is to be tokenised, by split: good rows, and copies at other speeds. DataError where a split is empty."""
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
    twice = [i for i, n in Counter(j.id for js in jobs.values() for j in js).items() if n > 1]
    if twice:  # a copy of A at 0.9 is called A@0.9, and so may an utterance be
        raise DataError(f"{len(twice)} ids are used twice, {twice[0]!r} among them, once for a copy at another speed; "
                        "rename the utterances or leave out that speed")
    empty = [split for split, split_jobs in jobs.items() if not split_jobs]
    if empty or not jobs:
        why = [f"{len(problems)} are bad"]
        if filtered:
            why.append(f"{filtered} last longer or shorter than filter_seconds says")
        if {"dev", "test"} & set(empty):
            why.append("dev_fraction and test_fraction say how many are held out")
        raise DataError(
            f"no usable utterance is left in {', '.join(empty) or 'the corpus'}: of {checked} rows {'; '.join(why)}\n"
            f"{describe(problems, 20)}".rstrip()
        )
    return jobs


def _write_shards(
    shards: dict[Path, list[Job]], config: PrepareConfig, tokenizer: SpeechTokenizer, speaker_encoder: Encoder | None,
    progress: bool,
) -> Throughput | None:
    """Make the shards that are not there yet; how fast that went, None if there was nothing to do."""
    todo = {file: jobs for file, jobs in shards.items() if not shard_is_there(file)}
    if len(todo) < len(shards):
        logger.info("%d of %d shards are there from an earlier run", len(shards) - len(todo), len(shards))
    if not todo:
        return None
    encoder = speaker_encoder or make_speaker_encoder()
    started, seconds = time.monotonic(), 0.0
    with (
        tqdm(total=sum(map(len, todo.values())), desc="tokenise", unit="utt", disable=not progress) as bar,
        ThreadPoolExecutor(config.num_proc) as pool,
    ):
        for file, jobs in todo.items():
            table = tokenise(jobs, tokenizer, encoder, config.max_seconds, config.batch_seconds, pool, bar)
            seconds += write_shard(table, file)["seconds"]
    return Throughput(seconds, time.monotonic() - started)


def _choose(utterances: list[Utterance], config: PrepareConfig) -> dict[str, list[Utterance]]:
    """Utterances of every wanted split, in corpus order, at most `limit` each.

    A corpus without splits is divided by sentence (never by row: the same sentence must not stand in two splits),
    ordered by a hash of the text, so that the division does not depend on the order of the files.
    """
    if all(u.split is None for u in utterances):
        sentences = sorted({sentence(u) for u in utterances}, key=lambda t: hashlib.sha256(t.encode()).digest())
        n = len(sentences)
        fractions = (config.dev_fraction, config.test_fraction)
        dev, test = (max(1, round(f * n)) if f > 0 and n >= 3 else 0 for f in fractions)
        place = {t: "dev" if i < dev else "test" if i < dev + test else "train" for i, t in enumerate(sentences)}
        split_of = [place[sentence(u)] for u in utterances]
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
    head = settings_stamp(config, tokenizer, speaker_encoder)
    digest = hashlib.sha256(json.dumps([head, [str(p) for p in problems]], sort_keys=True).encode())
    for u in rows:
        digest.update(json.dumps([u.id, u.text, u.speaker, u.split, u.duration, u.prompt_text, u.source]).encode())
        for audio in (u.audio, u.prompt_audio):
            digest.update(_audio_stamp(audio))
    return digest.hexdigest()


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


def main(arguments: list[str] | None = None) -> int:
    """Command line of `dcar prepare`: prints the report; 1 where `validate=true` found bad rows."""
    report = run(load_config(PrepareConfig, arguments))
    print(report.text())
    return report.exit_code
