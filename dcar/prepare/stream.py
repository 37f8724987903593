"""`dcar prepare stream=true`: corpora larger than memory or disk, checked and tokenised as they are read.

Rows are read one at a time, cut into chunks of `shard_size` by their place in the corpus, and every chunk is checked
(its audio decoded once), tokenised and written as token shards. Memory holds one chunk; eight bytes an utterance are
kept at the end to find ids that were used twice. Process p of n takes every n-th chunk, or, where passing over rows
costs as much as reading them (a dataset streamed from a hub), every n-th file. The shards do not depend on the number
of processes. Process 0 waits for the others and assembles; the others return when their own shards are written.

Departures from the plain way: bad rows are reported after everything was read; a corpus without splits is divided by a
hash of each sentence, so that the shares of dev and test are met on average, not exactly.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from tqdm import tqdm

from dcar.corpus.read import Part, Problem, Row, Utterance, corpus_parts, describe
from dcar.corpus.validate import examine
from dcar.errors import DataError
from dcar.prepare.prepared import assemble, check_out_dir, clean_up, partial_folder, read_json
from dcar.prepare.settings import (
    PrepareConfig,
    PrepareReport,
    Throughput,
    finished,
    in_range,
    make_speaker_encoder,
    make_tokenizer,
    prepared_record,
    sentence,
    settings_stamp,
    wait,
)
from dcar.prepare.shards import Encoder, Job, Loaded, Sound, check_shard, shard_is_there, tokenise, write_shard
from dcar.tracking import write_json

if TYPE_CHECKING:
    from dcar.tokens.base import SpeechTokenizer


def run_stream(
    config: PrepareConfig,
    tokenizer: SpeechTokenizer | None,
    speaker_encoder: Encoder | None,
    rank: int,
    world: int,
    progress: bool,
) -> PrepareReport:
    """See the module docstring; called by `dcar.prepare.run.run`. Raises DataError as that does."""
    out = Path(config.out)
    check_out_dir(out)
    parts = corpus_parts(
        config.corpus, config.path, audio_root=config.audio_root, subsets=config.subsets, streaming=True
    )
    tokenizer = tokenizer or make_tokenizer(config.tokenizer)
    fingerprint = _fingerprint(config, parts, tokenizer, speaker_encoder)
    if (report := finished(config, fingerprint)) is not None:
        if rank == 0:
            clean_up(out)
        return report
    work = partial_folder(out) / fingerprint[:16]
    work.mkdir(parents=True, exist_ok=True)
    worker = _Worker(config, work, tokenizer, speaker_encoder)
    started, chunks = time.monotonic(), []
    with tqdm(desc="tokenise", unit="utt", disable=not progress) as bar, ThreadPoolExecutor(config.num_proc) as pool:
        for name, rows in _chunks(parts, config.shard_size, rank, world):
            chunks.append(name)
            if not worker.is_done(name):
                worker.run(name, rows, pool, bar)
    throughput = Throughput(worker.audio_seconds, time.monotonic() - started) if worker.audio_seconds else None
    write_json(work / f"done-{rank}-of-{world}.json", {"chunks": chunks})
    if rank != 0:
        return PrepareReport([], {}, None, worker.checked, worker.filtered, throughput)

    done = [work / f"done-{r}-of-{world}.json" for r in range(world)]
    wait(lambda: all(f.exists() for f in done), config.wait_seconds, f"the other processes in {work}")
    names = sorted(itertools.chain.from_iterable(json.loads(f.read_text())["chunks"] for f in done))
    report = _assemble(config, out, work, names, tokenizer, fingerprint)
    report.throughput = throughput
    return report


def _chunks(parts: Sequence[Part], size: int, rank: int, world: int) -> Iterator[tuple[str, list[Row]]]:
    """(name, rows) of the chunks of this process; a name is the place in the corpus, for any number of processes."""
    running = 0
    for index, part in enumerate(parts):
        if part.costly and index % world != rank:
            continue
        for number, rows in enumerate(_batched(part.rows(), size)):
            if part.costly or running % world == rank:
                yield f"{index:05d}-{number:07d}", rows
            running += 1


def _batched(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


class _Worker:
    """Makes the shards of a chunk: one parquet file a split, and a record of what became of the chunk's rows."""

    def __init__(
        self, config: PrepareConfig, work: Path, tokenizer: SpeechTokenizer, speaker_encoder: Encoder | None
    ) -> None:
        self.config, self.work, self.tokenizer = config, work, tokenizer
        self._speaker_encoder = speaker_encoder
        self.audio_seconds, self.checked, self.filtered = 0.0, 0, 0

    @functools.cached_property
    def speaker_encoder(self) -> Encoder:
        return self._speaker_encoder or make_speaker_encoder()

    def is_done(self, name: str) -> bool:
        record = read_json(self.work / f"chunk-{name}.json")
        return is_chunk(record) and all(shard_is_there(self.work / f) for f in record["shards"].values())

    def run(self, name: str, rows: list[Row], pool: ThreadPoolExecutor, bar: Any) -> None:
        config = self.config
        problems = [r for r in rows if isinstance(r, Problem)]
        chosen = [(u, split) for u in rows if isinstance(u, Utterance)
                  if (split := split_of(u, config)) in config.splits]  # fmt: skip
        kept = [(u, split) for u, split in chosen if in_range(u, config)]
        jobs: dict[str, list[Job]] = {split: [] for split in config.splits}
        loaded: dict[str, Loaded] = {}
        examined = pool.map(lambda pair: examine(pair[0], config.min_seconds, config.max_seconds), kept)
        for (u, split), (found, audio, prompt) in zip(kept, examined, strict=True):
            problems += found
            if found or audio is None:
                continue
            loaded[u.source] = Loaded(Sound(*audio), None if prompt is None else Sound(*prompt))
            jobs[split] += [Job(u, split, speed) for speed in (config.speeds if split == "train" else (1.0,))]
        shards, seconds = {}, 0.0
        for split, split_jobs in jobs.items():
            if split_jobs:
                table = tokenise(
                    split_jobs, self.tokenizer, self.speaker_encoder, config.max_seconds, config.batch_seconds, pool,
                    bar, loaded,
                )  # fmt: skip
                file = self.work / f"{split}-{name}.parquet"
                seconds += write_shard(table, file)["seconds"]
                shards[split] = file.name
        self.checked += len(rows)
        self.filtered += len(chosen) - len(kept)
        self.audio_seconds += seconds
        write_json(
            self.work / f"chunk-{name}.json",
            {"shards": shards, "rows": len(rows), "filtered": len(chosen) - len(kept),
             "problems": [asdict(p) for p in problems]},
        )  # fmt: skip


