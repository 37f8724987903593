"""Plan of a run: comparisons, each of some methods on the same utterances with the same seeds, and
the jobs that they consist of.

Every set of texts is a comparison. Methods with a limit decode a part of the first set, which is
one more comparison: of these methods with all others, on the utterances that all of them have.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcar.methods import Entry
from dcar.prompts.choose import by_digest
from dcar.prompts.items import PromptItem
from dcar.prompts.texts import SPLIT, titles_of
from eval.results.types import RECORDING, RESYNTHESIS


@dataclass(frozen=True)
class Comparison:
    """Comparison of some methods on the same utterances with the same seeds.

    title: of the set of texts, which no other comparison has; items: the utterances with the
    prompts of each prompt seed; references: rows of recordings, with the first prompts; limit:
    number of utterances if it is a part of a set of texts, else 0; new: rows that no larger
    comparison of these texts has, whose records are still to be made; heard: ids of the utterances
    whose audio is kept, with the first seed and prompts; samples: whether its page has them.
    """

    texts: str
    title: str
    items: dict[int, list[PromptItem]]
    entries: Sequence[Entry]
    seeds: Sequence[int]
    references: Sequence[str] = ()
    limit: int = 0
    new: Sequence[Entry | str] = ()
    heard: frozenset[str] = frozenset()
    samples: bool = False

    @property
    def first_items(self) -> list[PromptItem]:
        """Utterances with the prompts of the first prompt seed."""
        return next(iter(self.items.values()))

    @property
    def rows(self) -> list[Entry | str]:
        """Its references and methods, in the order of its table."""
        return [*self.references, *self.entries]

    def places(self, row: Entry | str) -> Iterator[tuple[int, int, list[PromptItem]]]:
        """Iterate over seed, prompt seed and utterances of a row; a reference has the first of
        both."""
        prompts = list(self.items.items())
        reference = isinstance(row, str)
        for seed in self.seeds[:1] if reference else self.seeds:
            for prompt_seed, items in prompts[:1] if reference else prompts:
                yield seed, prompt_seed, items


@dataclass(frozen=True)
class BatchJob:
    """One row on one batch of utterances with one seed. heard: ids of the utterances whose audio is
    kept. The process `owner` modulo the number of processes runs it."""

    row: Entry | str
    seed: int
    items: Sequence[PromptItem]
    owner: int
    heard: frozenset[str] = frozenset()


def name_of(row: Entry | str) -> str:
    """Return the name of a row: of a method or of a reference."""
    return row if isinstance(row, str) else row.name


def choose_items(items: Sequence[PromptItem], limit: int) -> list[PromptItem]:
    """Return `limit` utterances (0 = all), sorted by id (`by_digest`)."""
    ids = [item.utterance_id for item in items]
    digests = [hashlib.sha256(i.encode()).hexdigest() for i in ids]
    return [items[i] for i in by_digest(np.array(digests), np.array(ids), limit)]


def plan_comparisons(
    sets: dict[str, dict[int, list[PromptItem]]],
    entries: Sequence[Entry],
    seeds: Sequence[int],
    references: bool,
    recordings: bool,
    audio: int,
) -> list[Comparison]:
    """Return the comparisons of a run. sets: the utterances of each set of texts by prompt seed;
    references: whether to measure recordings and their tokens, where there are `recordings`; audio:
    number of utterances to listen to, by all methods."""
    comparisons: list[Comparison] = []
    titles = titles_of(list(sets))
    for texts, items in sets.items():
        # a limit is one of the first set
        most = len(next(iter(items.values()))) if not comparisons else 0
        limits = sorted({e.spec.limit for e in entries if 0 < e.spec.limit < most}, reverse=True)
        bounds: list[str] = []
        if references and texts == SPLIT:
            bounds = [*([RECORDING] if recordings else []), RESYNTHESIS]
        of_texts: list[Comparison] = []
        for limit in (0, *limits):
            able = [e for e in entries if not e.spec.limit or e.spec.limit >= (limit or most) > 0]
            if not able:
                continue
            rows: list[Entry | str] = [*bounds, *able]
            planned = {name_of(row) for larger in of_texts for row in larger.rows}
            of_texts.append(
                Comparison(
                    texts,
                    f"{limit} of the {titles[texts]}" if limit else titles[texts],
                    {seed: choose_items(of, limit) for seed, of in items.items()},
                    able,
                    seeds,
                    bounds,
                    limit,
                    [row for row in rows if name_of(row) not in planned],
                )
            )
        if not comparisons and of_texts:
            # audio of utterances that every method decodes
            heard = spread([item.utterance_id for item in of_texts[-1].first_items], audio)
            of_texts = [replace(of, heard=heard) for of in of_texts]
            of_texts[-1] = replace(of_texts[-1], samples=True)
        comparisons += of_texts
    return comparisons


def spread(ids: Sequence[str], count: int) -> frozenset[str]:
    """Return so many evenly spaced ids, or all of them. Utterances are sorted by id, so this covers
    the speakers as well."""
    places = np.linspace(0, len(ids) - 1, min(count, len(ids))).round().astype(int)
    return frozenset(ids[place] for place in places)


def plan_jobs(comparison: Comparison, batch_size: int) -> list[BatchJob]:
    """Return the jobs that make a comparison's records, as far as no larger one makes them, in the
    order in which they are run: in a partial run, all methods have seen the same utterances.

    Batches contain utterances of similar text length, and are the same for every number of
    processes.
    """
    jobs: list[tuple[tuple[int, int, int, int], BatchJob]] = []
    seeds, prompt_seeds = list(comparison.seeds), list(comparison.items)
    for m, row in enumerate(comparison.new):
        for seed, prompt_seed, items in comparison.places(row):
            ordered = sorted(items, key=lambda item: (len(item.text_ids), item.utterance_id))
            s, p = seeds.index(seed), prompt_seeds.index(prompt_seed)
            heard = comparison.heard if s == p == 0 else frozenset()
            for b, start in enumerate(range(0, len(ordered), batch_size)):
                batch = ordered[start : start + batch_size]
                # shifted by batch, so that a slow method is not always run by the same process
                jobs.append(((p, s, b, m), BatchJob(row, seed, batch, s + b + m, heard)))
    return [job for _, job in sorted(jobs, key=lambda placed: placed[0])]
