"""Guidance profile: word error rate of every fixed chunk size (paper §3.2.3).

    dcar profile decoder=runs/car data=runs/prepared out=runs/profile

CAR-1..K decode development utterances, and the reward recogniser transcribes them. The n sizes with
the lowest corpus WER are the guidance range of DCPO. They are measured on sampled speech, because
the teacher-forced loss is misleading. Writes profile.json, which `rl.train guidance=` reads.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dcar.config import load_config, save_config, setting
from dcar.config.commands import (
    DecoderSettings,
    PromptSettings,
    RunSettings,
    SeedSettings,
    SpeechSettings,
)
from dcar.decoding import FixedChunk, decode
from dcar.errors import ConfigError, RewardError
from dcar.model.draft import AnyDecoder
from dcar.model.load import load_decoder
from dcar.model.precision import precision_of
from dcar.process import own_device, run_claimed, run_command
from dcar.progress import Progress
from dcar.prompts.items import PromptItem
from dcar.prompts.load import load_prompts, vocoder_for
from dcar.recognition.base import Recognizer
from dcar.recognition.load import load_recognizer
from dcar.sampling import SamplingConfig
from dcar.text.bootstrap import corpus_interval
from dcar.text.languages import normalizers_of
from dcar.text.wer import corpus_wer
from dcar.tracking import provenance, write_json
from dcar.vocoder.base import Vocoder
from rl.transcription import (
    RolloutRecord,
    check_reads,
    check_recognizer,
    ground_truth_errors,
    synthesise,
    transcribe,
)


@dataclass
class ProfileConfig(SeedSettings, RunSettings, SpeechSettings, DecoderSettings, PromptSettings):
    """Settings of the guidance profile."""

    out: str = "runs/profile"
    split: str = "dev"
    limit: int = 100  # the paper: 500
    batch_size: int = 32
    recognizer: str = "starter"
    seeds: int = setting(
        1, "Number of times that every utterance is decoded, each with another seed.", minimum=1
    )
    range_size: int = setting(2, "Number n of chunk sizes in the guidance range.", minimum=1)
    sizes: list[int] = setting([], "Chunk sizes to measure; empty = 1..K.", minimum=1)
    max_reward_wer: float = setting(
        0.5,
        "Largest word error rate of the recogniser on resynthesised recordings; one with more "
        "errors is refused.",
        minimum=0,
    )
    sampling: SamplingConfig = setting(
        SamplingConfig, "Sampling settings of the tokens.", bare=True
    )


@dataclass
class SizeRow:
    """CAR-k on all utterances. S, D, I: errors by kind; N: words of the references; ci: None for
    few utterances; coverage: part of the utterances that have a transcript."""

    k: int
    wer: float
    ci: list[float] | None
    S: int
    D: int
    I: int  # noqa: E741 (the letter of the field)
    N: int
    coverage: float
    tokens_per_pass: float
    truncated: float
    duration_ratio: float


@dataclass
class Profile:
    """The content of profile.json. range: the guidance range, ascending; base_checksum: of the
    decoder."""

    rows: list[SizeRow]
    range: list[int]
    recognizer: str
    normalizer: str
    base_checksum: str
    utterances: int
    seeds: int
    sampling: SamplingConfig


def profile(
    base: AnyDecoder,
    items: Sequence[PromptItem],
    vocoder: Vocoder,
    recognizer: Recognizer,
    sampling: SamplingConfig,
    *,
    sizes: Sequence[int] = (),
    seeds: int = 1,
    range_size: int = 2,
    seed: int = 0,
    batch_size: int = 32,
    progress: bool = False,
) -> Profile:
    """Measure every chunk size and choose the guidance range. Raises RewardError if more than a
    fifth of the utterances of a size have no transcript."""
    sizes = list(sizes) or list(range(1, base.config.num_prediction_heads + 1))
    if not 1 <= range_size <= len(sizes):
        raise ConfigError(
            f"range_size {range_size} must be between 1 and {len(sizes)}, the number of measured "
            "sizes"
        )
    rows = [
        measure(
            base, items, vocoder, recognizer, sampling, size, range(seed, seed + seeds), batch_size
        )
        for size in Progress(sizes, desc="guidance profile", disable=not progress)
    ]
    # at equal WER, the faster one
    best = sorted(rows, key=lambda row: (row.wer, -row.k))[:range_size]
    return Profile(
        rows=rows,
        range=sorted(row.k for row in best),
        recognizer=recognizer.name,
        normalizer=normalizers_of(i.language for i in items),
        base_checksum=base.checksum() if hasattr(base, "checksum") else "",
        utterances=len(items),
        seeds=seeds,
        sampling=sampling,
    )


def measure(
    base: AnyDecoder,
    items: Sequence[PromptItem],
    vocoder: Vocoder,
    recognizer: Recognizer,
    sampling: SamplingConfig,
    size: int,
    seeds: Sequence[int],
    batch_size: int,
) -> SizeRow:
    """Return one row of the profile: CAR-`size` on all items, once per seed."""
    records = []
    for seed in seeds:
        results = decode(base, items, FixedChunk(size), sampling, seed=seed, batch_size=batch_size)
        decoded = [
            RolloutRecord(item, 0, size, result)
            for item, result in zip(items, results, strict=True)
        ]
        synthesise(decoded, vocoder)
        transcribe(decoded, recognizer)
        records += decoded
    score = corpus_wer([r.errors for r in records])
    if score.coverage < 0.8:
        raise RewardError(
            f"CAR-{size}: {1 - score.coverage:.0%} of the utterances have no transcript; first "
            f"cause: {next(r.failure for r in records if r.failure)}"
        )
    sums: dict[str, tuple[int, int]] = {}  # utterance -> errors and words over all seeds
    for r in records:
        if r.errors is not None:
            errors, words = sums.get(r.item.utterance_id, (0, 0))
            sums[r.item.utterance_id] = (errors + r.errors.errors, words + r.errors.reference_words)
    interval = corpus_interval(*zip(*sums.values(), strict=True))
    tokens = sum(len(r.result.tokens) for r in records)
    return SizeRow(
        k=size,
        wer=score.wer,
        ci=interval.ends,
        S=score.substitutions,
        D=score.deletions,
        I=score.insertions,
        N=score.reference_words,
        coverage=score.coverage,
        tokens_per_pass=tokens / sum(r.result.passes for r in records),
        truncated=sum(r.result.truncated for r in records) / len(records),
        duration_ratio=tokens / sum(len(r.item.reference_tokens) for r in records),
    )


def run(config: ProfileConfig) -> Profile:
    """Measure the profile, and write profile.json and config.yaml into `config.out`."""
    device = own_device(config.device)
    base = load_decoder(config.decoder, device, dtype=config.dtype)
    items = load_prompts(
        config.data, config.split, base, config.prompt_tokens, config.seed, config.limit
    )
    vocoder = vocoder_for(base, config.data, items, config.vocoder, device)
    recognizer = load_recognizer(config.recognizer, device)
    check_reads(recognizer, items, needed=False)
    recordings = corpus_wer(list(ground_truth_errors(items, vocoder, recognizer).values())).wer
    check_recognizer(recognizer.name, recordings, config.max_reward_wer)
    result = profile(
        base,
        items,
        vocoder,
        recognizer,
        config.sampling,
        sizes=config.sizes,
        seeds=config.seeds,
        range_size=config.range_size,
        seed=config.seed,
        batch_size=config.batch_size,
        progress=True,
    )
    out = Path(config.out)
    about = provenance(
        decoder=config.decoder, data=config.data, split=config.split, precision=precision_of(base)
    )
    write_json(
        out / "profile.json",
        {**asdict(result), "wer_of_recordings": recordings, "provenance": about},
    )
    save_config(config, out / "config.yaml")
    return result


def table(result: Profile) -> str:
    lines = ["  k  error %  95 % interval    S    D    I  tokens/pass  truncated"]
    for r in result.rows:
        mark = "*" if r.k in result.range else " "
        ends = " – ".join(f"{100 * end:5.1f}" for end in r.ci) if r.ci else "–"
        lines.append(
            f"{mark}{r.k:2d}  {100 * r.wer:6.2f}   {ends:13}  {r.S:5d}{r.D:5d}{r.I:5d}  "
            f"{r.tokens_per_pass:11.2f}  {100 * r.truncated:7.1f} %"
        )
    return "\n".join([*lines, f"guidance range: {result.range} (recogniser {result.recognizer})"])


CONFIG = ProfileConfig


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(table(run_claimed(run, load_config(CONFIG, arguments))))


if __name__ == "__main__":
    sys.exit(run_command("rl.profile", main))
