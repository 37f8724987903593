"""`dcar analyse what=swap`: test whether the tokens of a PCG group are interchangeable (arXiv
2511.13732, Tables 2 and 3).

    dcar fit-verifiers --config verifiers_starter:mel decoder=starter data=starter
    dcar analyse what=swap data=starter decoder=starter statistics=runs/verifiers_mel \\
        theta=[0.6,0.42,0.3] theta_mel=[0.98,0.95,0.9]

Texts are decoded token by token (`car-1`). Then every token whose own group G(t) has other members
is replaced by one of these, drawn uniformly and independently of the model's probabilities. Both
versions are synthesised and transcribed; the change of word errors and similarity is the cost of
the groups without verification. The table also gives the tokens per pass of PCG with these groups,
and the word errors of its speech. PCG by embeddings and PCG by mel frames are compared at equal
tokens per pass.

The paper does not say over what the size of groups is averaged: here over the generated tokens, of
their own groups.

It is a comparison of `car-1`, `pcg-θ` and "pcg-θ swapped", with the same records: an interrupted
one continues, and speech that was transcribed once is not transcribed again. Writes the files of a
comparison, swap.json and swap.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from dcar.config import check, load_config, save_config, setting
from dcar.config.commands import (
    DecoderSettings,
    PromptSettings,
    RunSettings,
    SpeechSettings,
    WaitSettings,
)
from dcar.config.schema import seed_setting
from dcar.decoding import DecodeResult, Prompt
from dcar.errors import ConfigError
from dcar.methods import Entry, MethodSpec, Models, make_methods
from dcar.model.models import Borrowed
from dcar.process import own_device, run_claimed
from dcar.sampling import SamplingConfig, uniform, utterance_keys
from dcar.storage import digest_of, write_text
from eval.compare.config import CompareConfig
from eval.compare.processes import start
from eval.compare.run import run as compare
from eval.compare.tools import Tools, load_tools
from eval.report.table import aligned, pairs_table
from eval.results.stats import PairedTest
from eval.results.types import STRICT, Pair, Record, Row, ScorerInfo, read_records, to_json
from eval.verifiers.pcg import GroupVerifier, similar_codes

UNSWAPPED = "car-1"


@dataclass
class SwapConfig(RunSettings, WaitSettings, SpeechSettings, DecoderSettings, PromptSettings):
    """Settings of `dcar analyse what=swap`."""

    out: str = "runs/swap"
    limit: int = 200
    theta: list[float] = setting([0.6, 0.42, 0.3], "Thresholds of groups by embeddings.")
    theta_mel: list[float] = setting([], "Thresholds of groups by mel frames.")
    statistics: str | None = setting(
        None, "Folder of `dcar fit-verifiers mel_utterances=…`, for theta_mel."
    )
    draft: str | None = setting(None, "Folder of PCG's draft model; empty = the heads draft.")
    seeds: list[int] = seed_setting(
        [0], "Random seeds: every utterance is decoded, and its tokens swapped, once with each."
    )
    similarity: str = setting(
        "resemblyzer",
        "Speaker encoder for similarities; or wavlm:…, eres2net:… (eval/scorers/load.py).",
    )
    sampling: SamplingConfig = setting(SamplingConfig, "Sampling of tokens.", bare=True)

    def __post_init__(self) -> None:
        check(self)
        if not (self.seeds and (self.theta or self.theta_mel)):
            raise ConfigError("seeds and theta or theta_mel: swap needs at least one value of each")

    def comparison(self) -> CompareConfig:
        """Return the settings of the comparison of next-token decoding with PCG."""
        shared = {f.name for f in fields(self)} & {f.name for f in fields(CompareConfig)}
        return CompareConfig(
            **{name: getattr(self, name) for name in shared},
            methods=[UNSWAPPED, *self.names()],
            scorers=[self.similarity],
            timing_utterances=0,
            audio_utterances=0,
            references=False,
            report=False,
        )

    def names(self) -> list[str]:
        """Return the names of PCG with all thresholds."""
        draft = {"draft": "draft"} if self.draft else {}
        return [
            str(MethodSpec.from_mapping({"method": kind, "theta": theta, **draft}))
            for kind, thetas in (("pcg", self.theta), ("pcg-mel", self.theta_mel))
            for theta in thetas
        ]


def own_groups(vectors: Tensor, theta: float) -> list[list[int]]:
    """Return G(t) of every code t, ascending ids including t, given vectors [codes, D]; a row of
    NaN is similar to no other."""
    return [ids.tolist() for _, block in similar_codes(vectors, theta) for ids in block]


def swap(tokens: Sequence[int], groups: Sequence[Sequence[int]], key: Tensor) -> list[int]:
    """Replace every token t by another member of groups[t], drawn uniformly; tokens that are alone
    in theirs stay.

    key: of the utterance (`dcar.sampling.utterance_keys`), int64 [].
    """
    numbers = uniform(key.expand(len(tokens)), "group", torch.arange(len(tokens))).tolist()
    swapped = []
    for token, u in zip(tokens, numbers, strict=True):
        others = [other for other in groups[token] if other != token]
        swapped.append(others[int(u * len(others))] if others else token)
    return swapped


@dataclass(frozen=True, eq=False)
class SwappedEntry(Entry):
    """Next-token decoding whose tokens are swapped within `groups`. last: its last unswapped batch;
    entries that share it decode a batch once."""

    groups: Sequence[Sequence[int]] = ()
    last: dict[Any, list[DecodeResult]] = field(default_factory=dict)

    def decode(
        self, prompts: Sequence[Prompt], seed: int, batch_size: int = 32
    ) -> list[DecodeResult]:
        ids = [prompt.utterance_id for prompt in prompts]
        batch = seed, *ids
        if batch not in self.last:
            self.last.clear()
            self.last[batch] = super().decode(prompts, seed, batch_size)
        return [
            replace(result, tokens=swap(result.tokens, self.groups, key))
            for result, key in zip(self.last[batch], utterance_keys(seed, ids), strict=True)
        ]


def swapped_entries(config: SwapConfig, models: Models) -> dict[str, SwappedEntry]:
    """Return next-token decoding with the tokens swapped in the groups of PCG, by the name of
    PCG."""
    (plain,) = make_methods([UNSWAPPED], models, config.sampling)
    entries: dict[str, SwappedEntry] = {}
    last: dict[Any, list[DecodeResult]] = {}
    for name in config.names():
        (pcg,) = make_methods([name], models, config.sampling)
        assert isinstance(pcg.method, GroupVerifier)
        vectors = pcg.method.vectors(Borrowed(models))
        entries[name] = SwappedEntry(
            MethodSpec(f"{name} swapped"),
            plain.decoder,
            plain.method,
            {**plain.identity, "groups": digest_of([dict(pcg.identity), pcg.spec.to_mapping()])},
            plain.sampling,
            own_groups(vectors, pcg.method.theta),
            last,
        )
    return entries


@STRICT
@dataclass
class Change:
    """Word error rate and similarity to the prompt, and their differences from those of next-token
    decoding. Similarities are compared where both have one."""

    wer: float
    wer_change: PairedTest | None
    similarity: float | None
    similarity_change: float | None


@STRICT
@dataclass
class SwapRow:
    """PCG with one threshold, and next-token decoding with its groups. group_size: mean over the
    generated tokens, of their own groups; swapped: share of the tokens that have others."""

    method: str
    tokens_per_pass: float | None
    itself: Change
    group_size: float | None = None
    swapped: float | None = None
    swap: Change | None = None


@STRICT
@dataclass
class SwapResult:
    """Content of swap.json."""

    utterances: int
    rows: list[SwapRow]
    pairs: list[Pair]
    seeds: list[int]
    recognizer: str
    normalizer: str
    scorers: dict[str, ScorerInfo]
    sampling: SamplingConfig
    provenance: dict[str, Any]


def run(config: SwapConfig, tools: Tools | None = None) -> SwapResult:
    """Compare, and write swap.json; return its content. `tools` replaces what the config would
    load. Raises ConfigError, DataError, CheckpointError."""
    state, meeting = start(config)
    tools = tools or load_tools(config.comparison(), own_device(config.device))
    entries = swapped_entries(config, tools.models)
    compared = compare(config.comparison(), tools, list(entries.values()))
    out = Path(config.out)
    records: dict[str, list[Record]] = {}
    for record in read_records(out / "records.jsonl"):
        records.setdefault(record.method, []).append(record)
    rows = {row.method: row for row in compared.first.rows}
    tokens = [token for record in records[UNSWAPPED] for token in record.tokens]
    families = {rows[name].family for name in entries}
    result = SwapResult(
        utterances=compared.first.utterances,
        rows=[
            SwapRow(UNSWAPPED, rows[UNSWAPPED].tokens_per_pass, change(rows[UNSWAPPED], records)),
            *(
                SwapRow(
                    name,
                    rows[name].tokens_per_pass,
                    change(rows[name], records),
                    float(np.mean([len(entry.groups[token]) for token in tokens])),
                    float(np.mean([len(entry.groups[token]) > 1 for token in tokens])),
                    change(rows[entry.name], records),
                )
                for name, entry in entries.items()
            ),
        ],
        pairs=[pair for pair in compared.first.pairs if {pair.a, pair.b} <= families],
        seeds=compared.seeds,
        recognizer=compared.recognizer,
        normalizer=compared.normalizer,
        scorers=compared.scorers,
        sampling=compared.sampling,
        provenance=compared.provenance,
    )
    if state.is_main_process:
        write_text(out / "swap.json", to_json(result, indent=1) + "\n")
        save_config(config, out / "swap.yaml")
    meeting.wait("writing swap.json")
    return result


def change(row: Row, records: Mapping[str, Sequence[Record]]) -> Change:
    """Return the figures of a row."""
    (scorer,) = row.scores
    mine, theirs = (
        {(r.id, r.seed): r.scores[scorer] for r in records[name]}
        for name in (row.method, UNSWAPPED)
    )
    both = ((mine[key], theirs[key]) for key in mine)
    changes = [a - b for a, b in both if a is not None and b is not None]
    mean = row.scores[scorer].mean
    return Change(
        row.wer.value,
        row.tests.get("car1"),
        mean.value if mean else None,
        float(np.mean(changes)) if changes else None,
    )


def table(result: SwapResult) -> str:
    """Format the rows: groups, the change by swapping, and the results of PCG with these groups."""
    lines = [
        f"{result.utterances} utterances, seeds {result.seeds}; recogniser {result.recognizer}",
        f"{'':18} {'':>7} {'':>7} | swapped: {'':19} | PCG itself:",
        f"{'groups':18} {'size':>7} {'swap %':>7} | {'WER +':>6} {'95 %':>13} {'sim. +':>7} | "
        f"{'tok/pass':>8} {'WER %':>6} {'sim.':>6}",
    ]
    for row in result.rows:
        left = f"{'–':>7} {'–':>7} | {'–':>6} {'–':>13} {'–':>7}"
        if row.swap and row.swap.wer_change:
            test = row.swap.wer_change
            ends = " to ".join(f"{100 * end:+.1f}" for end in test.ends or ())
            left = (
                f"{row.group_size:7.1f} {100 * (row.swapped or 0):7.1f} | "
                f"{100 * test.difference:+6.1f} {ends or '–':>13} "
                f"{_number(row.swap.similarity_change, '+.3f'):>7}"
            )
        lines.append(
            f"{row.method:18} {left} | {_number(row.tokens_per_pass, '8.2f')} "
            f"{100 * row.itself.wer:6.1f} {_number(row.itself.similarity, '.3f'):>6}"
        )
    return "\n".join([*lines, *aligned(pairs_table("", result.pairs))])


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


CONFIG = SwapConfig


def main(arguments: Sequence[str] | None = None) -> None:
    result = run_claimed(run, load_config(CONFIG, arguments), resumes=True)
    if PartialState().is_main_process:
        print(table(result))
