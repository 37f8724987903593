"""A corpus that is checked as it is read (`stream=true`): larger than memory or disk.

Rows are read one at a time and cut into chunks by their place in the corpus. Memory holds one chunk; eight bytes an
utterance are kept at the end to find ids that were used twice. Process p of n takes every n-th chunk, or, where passing
over rows costs as much as reading them (a dataset streamed from a hub), every n-th file.

Departures from a corpus that is read whole: bad rows are reported after everything was read; one without splits is
divided by a hash of each sentence, so that the shares of dev and test are met on average, not exactly.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from dcar.corpus.read import Problem, Row, Utterance, corpus_parts
from dcar.corpus.validate import examine
from dcar.prepare.settings import PrepareConfig, PrepareReport, in_range, sentence
from dcar.prepare.shards import Chunk, Contents, Job, Loaded


class StreamedCorpus:
    """The parts of a corpus, none of which was read; what was found in it, its chunks say."""

    checked = filtered = None
    problems: list[Problem] = []

    def __init__(self, config: PrepareConfig):
        self.config = config
        self.parts = corpus_parts(config.corpus, config.path, audio_root=config.audio_root, subsets=config.subsets,
                                  streaming=True)

    def fingerprint(self, head: list) -> str:
        """SHA-256 over `settings_stamp` and the stamps of the parts (of manifests and lists; the files of a folder
        corpus and of a hub are not looked at one by one)."""
        value = [*head, self.config.path, [[p.name, p.stamp] for p in self.parts]]
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    def begin(self, work: Path, rank: int, done: Callable[[], PrepareReport | None]) -> None:
        """There is nothing to do before rows are read."""

    def chunks(self, rank: int, world: int) -> Iterator[Chunk]:
        """The chunks of this process; a name is the place in the corpus, for any number of processes."""
        running = 0
        for index, part in enumerate(self.parts):
            if part.costly and index % world != rank:
                continue
            for number, rows in enumerate(_batched(part.rows(), self.config.shard_size)):
                if part.costly or running % world == rank:
                    yield Chunk(f"{index:05d}-{number:07d}", len(rows), partial(self._examined, rows))
                running += 1

    def _examined(self, rows: list[Row], pool: ThreadPoolExecutor) -> Contents:
        config = self.config
        chosen = [(u, split) for u in rows if isinstance(u, Utterance)
                  if (split := split_of(u, config)) in config.splits]
        kept = [(u, split) for u, split in chosen if in_range(u, config)]
        jobs: dict[str, list[Job]] = {split: [] for split in config.splits}
        loaded: dict[str, Loaded] = {}
        problems = [r for r in rows if isinstance(r, Problem)]
        examined = pool.map(lambda pair: examine(pair[0], config.min_seconds, config.max_seconds), kept)
        for (u, split), (found, audio, prompt) in zip(kept, examined, strict=True):
            problems += found
            if found or audio is None:
                continue
            loaded[u.source] = Loaded.of(audio, prompt)
            jobs[split] += [Job(u, split, speed) for speed in (config.speeds if split == "train" else (1.0,))]
        return Contents(jobs, loaded, problems, len(rows), len(chosen) - len(kept))


def _batched(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def split_of(u: Utterance, config: PrepareConfig) -> str:
    """The utterance's own split, or one by a hash of its sentence: the same sentence never stands in two splits."""
    if u.split is not None:
        return u.split
    share = int.from_bytes(hashlib.sha256(sentence(u).encode()).digest()[:8], "big") / 2**64
    if share < config.dev_fraction:
        return "dev"
    return "test" if share < config.dev_fraction + config.test_fraction else "train"


def repeated_ids(files: Sequence[Path]) -> list[Problem]:
    """Ids that stand in the shards more than once, found by 64-bit hashes; then named by reading again."""
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
                problems.append(Problem(name, name, f"id {name!r} was used before; make ids unique"))
            seen.add(name)
    return problems
