"""Which reward is worth its time? Rank correlation of rewards with a judge's word errors, within groups of rollouts.

    dcar reward-quality decoder=runs/car data=runs/prepared rewards=[wer@starter,token_distance] judge=moonshine

A policy learns from how the rollouts of one sentence differ, so a reward is as good as it orders them as the judge
does. Every sentence is spoken several times with chunk sizes drawn at random and common draws of tokens: the rollouts
differ by decisions only. Per reward: Spearman's rank correlation with minus the word errors of the judge within each
group, mean and standard error over the groups in which both vary; CPU seconds of a rollout, vocoder included; and
squared correlation per CPU second, which is what rollouts of a given time add up to. Rewards are named by kind and
recogniser: wer@starter, cer@…, log_likelihood@…, token_likelihood@starter (or @FOLDER, of `dcar
train-token-recognizer`), or token_distance. Writes reward_quality.json.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from tqdm import tqdm

from dcar.config import load_config, save_config, setting
from dcar.config.schema import seed_setting
from dcar.decoding import ChunkMethod, RandomChunk, decode
from dcar.decoding.fast.passes import fast
from dcar.errors import ConfigError, RewardError
from dcar.model.load import load_decoder
from dcar.process import run_command
from dcar.prompts.load import load_prompts, vocoder_for
from dcar.recognition.base import Recognizer
from dcar.recognition.load import load_recognizer
from dcar.sampling import SamplingConfig
from dcar.tracking import provenance, write_json
from rl.rewards import (
    CERReward,
    LikelihoodReward,
    Reward,
    RolloutRecord,
    TokenLikelihoodReward,
    TokenReward,
    WERReward,
    corpus_distances,
    corpus_token_recognizer,
)
from rl.rewards import transcribe as hear
from rl.rollout import synthesise


@dataclass
class RewardQualityConfig:
    """Settings of `dcar reward-quality`."""

    decoder: str = setting("", "Directory of the decoder; starter = the shipped one.",
                           names=("starter",))
    data: str = setting("", "Folder written by `dcar prepare`.", place="folder")
    out: str = setting("runs/reward_quality", "Folder to write.", place="folder")
    split: str = setting("train", "Split that is spoken; policies are trained on train.")
    utterances: int = setting(48, "Sentences, a group of rollouts each.", minimum=2)
    num_generations: int = setting(8, "Rollouts of a sentence.", minimum=3)
    sizes: list[int] = setting([], "Chunk sizes that are drawn; empty = 1..K.", minimum=1)
    rewards: list[str] = setting(["wer@starter", "log_likelihood@starter", "token_likelihood@starter",
                                  "token_distance"],
                                 "What is judged: wer, cer or log_likelihood, each @recogniser, token_likelihood@ a "
                                 "recogniser of tokens, and token_distance.")
    judge: str = setting("moonshine", "Recogniser whose word errors count; none of those that reward.")
    prompt_tokens: int = setting(25, "Length of the speech prompt.", minimum=1)
    vocoder: str = setting("starter", "Folder, or a name that dcar.vocoder.load lists.")
    seed: int = seed_setting(0, "Of sentences and speech.")
    sampling: SamplingConfig = setting(SamplingConfig, "How tokens are drawn.")


KINDS = {"wer": WERReward, "cer": CERReward, "log_likelihood": LikelihoodReward}


def make(names: Sequence[str], judge: str, data: str) -> dict[str, Reward]:
    """The rewards by name. ConfigError for an unknown one, or one that is the judge's."""
    recognizers: dict[str, Recognizer] = {}
    made: dict[str, Reward] = {}
    for name in names:
        kind, _, by = name.partition("@")
        if name == TokenReward.name:
            made[name] = TokenReward(corpus_distances(data))
        elif kind == TokenLikelihoodReward.name and by:
            made[name] = TokenLikelihoodReward(corpus_token_recognizer(by, data))
        elif kind in KINDS and by:
            if by == judge:
                raise ConfigError(f"reward {name} is the judge's own opinion; give another judge")
            recognizers.setdefault(by, load_recognizer(by))
            made[name] = KINDS[kind](recognizers[by])
        else:
            raise ConfigError(f"unknown reward '{name}': write wer@starter, cer@…, log_likelihood@…, "
                              "token_likelihood@starter, or token_distance")
    return made


