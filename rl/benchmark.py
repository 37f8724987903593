"""Rollouts and their rewards per second: this project's way against one completion after the other.

    python -m rl.benchmark base=dcar/assets/decoder policy=dcar/assets/policy data=dcar/assets/starter_prepared

`sequential` speaks, synthesises and scores every rollout by itself, in the reference loop, as a trainer does that asks
a `generate` function for one completion at a time. `loop` and `engine` are `rl.rollout.Roller`: a step's rollouts in
one batch, a prefill shared by each group, vocoder and recogniser by batches. `loop` and `engine` make the same
rollouts; `sequential` draws its members as other seeds. The reward is the same. Repeats are interleaved; the last line
is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dcar.config import check, load_config, setting
from dcar.errors import ConfigError
from dcar.model.load import load_decoder, load_policy
from dcar.process import run_command
from dcar.prompts.items import PromptItem
from dcar.prompts.load import load_prompts, vocoder_for
from dcar.recognition.load import load_recognizer
from dcar.sampling import SamplingConfig
from dcar.tracking import machine
from heads.policy import ChunkPolicy
from rl.rewards import WERReward
from rl.rollout import Roller


@dataclass
class RolloutBenchmark:
    """Settings of the rollout benchmark."""

    decoder: str = setting("", "Directory of the decoder.", old=("base",))
    policy: str = setting("", "Policy whose actions are drawn.")
    data: str = setting("", "Folder written by `dcar prepare`.", place="folder")
    split: str = setting("train", "Split of the prompts.")
    prompts: int = setting(4, "Of a step.", minimum=1)
    group: int = setting(8, "Rollouts of a prompt.", minimum=2)
    microbatches: int = setting(4, "Parts of a step; one is scored while the next is rolled out (DCPO: "
                                   "reward_microbatches).", minimum=1)
    prompt_tokens: int = setting(25, "Length of the speech prompt.", minimum=1)
    repeats: int = setting(3, "Interleaved runs of everything.", minimum=1)
    clock: str = setting("wall", "cpu: processor time of this process, where other jobs run.", choices=("wall", "cpu"))
    vocoder: str = setting("starter", "Folder, or a name that dcar.vocoder.load lists.")
    recognizer: str = setting("starter", "Reward recogniser.")
    threads: int = setting(1, "Of torch.", minimum=1)
    sampling: SamplingConfig = setting(lambda: SamplingConfig(0.8, 10, max_tokens_per_text_unit=10.0),
                                       "How tokens are drawn.", flat=True)

    def __post_init__(self) -> None:
        check(self)
        if not (self.decoder and self.policy and self.data):
            raise ConfigError("give decoder=…, policy=… and data=…")


def one_by_one(roller: Roller, policy: ChunkPolicy, items: Sequence[PromptItem], seed: int, group: int) -> list[float]:
    """Rewards of `group` rollouts of every prompt, each spoken and scored alone. `roller` makes groups of one; a
    member's draws are those of another seed."""
    return [float(roller.collect(policy, [item], [i], seed + 1000 * member).rewards[0])
            for i, item in enumerate(items) for member in range(group)]


def run(config: RolloutBenchmark) -> dict[str, object]:
    """Measure and print; returns the object of the last line."""
    torch.set_num_threads(config.threads)
    now: Callable[[], float] = time.process_time if config.clock == "cpu" else time.perf_counter
    base = load_decoder(config.decoder).requires_grad_(False)
    policy = load_policy(config.policy)
    items = load_prompts(config.data, config.split, base, config.prompt_tokens, 0, config.prompts)
    vocoder = vocoder_for(base, config.data, items, config.vocoder, policies=[policy])
    reward = WERReward(load_recognizer(config.recognizer))
    sampling = config.sampling

    def roller(decoding: str, **settings) -> Roller:
        return Roller(base, vocoder, [reward], [1.0], sampling, forced_rows="none", decoding=decoding,  # type: ignore[arg-type]
                      **settings)

    alone = roller("loop", group_size=1, overlap=False)
    parts = config.microbatches
    batched = {name: roller(name, group_size=config.group, microbatches=parts) for name in ("loop", "engine")}
    runs: dict[str, Callable[[int], object]] = {
        "sequential": lambda seed: one_by_one(alone, policy, items, seed, config.group),
        **{name: partial(r.collect, policy, items, range(len(items))) for name, r in batched.items()}}
    busy, count = os.getloadavg()[0], config.prompts * config.group
    print(f"machine: {machine()}; load {busy:.1f}; {config.clock} clock; {count} rollouts a step, {config.repeats} "
          "interleaved repeats after a warm-up")
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(config.repeats + 1):
        for name, roll in runs.items():
            started = now()
            roll(turn)
            if turn:
                seconds[name].append(now() - started)
                print(f"  {name}: {seconds[name][-1]:.2f} s", flush=True)
    result: dict[str, object] = {"machine": machine(), "load": busy, "clock": config.clock, "rollouts": count}
    for name, times in seconds.items():
        rates = [count / s for s in times]
        print(f"{name:10} {statistics.median(rates):7.2f} rollouts/s ({min(rates):.2f}–{max(rates):.2f})")
        result[name] = statistics.median(rates)
    for name, other in (("engine", "sequential"), ("engine", "loop"), ("loop", "sequential")):
        ratios = [b / a for a, b in zip(seconds[name], seconds[other], strict=True)]
        print(f"{name} over {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})")
        result[f"{name}_over_{other}"] = [statistics.median(ratios), min(ratios), max(ratios)]
    print(json.dumps(result))
    return result


def main(arguments: list[str] | None = None) -> None:
    run(load_config(RolloutBenchmark, arguments))


if __name__ == "__main__":
    sys.exit(run_command("rl.benchmark", main))
