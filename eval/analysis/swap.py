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
tokens per pass, as in `dcar compare`.

The paper does not say over what the size of groups is averaged: here over the generated tokens, of
their own groups.

Writes swap.json, config.yaml and records/: speech that was transcribed once is not transcribed
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dcar.config import check, load_config, save_config, setting
from dcar.config.commands import DecoderSettings, PromptSettings, RunSettings, SpeechSettings
from dcar.config.schema import seed_setting
from dcar.decoding import DecodeResult
from dcar.errors import ConfigError
from dcar.model.precision import precision_of
from dcar.process import own_device, run_claimed
from dcar.prompts.items import PromptItem
from dcar.prompts.load import corpus_recordings, load_prompts, vocoder_for
from dcar.recognition.load import load_recognizer
from dcar.sampling import SamplingConfig, uniform, utterance_keys
from dcar.storage import digest_of
from dcar.text.wer import NORMALIZER, word_errors
from dcar.tracking import provenance, write_json
from dcar.vocoder.base import PromptAudio
from dcar.vocoder.load import vocoder_identity
from dcar.vocoder.voicing import synthesize
from eval.methods.registry import Entry, Models, load_models, make_methods
from eval.methods.spec import MethodSpec
from eval.results.pareto import equal_speed, sentence
from eval.results.stats import paired_test
from eval.results.store import RecordStore
from eval.scorers.load import load_similarity
from eval.verifiers.pcg import code_vectors, similar_codes
from eval.verifiers.statistics import needed

UNSWAPPED = "car-1"


@dataclass
class SwapConfig(RunSettings, SpeechSettings, DecoderSettings, PromptSettings):
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


class Judge:
    """Synthesis and transcription of tokens. A result is stored under everything that it depends
    on, so it is made once."""

    def __init__(self, config: SwapConfig, decoder: Any, items: Sequence[PromptItem]):
        device = own_device(config.device)
        prompts = PromptAudio.of_items(items, corpus_recordings(config.data))
        self.vocoder = vocoder_for(decoder, config.data, items, config.vocoder, device, prompts)
        self.recognizer = load_recognizer(config.recognizer, device)
        self.similarity = load_similarity(config.similarity, prompts, device)
        self.tools = [
            vocoder_identity(self.vocoder, config.vocoder),
            self.recognizer.name,
            getattr(self.similarity, "name", config.similarity),
        ]
        self.store = RecordStore(Path(config.out) / "records")
        self.done = {record["key"]: record for record in self.store.read()}
        self.store.open()

    def __call__(self, item: PromptItem, tokens: Sequence[int]) -> tuple[int, int, float | None]:
        """Return word errors, reference words and similarity to the prompt's voice (None for
        silence)."""
        key = digest_of([self.tools, item.utterance_id, item.prompt_utterance_id, list(tokens)])
        if key not in self.done:
            record: dict[str, Any] = {
                "key": key,
                "id": item.utterance_id,
                "transcript": "",
                "similarity": None,
            }
            if tokens:
                voice = item.speaker_embedding[None]
                wave = synthesize(self.vocoder, [list(tokens)], voice, [item.text])[0]
                [transcript] = self.recognizer.transcribe([wave], self.vocoder.sample_rate)
                record["transcript"] = transcript
                record["similarity"] = self.similarity(
                    wave, self.vocoder.sample_rate, item.speaker_embedding
                )
            self.store.append(record)
            self.done[key] = record
        errors = word_errors(item.text, self.done[key]["transcript"])
        return errors.errors, errors.reference_words, self.done[key]["similarity"]


class Scored:
    """Judged utterances of one row, seeds summed for each utterance: word errors and reference
    words [U], similarity [seeds, U], NaN for silence."""

    def __init__(
        self,
        judge: Judge,
        items: Sequence[PromptItem],
        spoken: Sequence[Sequence[Sequence[int]]],
        bar: tqdm,
    ):
        """Judge tokens by seed and utterance."""
        found = []
        for tokens in spoken:
            for item, ids in zip(items, tokens, strict=True):
                found.append(judge(item, ids))
                bar.update()
        # None becomes NaN
        errors, words, similar = np.array(found, float).T.reshape(3, len(spoken), -1)
        self.errors, self.words, self.similarity = errors.sum(0), words.sum(0), similar

    def about(self, other: Scored) -> dict[str, Any]:
        """Return word error rate, similarity, and their differences from those of another row,
        with 95 % intervals."""
        test = paired_test(self.errors, self.words, other.errors, other.words)
        return {
            "wer": self.errors.sum() / self.words.sum(),
            "wer_change": test.difference,
            "wer_change_ci": test.ends,
            "wer_change_p": test.p_value,
            "similarity": np.nanmean(self.similarity),
            "similarity_change": np.nanmean(self.similarity - other.similarity),
        }


def groups_of(config: SwapConfig, models: Models) -> dict[str, list[list[int]]]:
    """Return the names of PCG with all thresholds, and the own groups of their codes."""
    draft = {"draft": "draft"} if config.draft else {}
    groups = {}
    for kind, thetas in (("pcg", config.theta), ("pcg-mel", config.theta_mel)):
        for theta in thetas:
            name = str(MethodSpec.from_mapping({"method": kind, "theta": theta, **draft}))
            by_mel = needed(models.statistics, name) if kind == "pcg-mel" else None
            groups[name] = own_groups(code_vectors(models.decoder, by_mel), theta)
    return groups


