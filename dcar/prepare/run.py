"""`dcar prepare`: corpus → validated, phonemised, tokenised datasets on disk, one per split.

The format is described in `prepared.py`. A corpus yields chunks of `shard_size` utterances
(`chunks.py`): it is read and validated whole, or, with `stream=true`, while it is read. Each chunk
gives one parquet file per split and a record of its rows, each written completely or not at all, so
an interrupted run continues after its last chunk. Processes share the chunks; the first one waits
for the others, assembles the datasets in a hidden folder and renames it. Intermediate files carry a
fingerprint of corpus, tokenizer and settings: nothing stale is ever reused, and nothing depends on
the number of processes.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcar.config import load_config
from dcar.corpus.rows import Problem, describe
from dcar.errors import ConfigError, DataError
from dcar.prepare.chunks import StreamedCorpus, WholeCorpus, repeated_ids, warn_of_splits
from dcar.prepare.prepared import assemble, check_out_dir, clean_up, partial_folder, read_json
from dcar.prepare.settings import (
    PrepareConfig,
    PrepareReport,
    corpus_record,
    fingerprint_settings,
    finished,
    wait,
)
from dcar.prepare.shards import (
    AnalysedJob,
    Contents,
    CorpusPart,
    Encoder,
    analyse,
    read_chunk,
    tokenise,
    write_shard,
)
from dcar.process import one_ahead, own_device, run_claimed, worker_pool, workers
from dcar.progress import Progress
from dcar.tokens.base import input_rate
from dcar.tracking import write_json

if TYPE_CHECKING:
    from dcar.tokens.base import SpeechTokenizer

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
    """Prepare a corpus (or, with `config.validate`, only report on it).

    Every process returns after the datasets are finished; for a streamed corpus, processes other
    than the first return after their own chunks are written. `process_index` and `num_processes`
    default to RANK and WORLD_SIZE of the launcher. Raises DataError for bad rows (unless skip_bad),
    tokens outside the vocabulary, or an `out` that contains other files.
    """
    rank = int(os.environ.get("RANK", "0")) if process_index is None else process_index
    world = int(os.environ.get("WORLD_SIZE", "1")) if num_processes is None else num_processes
    if not 0 <= rank < world:
        raise ConfigError(
            f"prepare: process {rank} of {world}: the index must be from 0 to {world - 1}; check "
            "RANK and WORLD_SIZE"
        )
    corpus = (
        StreamedCorpus(config)
        if config.stream
        else WholeCorpus(config, progress and rank == 0, world)
    )
    if config.validate:
        assert isinstance(corpus, WholeCorpus)
        return PrepareReport(corpus.validate(), {}, None, corpus.checked, corpus.filtered)
    out = Path(config.out)
    check_out_dir(out)
    if tokenizer is None:
        from dcar.tokens.load import load_tokenizer  # imported late: its packages are heavy

        tokenizer = load_tokenizer(config.tokenizer, own_device(config.device))
    longest = getattr(tokenizer, "max_seconds", math.inf)  # not every tokenizer has a limit
    if config.max_seconds > longest:
        raise ConfigError(
            f"max_seconds={config.max_seconds:g}: {tokenizer.name} reads at most {longest:g} s; "
            f"set max_seconds={longest:g}"
        )
    fingerprint = corpus.fingerprint(fingerprint_settings(config, tokenizer, speaker_encoder))

    done = partial(finished, config, fingerprint)
    if (report := done()) is not None:
        logger.info("%s: already prepared from the same corpus, tokenizer and settings", out)
        if rank == 0:
            clean_up(out)
        return report
    work = partial_folder(out) / fingerprint[:16]
    work.mkdir(parents=True, exist_ok=True)
    corpus.begin(work, rank, done)
    if (report := done()) is not None:
        return report
    mine = _write_chunks(corpus, config, work, tokenizer, speaker_encoder, rank, world, progress)
    if rank == 0:
        records = _all_chunks(work, world, config.wait_minutes)
        _assemble(corpus, config, work, records, tokenizer, fingerprint)
    elif config.stream:
        records = [read_json(work / f"chunk-{name}.json") or {} for name in mine]
        checked, filtered = (sum(record[key] for record in records) for key in ("rows", "filtered"))
        return PrepareReport([], {}, None, checked, filtered)
    return wait(done, config.wait_minutes, f"process 0 to assemble {out}")


def _write_chunks(
    corpus: WholeCorpus | StreamedCorpus,
    config: PrepareConfig,
    work: Path,
    tokenizer: SpeechTokenizer,
    speaker_encoder: Encoder | None,
    rank: int,
    world: int,
    progress: bool,
) -> list[str]:
    """Write the missing chunks of this process and return the names of all of its chunks."""
    mine: list[str] = []

    @cache
    def encoder() -> Encoder:
        from dcar.voices.encoder import SpeakerEncoder  # imported late: as heavy

        return speaker_encoder or SpeakerEncoder(own_device(config.device))

    chunks, texts = corpus.chunks(rank, world), config.texts
    total = sum(chunk.rows for chunk in chunks) if isinstance(chunks, list) else None
    with (
        Progress(
            desc="tokenise", total=total, unit="utt", disable=not (progress and rank == 0)
        ) as bar,
        worker_pool(workers(config.num_proc)) as pool,
    ):
        for chunk, record, recordings in one_ahead(
            _read(chunks, config, work, input_rate(tokenizer), encoder, pool)
        ):
            mine.append(chunk.name)
            if record is not None:
                shards = {split: f"{split}-{chunk.name}.parquet" for split in recordings}
                files = {}
                for split, file in shards.items():
                    rows = recordings[split]
                    table = tokenise(
                        rows, tokenizer, encoder(), config.batch_seconds, texts, config.residual
                    )
                    files[file] = write_shard(table, work / file)
                written = {"shards": shards, "files": files, **record}
                write_json(work / f"chunk-{chunk.name}.json", written)
            bar.update(chunk.rows)
    write_json(work / f"done-{rank}-of-{world}.json", {"chunks": mine})
    return mine


def _read(
    chunks: Iterable[CorpusPart],
    config: PrepareConfig,
    work: Path,
    rate: int,
    encoder: Callable[[], Encoder],
    pool: ThreadPoolExecutor,
) -> Iterator[tuple[CorpusPart, dict[str, Any] | None, dict[str, list[AnalysedJob]]]]:
    """Yield each chunk, the record of reading it, and its analysed recordings by split; None and
    no recordings if its shards exist."""
    texts = config.texts
    for chunk in chunks:
        if read_chunk(work, chunk.name):
            yield chunk, None, {}
            continue
        contents = chunk.contents if isinstance(chunk.contents, Contents) else chunk.contents(pool)
        problems = list(contents.problems)
        unusable = problems if config.skip_bad else None
        recordings = {
            split: analyse(
                jobs, encoder(), rate, config.max_seconds, pool, texts, contents.loaded, unusable
            )
            for split, jobs in contents.jobs.items()
            if jobs
        }
        record = {
            "rows": contents.rows,
            "filtered": contents.filtered,
            "others": dict(contents.others),
            "strange": list(contents.strange),
            "problems": [asdict(p) for p in problems],
        }
        del contents  # the decoded audio is not needed while the models read it
        yield chunk, record, recordings


def _all_chunks(work: Path, world: int, wait_minutes: float) -> list[dict[str, Any]]:
    """Wait for the chunks of all processes and return their records in the order of the corpus."""
    listed = [work / f"done-{rank}-of-{world}.json" for rank in range(world)]

    def records() -> list[dict[str, Any]] | None:
        lists: list[Any] = [(read_json(file) or {}).get("chunks") for file in listed]
        if None in lists:
            return None
        chunks = [read_chunk(work, name) for name in sorted(itertools.chain(*lists))]
        return None if None in chunks else chunks  # type: ignore[return-value]

    return wait(records, wait_minutes, f"the other processes in {work}")


def _assemble(
    corpus: WholeCorpus | StreamedCorpus,
    config: PrepareConfig,
    work: Path,
    records: list[dict[str, Any]],
    tokenizer: SpeechTokenizer,
    fingerprint: str,
) -> None:
    """Assemble the datasets from all chunks. Raises DataError for bad rows of a streamed corpus
    if skip_bad is false, and if no row is left."""
    shards: dict[str, list[Path]] = {split: [] for split in config.splits}
    problems, checked, filtered = list(corpus.problems), corpus.checked, corpus.filtered
    for record in records:
        for split, file in record["shards"].items():
            shards[split].append(work / file)
        problems += [Problem(**p) for p in record["problems"]]
        checked, filtered = checked + record["rows"], filtered + record["filtered"]
    if config.stream:
        # rows with a repeated id are already in the shards, so they cannot be left out
        if repeated := repeated_ids([f for files in shards.values() for f in files]):
            raise DataError(
                f"{len(repeated)} ids are used twice; make them unique:\n{describe(repeated, 100)}"
            )
        if problems and not config.skip_bad:
            raise DataError(
                f"{len(problems)} problems in the {config.corpus} corpus; repair them or set "
                f"skip_bad=true (finished shards are kept):\n{describe(problems, 100)}"
            )
        others: Counter[str] = sum((Counter(r["others"]) for r in records), Counter())
        config.texts.note([row for record in records for row in record["strange"]])
        warn_of_splits(others, [split for split, files in shards.items() if not files])
    shards = {split: files for split, files in shards.items() if files}
    if not shards:
        raise DataError(
            f"no usable utterance in the splits {', '.join(config.splits)}: {len(problems)} rows "
            f"are bad, {filtered} are outside the range of filter_seconds; check path and splits"
        )
    stored = ["name", "checksum", "vocab_size", "rate_hz"]
    if config.residual:
        stored.append("layers")
    made_by = {name: getattr(tokenizer, name) for name in stored}
    assemble(
        Path(config.out),
        work,
        shards,
        {
            "fingerprint": fingerprint,
            "corpus": corpus_record(config),
            "config": asdict(config),
            "checked": checked,
            "tokenizer": {**made_by, "spec": config.tokenizer},
            "filtered": filtered,
            "skipped": [asdict(p) for p in problems],
        },
        config.texts.units,
        config.compress,
    )


CONFIG = PrepareConfig


def main(arguments: list[str] | None = None) -> int:
    """Run the command line of `dcar prepare` and print the report; return 1 if `validate=true`
    found bad rows, otherwise 0."""
    config = load_config(CONFIG, arguments)
    report = run(config) if config.validate else run_claimed(run, config, resumes=True)
    print(report.text())
    return report.exit_code
