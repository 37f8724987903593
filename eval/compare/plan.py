"""What a run compares: comparisons, each of these methods on these utterances with these seeds, and
the jobs that they consist of.

Every set of texts is a comparison. Methods with a limit decode a part of the first set, which is
one more comparison: of these methods with all others, on the utterances that all of them have.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dcar.methods import Entry
from dcar.prompts.choose import by_digest
from dcar.prompts.items import PromptItem
from dcar.prompts.texts import SPLIT, titles_of
from eval.results.types import RECORDING, RESYNTHESIS


@dataclass(frozen=True)
class Comparison:
    """These methods on these utterances with these seeds. title: of the set of texts; no two sets
    have the same.

    items: the utterances with the prompts of each prompt seed; references: rows of recordings, with
    the first prompts; limit: number of utterances if it is a part of a set of texts, else 0; audio:
    number of utterances whose audio is kept, with the first seed and prompts.
    """

    texts: str
    title: str
    items: dict[int, list[PromptItem]]
    entries: Sequence[Entry]
    seeds: Sequence[int]
    references: Sequence[str] = ()
    limit: int = 0
    audio: int = 0

    @property
    def first_items(self) -> list[PromptItem]:
        """Utterances with the prompts of the first prompt seed."""
        return next(iter(self.items.values()))

    @property
    def methods(self) -> list[str]:
        """Names of its rows."""
        return [*self.references, *(e.name for e in self.entries)]

    def heard(self) -> set[str]:
        """Return the ids of the utterances whose audio is kept, evenly spaced. Utterances are
        sorted by id, so these cover the speakers as well."""
        items = self.first_items
        chosen = np.linspace(0, len(items) - 1, min(self.audio, len(items))).round().astype(int)
        return {items[i].utterance_id for i in chosen}


@dataclass(frozen=True)
class Job:
    """One method on one batch of utterances with one seed. entry: a method, or the name of a
    reference; heard: ids of the utterances whose audio is kept. The process `owner` modulo the
    number of processes runs it."""

    entry: Entry | str
    seed: int
    prompt_seed: int
    items: Sequence[PromptItem]
    owner: int
    texts: str = ""
    heard: set[str] = field(default_factory=set)


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
        bounds: list[str] = []
        if references and texts == SPLIT:
            bounds = [*([RECORDING] if recordings else []), RESYNTHESIS]
        # a limit is one of the first set
        most = len(next(iter(items.values()))) if not comparisons else 0
        limits = sorted({e.spec.limit for e in entries if 0 < e.spec.limit < most}, reverse=True)
        for limit in (0, *limits):
            part = {seed: choose_items(of, limit) for seed, of in items.items()}
            able = [e for e in entries if not e.spec.limit or e.spec.limit >= (limit or most) > 0]
            title = f"{limit} of the {titles[texts]}" if limit else titles[texts]
            if able:
                comparisons.append(Comparison(texts, title, part, able, seeds, bounds, limit))
    # audio of the utterances that every method decodes
    last = sum(c.texts == comparisons[0].texts for c in comparisons) - 1
    comparisons[last] = replace(comparisons[last], audio=audio)
    return comparisons


def plan_jobs(comparison: Comparison, batch_size: int) -> list[Job]:
    """Return the jobs in the order in which they are run: in a partial run, all methods have seen
    the same utterances.

    Batches contain utterances of similar text length, and are the same for every number of
    processes.
    """
    jobs = []
    heard = comparison.heard()
    for p, (prompt_seed, items) in enumerate(comparison.items.items()):
        ordered = sorted(items, key=lambda item: (len(item.text_ids), item.utterance_id))
        batches = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
        for s, seed in enumerate(comparison.seeds):
            first = s == p == 0
            references = comparison.references if first else ()
            methods: list[Entry | str] = [*references, *comparison.entries]
            jobs += [
                # shifted by batch, so that a slow method is not always run by the same process
                Job(
                    method,
                    seed,
                    prompt_seed,
                    batch,
                    s + b + m,
                    comparison.texts,
                    heard if first else set(),
                )
                for b, batch in enumerate(batches)
                for m, method in enumerate(methods)
            ]
    return jobs