def measured(
    judge: Judge,
    items: Sequence[PromptItem],
    seeds: Sequence[int],
    entries: Sequence[Entry],
    spoken: dict[str, list[list[DecodeResult]]],
    groups: dict[str, list[list[int]]],
) -> dict[str, Any]:
    """Swap, transcribe and compare. Return a row for next-token decoding and one for each of
    `groups`. spoken: tokens by method, seed and utterance."""
    keys = [utterance_keys(seed, [item.utterance_id for item in items]) for seed in seeds]
    tokens = {
        name: [[r.tokens for r in results] for results in by_seed]
        for name, by_seed in spoken.items()
    }
    said = [token for by_seed in tokens[UNSWAPPED] for ids in by_seed for token in ids]
    scored: dict[str, Scored] = {}
    rows: list[dict[str, Any]] = []
    total = len(items) * len(seeds) * (1 + 2 * len(groups))
    with tqdm(total=total, desc="2/2 transcribe", unit="utt", disable=None) as bar:
        for entry in entries:
            name = entry.name
            scored[name] = Scored(judge, items, tokens[name], bar)
            rows.append(
                {
                    "method": name,
                    "settings": entry.settings,
                    "kind": "method",
                    "tokens_per_pass": tokens_per_pass(spoken[name]),
                    "own": scored[name].about(scored[UNSWAPPED]),
                }
            )
            if own := groups.get(name):
                sizes = np.array([len(own[token]) for token in said])
                swapped = [
                    [swap(ids, own, key) for ids, key in zip(results, of_seed, strict=True)]
                    for results, of_seed in zip(tokens[UNSWAPPED], keys, strict=True)
                ]
                rows[-1] |= {
                    "group_size": sizes.mean(),
                    "swapped": (sizes > 1).mean(),
                    "swap": Scored(judge, items, swapped, bar).about(scored[UNSWAPPED]),
                }
    ids = [item.utterance_id for item in items]
    counts = {
        name: dict(zip(ids, zip(row.errors, row.words, strict=True), strict=True))
        for name, row in scored.items()
    }
    return {"rows": rows, "equal_speed": equal_speed(rows[1:], counts, "tokens_per_pass")}


def run(config: SwapConfig) -> dict[str, Any]:
    """Measure and write swap.json and config.yaml into `config.out`. Raises ConfigError,
    DataError, CheckpointError."""
    models = load_models(
        config.decoder,
        "",
        [],
        own_device(config.device),
        config.draft or "",
        config.statistics or "",
        config.dtype,
    )
    groups = groups_of(config, models)
    entries = make_methods([UNSWAPPED, *groups], models, config.sampling)
    items = load_prompts(
        config.data, config.split, models.decoder, config.prompt_tokens, 0, config.limit
    )
    judge, prompts = Judge(config, models.decoder, items), items
    spoken = {
        entry.name: [entry.decode(prompts, seed, config.batch_size) for seed in config.seeds]
        for entry in tqdm(entries, desc="1/2 decode", unit="method", disable=None)
    }
    result = {
        "n": len(items),
        "seeds": config.seeds,
        "recognizer": config.recognizer,
        "normalizer": NORMALIZER,
        "similarity": config.similarity,
        "sampling": vars(config.sampling),
        **measured(judge, items, config.seeds, entries, spoken, groups),
        "provenance": provenance(
            decoder=config.decoder,
            data=config.data,
            split=config.split,
            precision=precision_of(models.decoder),
        ),
    }
    write_json(Path(config.out) / "swap.json", result)
    save_config(config, Path(config.out) / "config.yaml")
    return result


def tokens_per_pass(results: Sequence[Sequence[DecodeResult]]) -> float:
    """Return the tokens per pass of the target over all seeds and utterances."""
    flat = [r for by_seed in results for r in by_seed]
    return sum(len(r.tokens) for r in flat) / sum(r.passes for r in flat)


def table(result: dict[str, Any]) -> str:
    """Format the rows: groups, the change by swapping, and the results of PCG with these groups."""
    lines = [
        f"{result['n']} utterances, seeds {result['seeds']}; recogniser {result['recognizer']}",
        f"{'':18} {'':>7} {'':>7} | swapped: {'':19} | PCG itself:",
        f"{'groups':18} {'size':>7} {'swap %':>7} | {'WER +':>6} {'95 %':>13} {'sim. +':>7} | "
        f"{'tok/pass':>8} {'WER %':>6} {'sim.':>6}",
    ]
    for row in result["rows"]:
        own = (
            f"{row['tokens_per_pass']:8.2f} {100 * row['own']['wer']:6.1f} "
            f"{row['own']['similarity']:6.3f}"
        )
        left = f"{'–':>7} {'–':>7} | {'–':>6} {'–':>13} {'–':>7}"
        if change := row.get("swap"):
            ends = " to ".join(f"{100 * end:+.1f}" for end in change["wer_change_ci"] or ())
            left = (
                f"{row['group_size']:7.1f} {100 * row['swapped']:7.1f} | "
                f"{100 * change['wer_change']:+6.1f} {ends or '–':>13} "
                f"{change['similarity_change']:+7.3f}"
            )
        lines.append(f"{row['method']:18} {left} | {own}")
    return "\n".join([*lines, *map(sentence, result["equal_speed"])])


CONFIG = SwapConfig


def main(arguments: Sequence[str] | None = None) -> None:
    print(table(run_claimed(run, load_config(CONFIG, arguments))))