def is_chunk(record: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Whether a chunk's record is as `_Worker.run` writes it."""
    kinds = {"shards": dict, "rows": int, "filtered": int, "problems": list}
    return record is not None and all(isinstance(record.get(name), kind) for name, kind in kinds.items())


def split_of(u: Utterance, config: PrepareConfig) -> str:
    """The utterance's own split, or one by a hash of its sentence: the same sentence never stands in two splits."""
    if u.split is not None:
        return u.split
    share = int.from_bytes(hashlib.sha256(sentence(u).encode()).digest()[:8], "big") / 2**64
    if share < config.dev_fraction:
        return "dev"
    return "test" if share < config.dev_fraction + config.test_fraction else "train"


def _assemble(
    config: PrepareConfig, out: Path, work: Path, names: list[str], tokenizer: SpeechTokenizer, fingerprint: str
) -> PrepareReport:
    shards: dict[str, list[Path]] = {split: [] for split in config.splits}
    problems: list[Problem] = []
    checked = filtered = 0
    for name in names:
        record = read_json(work / f"chunk-{name}.json")
        if not is_chunk(record):
            raise DataError(f"{work}/chunk-{name}.json is missing or broken; run again, only its shards are made anew")
        for split, file in record["shards"].items():
            check_shard(work / file)
            shards[split].append(work / file)
        problems += [Problem(**p) for p in record["problems"]]
        checked, filtered = checked + record["rows"], filtered + record["filtered"]
    problems += _repeated_ids([f for files in shards.values() for f in files])
    repeated = [p for p in problems if p.message.startswith("id ")]
    if repeated:  # their rows are in the shards already, so they cannot be left out
        raise DataError(f"{len(repeated)} ids are used twice; make them unique:\n{describe(repeated, 100)}")
    if problems and not config.skip_bad:
        raise DataError(
            f"{len(problems)} problems in the {config.corpus} corpus; repair them or set skip_bad (shards are kept):\n"
            f"{describe(problems, 100)}"
        )
    shards = {split: files for split, files in shards.items() if files}
    if not shards:
        raise DataError(f"no usable utterance in the splits {', '.join(config.splits)}; {len(problems)} rows are bad")
    record = prepared_record(config, tokenizer, fingerprint, problems, checked, filtered)
    assemble(out, work, shards, record, config.compress)
    report = finished(config, fingerprint)
    assert report is not None
    return report


def _repeated_ids(files: Sequence[Path]) -> list[Problem]:
    """Ids that stand in the shards more than once, found by 64-bit hashes; then named by reading again."""
    import pyarrow.parquet as pq

    def ids() -> Iterator[str]:
        for file in files:
            yield from pq.read_table(file, columns=["id"])["id"].to_pylist()

    def hashed(name: str) -> int:
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")

    hashes = np.sort(np.fromiter((hashed(i) for i in ids()), dtype=np.uint64))
    twice = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not twice:
        return []
    seen: set[str] = set()
    problems = []
    for name in ids():
        if hashed(name) in twice:
            if name in seen:
                problems.append(Problem(name, name, f"id {name!r} was used before; make ids unique"))
            seen.add(name)
    return problems


def _fingerprint(
    config: PrepareConfig, parts: Sequence[Part], tokenizer: SpeechTokenizer, speaker_encoder: Encoder | None
) -> str:
    """SHA-256 over settings, tokenizer and the stamps of the corpus' parts (of manifests and lists; the files of a
    folder corpus and of a hub are not looked at one by one)."""
    stamps = [[p.name, p.stamp] for p in parts]
    value = [*settings_stamp(config, tokenizer, speaker_encoder), config.path, stamps]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
