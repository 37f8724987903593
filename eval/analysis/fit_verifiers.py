"""Statistics of a decoder for verifying methods: `dcar fit-verifiers`.

    dcar fit-verifiers --config verifiers_starter out=runs/verifiers

- Token transitions (mtp-viterbi): bigram counts of the training split.
- Rank accuracies (vadusa): how often the base head would draw the i-th best id of each draft head,
  on development utterances along the true tokens. They are sums of probabilities of the base head
  instead of counts, which is the same expectation with less noise.
- Entropy thresholds (entropy@LENGTH): development utterances are *decoded* with thresholds from the
  whole range, and the tokens per pass are measured; along the true tokens the entropies are lower,
  and lengths would be wrong.
- Mean mel frames (pcg-mel): of every code over recordings of the training split, one log-mel frame
  per token; only with `mel_utterances`.

Writes statistics.safetensors, statistics.json and config.yaml; the folder is the `statistics` of a
comparison.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dcar.audio import resample
from dcar.config import check, load_config, save_config, setting
from dcar.config.commands import DecoderSettings, PromptSettings, RunSettings, SeedSettings
from dcar.decoding import decode
from dcar.errors import ConfigError, DataError
from dcar.model.batch import speech_batch
from dcar.model.draft import AnyDecoder
from dcar.model.load import load_decoder
from dcar.model.precision import precision_of
from dcar.model.statistics import MEL_BANDS, VerifierStatistics
from dcar.prepare.prepared import load_prepared, prepared_info, recording_of
from dcar.prepare.recordings import source_utterances
from dcar.process import own_device, run_claimed, run_command
from dcar.progress import Progress
from dcar.prompts.items import PromptItem
from dcar.prompts.load import load_prompts
from dcar.sampling import SamplingConfig, warp
from dcar.ties import likeliest
from dcar.tokens.base import fitted
from dcar.tracking import provenance
from dcar.voices.features import SAMPLE_RATE, LogMel
from eval.verifiers.entropy import EntropyChunk, entropies
from eval.verifiers.mtp_viterbi import count_bigrams
from eval.verifiers.vadusa import build_tree, expected_accepted


@dataclass
class FitConfig(SeedSettings, RunSettings, DecoderSettings, PromptSettings):
    """Settings of `dcar fit-verifiers`."""

    out: str = "runs/verifiers"
    split: str = "dev"
    limit: int = 64
    batch_size: int = 32
    mel_utterances: int = setting(
        0,
        "Number of training recordings for the mean mel frame of every code, which pcg-mel needs; "
        "0 = none.",
        minimum=0,
    )
    ranks: int = setting(
        10, "Number of best ids of each draft head that a tree may use.", minimum=1
    )
    thresholds: int = setting(
        12, "Number of points of the curve from entropy threshold to tokens per pass.", minimum=2
    )
    sampling: SamplingConfig = setting(
        SamplingConfig,
        "Sampling of tokens, as in the comparison that will use the statistics.",
        bare=True,
    )

    def __post_init__(self) -> None:
        check(self)


@torch.no_grad()
def teacher_forced(
    model: AnyDecoder, items: Sequence[PromptItem], batch_size: int = 16
) -> Iterator[Tensor]:
    """Return hidden [n, D] of the last prompt position and all tokens, for every item. hidden[t]
    predicts token t + k - 1 by head k, and the end after the last. The prompts are those of
    decoding."""
    device, config = model.norm.weight.device, model.config
    bos = (config.speech_vocab_size + 1,) if config.bos else ()
    for start in range(0, len(items), batch_size):
        chosen = items[start : start + batch_size]
        prompts = [(*i.prompt_ids, *bos) for i in chosen]
        speech = [(*p, *i.reference_tokens) for p, i in zip(prompts, chosen, strict=True)]
        texts = [i.text_ids for i in chosen]
        hidden = model.speech_hidden(speech_batch(texts, speech, [len(p) for p in prompts], device))
        for states, prompt, ids in zip(hidden, prompts, speech, strict=True):
            yield states[len(prompt) - 1 : len(ids)]


@torch.no_grad()
def rank_accuracy(
    model: AnyDecoder, states: Sequence[Tensor], sampling: SamplingConfig, ranks: int
) -> Tensor:
    """Return acc[d - 1, i] = E_t[ q(i-th best id of head d + 1 at t | hidden at t + d) ], where q
    are the warped probabilities of the base head: [K - 1, R].

    states: those of every utterance (`teacher_forced`). The mean runs over positions whose d true
    tokens after the root still belong to the utterance.
    """
    heads = model.config.num_prediction_heads
    ranks = min(ranks, model.config.output_size)
    sums = torch.zeros(heads - 1, ranks, dtype=torch.float64)
    counts = torch.zeros(heads - 1, 1, dtype=torch.float64)
    for hidden in states:
        logits = model.heads.logits(hidden)  # [n, K, V + 1]
        base = warp(logits[:, 0], sampling)
        for depth in range(1, min(heads, len(hidden))):
            _, ids = likeliest(logits[:-depth, depth], ranks)
            sums[depth - 1] += base[depth:].gather(-1, ids).double().sum(0).cpu()
            counts[depth - 1] += len(ids)
    return (sums / counts.clamp(min=1)).float()


@torch.no_grad()
def entropy_curve(
    model: AnyDecoder,
    states: Sequence[Tensor],
    items: Sequence[PromptItem],
    sampling: SamplingConfig,
    points: int,
    seed: int,
    batch_size: int,
) -> tuple[Tensor, Tensor]:
    """Return thresholds [T] in nats and the tokens per pass [T] with each, from decoding the items
    with it.

    The thresholds are 0 and quantiles of max(H_2..H_k) along the true tokens, up to the entropy of
    equal probabilities.
    """
    level = torch.cat(
        [
            entropies(model.heads.logits(hidden)[:, 1:]).cummax(-1).values.flatten()
            for hidden in states
        ]
    )
    ceiling = torch.log(torch.tensor(float(model.config.output_size))) + 1e-3
    inner = level.double().cpu().quantile(torch.linspace(0, 1, points, dtype=torch.float64)[1:-1])
    thresholds = torch.cat((torch.zeros(1), inner.float(), ceiling[None])).unique()
    lengths: list[float] = []
    for threshold in Progress(thresholds.tolist(), desc="entropy thresholds"):
        results = decode(
            model, items, EntropyChunk(threshold), sampling, seed=seed, batch_size=batch_size
        )
        lengths.append(sum(len(r.tokens) for r in results) / sum(r.passes for r in results))
    return thresholds, torch.tensor(lengths)


def mean_mel(data: str, split: str, codes: int, limit: int) -> tuple[Tensor, Tensor]:
    """Return the mean log-mel frame of every code, float32 [V, MEL_BANDS], and the number of its
    occurrences, int64 [V].

    They are taken from at most `limit` utterances of a prepared split that have recordings, spread
    evenly. A token has one frame, centred on it, with a window of two tokens (at least 43 ms).
    Frames are natural-log magnitudes at about 24 kHz. Raises DataError if there are no recordings,
    or if one does not have the length of its tokens.
    """
    rows, sources = load_prepared(data, split), source_utterances(data)
    places = [
        i
        for i, row in enumerate(rows.select_columns(["id", "speed"]))
        if recording_of(row)[0] in sources
    ]
    if not places:
        raise DataError(
            f"{data}: split {split} has no recordings for mean mel frames; prepare a corpus with "
            "audio, or omit mel_utterances"
        )
    token_rate = prepared_info(data).tokenizer.rate_hz
    hop = round(SAMPLE_RATE / token_rate)
    rate = hop * token_rate  # about 24 kHz, and exactly `hop` samples a token
    mel = LogMel(round(rate), max(1024, 2 * hop), hop, MEL_BANDS)
    sums = torch.zeros(codes, MEL_BANDS, dtype=torch.float64)
    counts = torch.zeros(codes, dtype=torch.long)
    for i in Progress(
        places[:: max(1, len(places) // limit)][:limit],
        desc="mean mel frames",
        unit="utt",
    ):
        row = rows[i]
        utterance_id, speed = recording_of(row)
        wave, own = sources[utterance_id].load()
        wave, tokens = resample(wave, own * speed, rate), torch.tensor(row["speech"])
        if abs(len(wave) - hop * len(tokens)) > 3 * hop:
            raise DataError(
                f"{data}: {row['id']}: tokens and recording differ in length by over three tokens; "
                "prepare the corpus again"
            )
        frames = mel(torch.from_numpy(fitted(wave, hop * len(tokens)))[None])[0].T
        sums.index_add_(0, tokens, frames.double())
        counts += tokens.bincount(minlength=codes)
    return (sums / counts.clamp(min=1)[:, None]).float(), counts


def fit(
    model: AnyDecoder,
    items: Sequence[PromptItem],
    train_tokens: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    ranks: int,
    thresholds: int,
    seed: int = 0,
    batch_size: int = 32,
) -> VerifierStatistics:
    """Measure all statistics of a decoder with several heads. Raises ConfigError for one with
    only the base head."""
    if model.config.num_prediction_heads < 2:
        raise ConfigError(
            "these statistics describe additional heads, but this decoder has only the base head; "
            "give one trained with several heads"
        )
    keys, counts = count_bigrams(train_tokens, model.config.speech_vocab_size)
    states = list(teacher_forced(model, items, batch_size))
    accuracy = rank_accuracy(model, states, sampling, ranks)
    levels, lengths = entropy_curve(model, states, items, sampling, thresholds, seed, batch_size)
    return VerifierStatistics(
        model.checksum(),
        model.config.tokenizer,
        model.config.speech_vocab_size + 2,
        accuracy,
        keys,
        counts,
        levels,
        lengths,
        {"sampling": vars(sampling), "utterances": len(items)},
    )


def run(config: FitConfig) -> VerifierStatistics:
    """Measure and save into `config.out`."""
    model = load_decoder(config.decoder, own_device(config.device), dtype=config.dtype)
    items = load_prompts(
        config.data, config.split, model, config.prompt_tokens, config.seed, config.limit
    )
    train = load_prepared(config.data, "train")["speech"]
    statistics = fit(
        model,
        items,
        list(train),
        config.sampling,
        ranks=config.ranks,
        thresholds=config.thresholds,
        seed=config.seed,
        batch_size=config.batch_size,
    )
    if config.mel_utterances:
        statistics.mel_means, statistics.mel_counts = mean_mel(
            config.data, "train", model.config.speech_vocab_size, config.mel_utterances
        )
    statistics.info["provenance"] = provenance(
        decoder=config.decoder, data=config.data, split=config.split, precision=precision_of(model)
    )
    statistics.save_pretrained(config.out)
    save_config(config, Path(config.out) / "config.yaml")
    return statistics


def summary(statistics: VerifierStatistics) -> str:
    """Return the statistics as readable text."""
    accuracy = statistics.rank_accuracy
    lines = [
        f"{len(statistics.bigram_keys)} of {statistics.states**2} token pairs occur, "
        f"{int(statistics.bigram_counts.sum())} counted",
        "probability that the base head draws a draft head's i-th best id, %:",
    ]
    lines += [
        f"  head {d + 2}: " + " ".join(f"{100 * p:5.1f}" for p in row)
        for d, row in enumerate(accuracy.tolist())
    ]
    sizes = [
        (n, expected_accepted(build_tree(accuracy, n).paths, accuracy)) for n in (4, 8, 16, 32, 64)
    ]
    lines.append(
        "expected tokens per pass with a tree of: "
        + ", ".join(f"{n} nodes {1 + accepted:.2f}" for n, accepted in sizes)
    )
    curve = zip(
        statistics.entropy_thresholds.tolist(), statistics.entropy_lengths.tolist(), strict=True
    )
    if len(counts := statistics.mel_counts):
        lines.append(
            f"mean mel frames of {int((counts > 0).sum())} of {len(counts)} codes, from "
            f"{int(counts.sum())} tokens"
        )
    lines.append(
        "entropy threshold (nats) -> tokens per pass: "
        + ", ".join(f"{h:.2f} {n:.2f}" for h, n in curve)
    )
    return "\n".join(lines)


CONFIG = FitConfig


def main(arguments: Sequence[str] | None = None) -> None:
    print(summary(run_claimed(run, load_config(CONFIG, arguments))))


if __name__ == "__main__":
    sys.exit(run_command("eval.analysis.fit_verifiers", main))
