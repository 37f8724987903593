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
from dcar.process import own_device, run_claimed
from dcar.sampling import SamplingConfig, uniform, utterance_keys
from dcar.tracking import write_json
from eval.compare.run import CompareConfig, load_tools, start
from eval.compare.run import run as compare
from eval.methods.registry import Entry, Models, make_methods
from eval.methods.spec import MethodSpec
from eval.results.pareto import sentence
from eval.results.store import Record, Tools, by_method, read_jsonl
from eval.verifiers.pcg import code_vectors, similar_codes
from eval.verifiers.statistics import needed

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
    sampling: SamplingConfig = setting(SamplingConfig, "Sampling of tokens.")

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

    def names(self) -> dict[str, tuple[float, bool]]:
        """Return the names of PCG with all thresholds; of each its threshold, and whether its
        groups are by mel frames."""
        draft = {"draft": "draft"} if self.draft else {}
        return {
            str(MethodSpec.from_mapping({"method": kind, "theta": theta, **draft})): (theta, by_mel)
            for kind, thetas, by_mel in (
                ("pcg", self.theta, False),
                ("pcg-mel", self.theta_mel, True),
            )
            for theta in thetas
        }


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


@dataclass(frozen=True)
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
    for name, (theta, by_mel) in config.names().items():
        vectors = code_vectors(models.decoder, needed(models.statistics, name) if by_mel else None)
        groups = own_groups(vectors, theta)
        (pcg,) = make_methods([name], models, config.sampling)
        label = f"{name} swapped"
        changed = {
            "name": label,
            "settings": {"method": label},
            "identity": {**plain.identity, "groups": pcg.identity["groups"]},
        }
        entries[name] = SwappedEntry(**{**vars(plain), **changed}, groups=groups, last=last)
    return entries


def run(config: SwapConfig, tools: Tools | None = None) -> dict[str, Any]:
    """Compare, and write swap.json; return its content. `tools` replaces what the config would
    load. Raises ConfigError, DataError, CheckpointError."""
    state, meeting = start(config)
    tools = tools or load_tools(config.comparison(), own_device(config.device))
    entries = swapped_entries(config, tools.models)
    compared = compare(config.comparison(), tools, list(entries.values()))
    out = Path(config.out)
    spoken = by_method(read_jsonl(out / "records.jsonl"))
    rows = {row["method"]: row for row in compared["rows"]}
    said = [token for record in spoken[UNSWAPPED] for token in record["tokens"]]
    labels = {rows[name]["family"] for name in entries}
    result = {
        "n": compared["utterances"],
        "rows": [
            _measured(rows[UNSWAPPED], spoken),
            *(
                _measured(rows[name], spoken)
                | {
                    "group_size": np.mean([len(entry.groups[token]) for token in said]),
                    "swapped": np.mean([len(entry.groups[token]) > 1 for token in said]),
                    "swap": _measured(rows[entry.name], spoken),
                }
                for name, entry in entries.items()
            ),
        ],
        "equal_speed": [p for p in compared["equal_speed"] if {p["a"], p["b"]} <= labels],
        **{
            name: compared[name]
            for name in "seeds recognizer normalizer scorers sampling provenance".split()
        },
    }
    if state.is_main_process:
        write_json(out / "swap.json", result)
        save_config(config, out / "swap.yaml")
    meeting.wait("writing swap.json")
    return result


def _measured(row: dict[str, Any], spoken: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    """Return the figures of a row: word error rate, similarity to the prompt, and their
    differences from those of next-token decoding. Similarities are compared where both have
    one."""
    (scorer,) = row["scores"]
    mine, theirs = (
        {(r["id"], r["seed"]): r["scores"][scorer] for r in spoken[name]}
        for name in (row["method"], UNSWAPPED)
    )
    changes = [mine[key] - theirs[key] for key in mine if None not in (mine[key], theirs[key])]
    return {
        "method": row["method"],
        "tokens_per_pass": row["tokens_per_pass"],
        "wer": row["wer"],
        "wer_change": row["difference_vs_car1"],
        "wer_change_ci": row["difference_vs_car1_ci"],
        "wer_change_p": row["p_vs_car1"],
        "similarity": row["scores"][scorer]["mean"],
        "similarity_change": float(np.mean(changes)) if changes else None,
    }


def table(result: dict[str, Any]) -> str:
    """Format the rows: groups, the change by swapping, and the results of PCG with these groups."""
    lines = [
        f"{result['n']} utterances, seeds {result['seeds']}; recogniser {result['recognizer']}",
        f"{'':18} {'':>7} {'':>7} | swapped: {'':19} | PCG itself:",
        f"{'groups':18} {'size':>7} {'swap %':>7} | {'WER +':>6} {'95 %':>13} {'sim. +':>7} | "
        f"{'tok/pass':>8} {'WER %':>6} {'sim.':>6}",
    ]
    for row in result["rows"]:
        left = f"{'–':>7} {'–':>7} | {'–':>6} {'–':>13} {'–':>7}"
        if change := row.get("swap"):
            ends = " to ".join(f"{100 * end:+.1f}" for end in change["wer_change_ci"] or ())
            left = (
                f"{row['group_size']:7.1f} {100 * row['swapped']:7.1f} | "
                f"{100 * change['wer_change']:+6.1f} {ends or '–':>13} "
                f"{_number(change['similarity_change'], '+.3f'):>7}"
            )
        lines.append(
            f"{row['method']:18} {left} | {row['tokens_per_pass']:8.2f} {100 * row['wer']:6.1f} "
            f"{_number(row['similarity'], '.3f'):>6}"
        )
    return "\n".join([*lines, *map(sentence, result["equal_speed"])])


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


CONFIG = SwapConfig


def main(arguments: Sequence[str] | None = None) -> None:
    print(table(run_claimed(run, load_config(CONFIG, arguments))))
