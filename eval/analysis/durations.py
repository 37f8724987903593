"""Do methods end utterances where the recordings end? Tokens spoken against tokens of the recordings, and ends missed.

    python -m eval.analysis.durations decoder=starter data=dcar/assets/starter_prepared methods=[car-1,sd,ssd-0.4]

A method that changes the probability of the end of speech speaks too long or too short. That needs neither vocoder nor
recogniser to be found out. Prints a table.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dcar.config import load_config
from dcar.decoding import decode
from dcar.errors import ConfigError
from dcar.prompts.items import PromptItem
from dcar.prompts.load import load_prompts
from dcar.sampling import SamplingConfig
from dcar.text.bootstrap import Interval, corpus_interval
from eval.methods.registry import Entry, load_models, make_methods


@dataclass
class DurationsConfig:
    """Settings of the comparison of lengths; models as in `dcar compare`."""

    decoder: str = ""  # directory of a decoder; "starter", here and below = the shipped one
    data: str = ""  # folder written by `dcar prepare`
    methods: list[str] = field(default_factory=lambda: ["car-1", "sd", "ssd-0.4", "ssd-0.4-eos"])
    far_decoder: str = ""
    policies: list[str] = field(default_factory=list)
    draft: str = ""
    statistics: str = ""
    split: str = "dev"
    utterances: int = 40  # 0 = the whole split
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    prompt_tokens: int = 25
    batch_size: int = 16
    device: str = "cpu"
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.8, top_k=10))

    def __post_init__(self) -> None:
        if not self.seeds or self.utterances < 0 or self.batch_size < 1:
            raise ConfigError("durations need seeds, utterances >= 0 and batch_size >= 1")


class Row(NamedTuple):
    """length: tokens spoken / tokens of the recordings, with a bootstrap interval over utterances. truncated: share of
    utterances that ended by the length limit. accepted: share of drafted tokens, None where none were."""

    method: str
    length: Interval
    truncated: float
    accepted: float | None


def lengths(entry: Entry, items: Sequence[PromptItem], seeds: Sequence[int], batch_size: int = 16) -> Row:
    """Speak every item with every seed; the seeds of an utterance stay together in the bootstrap."""
    spoken = [decode(entry.decoder, [i.prompt for i in items], entry.build(), entry.sampling, seed=seed,
                     batch_size=batch_size) for seed in seeds]
    tokens = [sum(len(results[i].tokens) for results in spoken) for i in range(len(items))]
    recorded = [len(seeds) * len(item.reference_tokens) for item in items]
    every = [result for results in spoken for result in results]
    proposed = sum(r.proposed for r in every)
    return Row(entry.name, corpus_interval(tokens, recorded), sum(r.truncated for r in every) / len(every),
               sum(r.accepted for r in every) / proposed if proposed else None)


def run(config: DurationsConfig) -> list[Row]:
    for name in ("decoder", "data"):
        if not getattr(config, name):
            raise ConfigError(f"{name} is not set: give {name}=…")
    models = load_models(config.decoder, config.far_decoder, config.policies, config.device, config.draft,
                         config.statistics, fast=True)
    entries = make_methods(config.methods, models, config.sampling)
    items = load_prompts(config.data, config.split, models.decoder, config.prompt_tokens, 0, config.utterances)
    return [lengths(entry, items, config.seeds, config.batch_size) for entry in entries]


def table(rows: Sequence[Row]) -> str:
    width = max(len(r.method) for r in rows)
    lines = [f"{'method':{width}}  tokens / recording's      95 % CI  cut %  accepted %"]
    for r in rows:
        accepted = "–" if r.accepted is None else f"{100 * r.accepted:.1f}"
        lines.append(f"{r.method:{width}}  {r.length.value:20.3f}  {r.length.low:.3f}–{r.length.high:.3f} "
                     f"{100 * r.truncated:6.1f}  {accepted:>10}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(table(run(load_config(DurationsConfig, arguments))))


if __name__ == "__main__":
    main()