def correlation(values: np.ndarray, errors: np.ndarray) -> dict[str, float]:
    """Mean and standard error of Spearman's rank correlation of a reward [groups, members] with minus the judge's
    errors [groups, members], over the groups where neither is constant (their number: groups)."""
    found = [float(spearmanr(v, -e).statistic) for v, e in zip(values, errors, strict=True)
             if np.isfinite(v).all() and np.ptp(v) > 0 and np.ptp(e) > 0]
    if len(found) < 2:
        raise RewardError(f"{len(found)} groups in which reward and judge differ: give more utterances, or more "
                          "num_generations")
    return {"rank_correlation": float(np.mean(found)), "standard_error": float(np.std(found, ddof=1) / len(found)**0.5),
            "groups": len(found)}


def run(config: RewardQualityConfig) -> dict[str, Any]:
    """Speak, judge, and write reward_quality.json into `config.out`."""
    for name in ("decoder", "data"):
        if not getattr(config, name):
            raise ConfigError(f"{name} is not set: give {name}=…")
    base = load_decoder(config.decoder)
    rewards = make(config.rewards, config.judge, config.data)
    items = load_prompts(config.data, config.split, base, config.prompt_tokens, config.seed, config.utterances)
    vocoder = vocoder_for(base, config.data, items, config.vocoder)
    method = ChunkMethod(RandomChunk(sorted(set(config.sizes)) or range(1, base.config.num_prediction_heads + 1)))
    group = config.num_generations
    results = decode(fast(base), [i.prompt for i in items], method, config.sampling, seed=config.seed, group_size=group,
                     share_token_draws=True)
    records = [RolloutRecord(items[i // group], i % group, 0, result) for i, result in enumerate(results)]
    started = time.process_time()
    synthesise(records, vocoder)
    voicing = (time.process_time() - started) / len(records)
    rows = []
    for name, reward in tqdm(rewards.items(), desc="rewards"):
        copies = [RolloutRecord(r.item, r.member, 0, r.result, r.wave, r.sample_rate) for r in records]
        started = time.process_time()
        values = np.array(reward(copies)).reshape(-1, group)
        seconds = (time.process_time() - started) / len(records) + (voicing if reward.hears else 0.0)
        rows.append({"reward": name, "values": values, "seconds": seconds})
    hear(records, load_recognizer(config.judge))
    errors = np.array([math.nan if r.errors is None else r.errors.errors for r in records]).reshape(-1, group)
    if np.isnan(errors).any():
        raise RewardError(f"the judge {config.judge} failed: {next(r.failure for r in records if r.failure)}")
    for row in rows:
        row.update(correlation(row.pop("values"), errors))
        row["per_cpu_second"] = row["rank_correlation"] ** 2 / row["seconds"]
    words = sum(r.errors.reference_words for r in records if r.errors)
    out = {"rows": rows, "judge": config.judge, "wer": float(errors.sum() / words), "sampling": vars(config.sampling),
           "best_of_group": float(errors.min(1).sum() / (words / group)), "method": method.name,
           "utterances": len(items), "num_generations": group, "seconds_vocoder": voicing,
           "provenance": provenance(decoder=config.decoder, data=config.data, split=config.split)}
    write_json(Path(config.out) / "reward_quality.json", out)
    save_config(config, Path(config.out) / "config.yaml")
    return out


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['utterances']} sentences x {result['num_generations']} rollouts of {result['method']}, judge "
             f"{result['judge']}: WER {100 * result['wer']:.1f} %, best of each group "
             f"{100 * result['best_of_group']:.1f} %",
             f"{'reward':26} rank correlation    groups  CPU s a rollout  r² a CPU second"]
    for r in sorted(result["rows"], key=lambda r: -r["per_cpu_second"]):
        lines.append(f"{r['reward']:26} {r['rank_correlation']:8.2f} ± {r['standard_error']:.2f}  {r['groups']:8d}  "
                     f"{r['seconds']:15.4f}  {r['per_cpu_second']:15.2f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(table(run(load_config(RewardQualityConfig, arguments))))


if __name__ == "__main__":
    sys.exit(run_command("rl.reward_quality", main))
