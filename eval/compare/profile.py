"""Guidance profile: word error rate of every fixed chunk size (paper §3.2.3).

    dcar profile decoder=runs/car data=runs/prepared out=runs/profile
    accelerate launch -m dcar.cli profile --config profile_paper

CAR-1..K decode development utterances, and the reward recogniser transcribes them. The n sizes with
the lowest corpus WER are the guidance range of DCPO. They are measured on sampled speech, because
the teacher-forced loss is misleading. Writes profile.json, which `dcar train-policy guidance=`
reads. The profile is a comparison of fixed sizes, with the same records: an interrupted run
continues, and added sizes, seeds or utterances only cost what is missing.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState

from dcar.config import load_config, save_config, setting
from dcar.config.commands import (
    DecoderSettings,
    PromptSettings,
    RunSettings,
    SeedSettings,
    SpeechSettings,
    WaitSettings,
)
from dcar.errors import ConfigError
from dcar.process import own_device, run_claimed, run_command
from dcar.recognition.base import check_reward_recognizer
from dcar.sampling import SamplingConfig
from dcar.storage import write_text, writing
from eval.compare.config import CompareConfig
from eval.compare.processes import start
from eval.compare.run import run as compare
from eval.compare.tools import Tools, load_tools
from eval.results.types import RESYNTHESIS, Result, Row, to_json


@dataclass
class ProfileConfig(
    SeedSettings, RunSettings, WaitSettings, SpeechSettings, DecoderSettings, PromptSettings
):
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

    def compared(self, sizes: Sequence[int]) -> CompareConfig:
        """Return the settings of the comparison of these sizes."""
        shared = {f.name for f in fields(CompareConfig)} & {f.name for f in fields(self)}
        own: dict[str, Any] = {name: getattr(self, name) for name in shared - {"seeds"}}
        return CompareConfig(
            **own,
            methods=[f"car-{size}" for size in sizes],
            seeds=[self.seed + i for i in range(self.seeds)],
            prompt_seeds=[self.seed],
            scorers=[],
            timing_utterances=0,
            audio_utterances=0,
            report=False,
        )


@dataclass
class SizeRow:
    """CAR-k on all utterances. S, D, I: errors by kind; N: words of the references; ci: None for
    few utterances."""

    k: int
    wer: float
    ci: list[float] | None
    S: int
    D: int
    I: int  # noqa: E741 (the letter of the field)
    N: int
    tokens_per_pass: float
    truncated: float
    duration_ratio: float | None


@dataclass
class Profile:
    """The content of profile.json. range: the guidance range, ascending; base_checksum: of the
    decoder; wer_of_recordings: of their tokens, resynthesised."""

    rows: list[SizeRow]
    range: list[int]
    recognizer: str
    normalizer: str
    base_checksum: str
    utterances: int
    seeds: int
    sampling: SamplingConfig
    wer_of_recordings: float
    provenance: dict[str, Any]


def run(config: ProfileConfig, tools: Tools | None = None) -> Profile:
    """Measure every chunk size and choose the guidance range; write profile.json and profile.yaml
    into `config.out`. `tools` replaces what the config would load.

    Raises RewardError if the recogniser does not understand recordings, and the errors of a
    comparison. Finished records stay in `out`, and the next run uses them.
    """
    state, meeting = start(config)
    tools = tools or load_tools(config.compared([1]), own_device(config.device))
    tools = replace(tools, recording=None)  # their tokens are what decoders learn
    decoder = tools.models.decoder
    sizes = config.sizes or list(range(1, decoder.config.num_prediction_heads + 1))
    if config.range_size > len(sizes):
        raise ConfigError(
            f"range_size {config.range_size} must be between 1 and {len(sizes)}, the number of "
            "measured sizes"
        )
    first = compare(config.compared(sizes[:1]), tools)
    check_reward_recognizer(tools.recognizer.name, of_recordings(first), config.max_reward_wer)
    result = compare(config.compared(sizes), tools)
    profile = summary(result, decoder.checksum(), config.range_size)
    if state.is_main_process:
        with writing(Path(config.out)):
            write_text(Path(config.out) / "profile.json", to_json(profile, indent=1) + "\n")
            save_config(config, Path(config.out) / "profile.yaml")
    meeting.wait("writing profile.json")
    return profile


def of_recordings(result: Result) -> float:
    """Return the word error rate of the tokens of recordings; NaN without any."""
    rates = [row.wer.value for row in result.first.rows if row.method == RESYNTHESIS]
    return rates[0] if rates else float("nan")


def summary(result: Result, checksum: str, range_size: int) -> Profile:
    """Return the content of profile.json from a comparison of fixed sizes."""
    rows = list(map(size_row, result.first.spoken))
    # at equal WER, the faster one
    best = sorted(rows, key=lambda row: (row.wer, -row.k))[:range_size]
    return Profile(
        rows=rows,
        range=sorted(row.k for row in best),
        recognizer=result.recognizer,
        normalizer=result.normalizer,
        base_checksum=checksum,
        utterances=result.first.utterances,
        seeds=len(result.seeds),
        sampling=result.sampling,
        wer_of_recordings=of_recordings(result),
        provenance=result.provenance,
    )


def size_row(row: Row) -> SizeRow:
    """Return a row of the profile from one of the comparison."""
    assert row.spec is not None
    assert row.tokens_per_pass is not None
    assert row.truncation_rate is not None
    of = row.errors
    return SizeRow(
        k=int(row.spec["size"]),
        wer=row.wer.value,
        ci=row.wer.ends,
        S=of.substitutions,
        D=of.deletions,
        I=of.insertions,
        N=of.reference_words,
        tokens_per_pass=row.tokens_per_pass,
        truncated=row.truncation_rate,
        duration_ratio=row.duration_ratio,
    )


def table(profile: Profile) -> str:
    lines = ["  k  error %  95 % interval    S    D    I  tokens/pass  truncated"]
    for r in profile.rows:
        mark = "*" if r.k in profile.range else " "
        ends = " – ".join(f"{100 * end:5.1f}" for end in r.ci) if r.ci else "–"
        lines.append(
            f"{mark}{r.k:2d}  {100 * r.wer:6.2f}   {ends:13}  {r.S:5d}{r.D:5d}{r.I:5d}  "
            f"{r.tokens_per_pass:11.2f}  {100 * r.truncated:7.1f} %"
        )
    return "\n".join([*lines, f"guidance range: {profile.range} (recogniser {profile.recognizer})"])


CONFIG = ProfileConfig


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    profile = run_claimed(run, load_config(CONFIG, arguments), resumes=True)
    if PartialState().is_main_process:
        print(table(profile))


if __name__ == "__main__":
    sys.exit(run_command("eval.compare.profile", main))
