"""What the bookkeeping of each verifier costs beside a step of the paper-size decoder.

    python -m eval.speed.verification                      # ms a round, and the share of a step
    python -m eval.speed.verification only=[mtp-viterbi] viterbi_heads=4 viterbi_k=25

Bookkeeping is what a method does between two passes besides drafting and computing q: acceptance, residual, groups.
A benchmark is one entry of BENCHMARKS: a function that prepares token probabilities and returns what is timed. The last
line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from dcar.config import check, load_config, setting
from dcar.errors import ConfigError
from dcar.model.car import CARConfig, CARDecoder
from dcar.process import run_command
from dcar.sampling import sample, uniform, utterance_keys
from dcar.tracking import machine
from eval.speed.measure import Load, measure_car
from eval.verifiers import mtp_viterbi, vadusa
from eval.verifiers.chain import ChainVerifier, Uniforms
from eval.verifiers.drafters import HeadDrafter
from eval.verifiers.groups import build_groups
from eval.verifiers.pcg import GroupVerifier
from eval.verifiers.sd import SpeculativeDecoding
from eval.verifiers.ssd import TolerantDecoding
from eval.verifiers.topk_verify import TopKVerify
from eval.verifiers.typical import TypicalAcceptance


@dataclass
class BenchmarkConfig:
    """Settings of the benchmark of the verifiers."""

    codes: int = setting(4096, "Of the vocabulary, EOS not counted.", minimum=1)
    length: int = setting(3, "Of a draft.", minimum=1)
    repeats: int = setting(50, "Rounds that are timed.", minimum=1)
    step_repeats: int = setting(3, "Of the decoder's step, CARConfig's defaults; 0 = do not measure it.", minimum=0)
    threads: int = setting(1, "Of torch.", minimum=1)
    tree_nodes: int = setting(vadusa.NODES, "Of vadusa's trees.", minimum=1)
    viterbi_heads: int = setting(7, "Heads of mtp-viterbi.", minimum=1)
    viterbi_k: int = setting(10, "Candidates of each head.", minimum=1)
    only: list[str] = setting([], "Names of BENCHMARKS; empty = all.")

    def __post_init__(self) -> None:
        check(self)
        if unknown := [name for name in self.only if name not in BENCHMARKS]:
            raise ConfigError(f"unknown benchmarks {unknown}; known: {', '.join(BENCHMARKS)}")


@dataclass
class Round:
    """Token probabilities of one draft at batch 1, about as far apart as those of a decoder and its draft."""

    q: Tensor  # [1, m + 1, V]
    p: Tensor  # [1, m, V]
    tokens: Tensor  # [1, m], drawn from p
    draws: Uniforms
    eos: int


def random_round(codes: int, length: int, seed: int = 0) -> Round:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, length + 1, codes + 1, generator=generator)
    p = (logits[:, :-1] + torch.randn(1, length, codes + 1, generator=generator)).softmax(-1)
    position = torch.arange(length)[None]
    keys = utterance_keys(seed, ["benchmark"])
    return Round(logits.softmax(-1), p, sample(p, uniform(keys, "token", position)), Uniforms(keys, position), codes)


def verification(make: Callable[[HeadDrafter, int], ChainVerifier]) -> Callable[[BenchmarkConfig], Callable[[], Any]]:
    """Time acceptance of a whole draft and one replacement: what a round takes where a token is refused."""

    def prepare(config: BenchmarkConfig) -> Callable[[], Any]:
        method = make(HeadDrafter(config.length), config.codes)
        rounds = [random_round(config.codes, config.length, seed) for seed in range(8)]
        turn = iter(range(1 << 60))

        def run() -> None:
            r = rounds[next(turn) % len(rounds)]
            method.accept(r.q[:, :-1], r.p, r.tokens, r.eos, r.draws)
            method.replace(r.q[:, 0], r.p[:, 0], r.tokens[:, 0], r.eos, Uniforms(r.draws.keys, r.draws.positions[:, 0]))

        return run

    return prepare


def _grouped(drafter: HeadDrafter, codes: int) -> GroupVerifier:
    """Groups of a few dozen codes: 8 families of embeddings for every 256 codes."""
    generator = torch.Generator().manual_seed(0)
    families = torch.randn(max(1, codes // 32), 64, generator=generator)
    embedding = families[torch.arange(codes) % len(families)] + 0.5 * torch.randn(codes, 64, generator=generator)
    return GroupVerifier("pcg", drafter, build_groups(embedding, 0.42))


BENCHMARKS: dict[str, Callable[[BenchmarkConfig], Callable[[], Any]]] = {
    "sd": verification(lambda drafter, codes: SpeculativeDecoding("sd", drafter)),
    "ssd": verification(lambda drafter, codes: TolerantDecoding("ssd", drafter, 0.4)),
    "pcg": verification(_grouped),
    "typical": verification(lambda drafter, codes: TypicalAcceptance("typical", drafter)),
    "topk-verify": verification(lambda drafter, codes: TopKVerify("topk-verify", drafter, 50)),
    "vadusa": lambda config: vadusa.bookkeeping_case(config.tree_nodes, vocabulary=config.codes + 1),
    "mtp-viterbi": lambda config: mtp_viterbi.bookkeeping_case(config.viterbi_heads, config.viterbi_k,
                                                               config.codes + 1),
}
"""name -> what prepares it; the returned function is what a method does once a round."""


def step_milliseconds(repeats: int) -> float:
    """Median ms of a step of a random decoder of the paper's size (CAR-1, batch 1, on the CPU)."""
    torch.manual_seed(0)
    model = CARDecoder(CARConfig(bos=True)).eval()
    return measure_car(model, Load(20, 10, 12), [1], repeats)[1]["ms_per_step"].median


def milliseconds(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median and shortest of `repeats` calls, each warmed up."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    times = [1e3 * timer.timeit(1).median for _ in range(repeats)]
    return statistics.median(times), min(times)


def run(config: BenchmarkConfig) -> dict[str, Any]:
    """Measure and print; returns the object of the last line."""
    torch.set_num_threads(config.threads)
    print(f"machine: {machine()}; {config.codes} codes, drafts of {config.length}, medians of {config.repeats}")
    result: dict[str, Any] = {"machine": machine(), "codes": config.codes, "length": config.length}
    step = step_milliseconds(config.step_repeats) if config.step_repeats else None
    if step is not None:
        print(f"a step of the paper-size decoder (CAR-1, batch 1): {step:.1f} ms")
    result |= {"step_ms": step, "bookkeeping_ms": {}}
    for name in config.only or BENCHMARKS:
        ms, least = milliseconds(BENCHMARKS[name](config), config.repeats)
        result["bookkeeping_ms"][name] = {"median": ms, "least": least}
        print(f"{name:16} {ms:7.3f} ms a round (at least {least:.3f})"
              + (f", {100 * ms / step:5.2f} % of a step" if step else ""))
    print(json.dumps(result))
    return result


def main(arguments: list[str] | None = None) -> None:
    run(load_config(BenchmarkConfig, arguments))


if __name__ == "__main__":
    sys.exit(run_command("eval.speed.verification", main))
