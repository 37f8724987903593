"""What the Viterbi choice of `mtp-viterbi` costs beside a step of the decoder.

    python -m eval.verifiers.viterbi_benchmark
    python -m eval.verifiers.viterbi_benchmark heads=4 k=25 vocabulary=4097
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcar.config import load_config
from dcar.sampling import uniform, utterance_keys
from eval.verifiers.mtp_viterbi import ALPHA, MODES, choose
from eval.verifiers.transitions import Transitions


@dataclass
class ViterbiBenchmarkConfig:
    """Settings of the benchmark of the Viterbi choice."""

    heads: int = 7
    k: int = 10
    vocabulary: int = 2049  # codes and end of speech
    batch: int = 1
    repeats: int = 200
    threads: int = 1
    sparse: bool = False  # look transitions up among counted pairs, as for very large vocabularies


def bookkeeping_case(heads: int = 7, k: int = 10, vocabulary: int = 2049, batch: int = 1, mode: str = "argmax",
                     sparse: bool = False) -> Callable[[], tuple[Tensor, Tensor]]:
    """All that a round of `mtp-viterbi` does beyond a CAR step: best ids of each head, their transitions, the path.

    Returns a function without arguments; its laws and transitions are random and fixed.
    """
    rng = torch.Generator().manual_seed(0)
    law = (3 * torch.randn(batch, heads, vocabulary, generator=rng)).softmax(-1)
    states = vocabulary + 1
    keys = torch.randint(0, states * states, (50 * vocabulary,), generator=rng).unique()
    keys = keys[keys % states < vocabulary]  # nothing leads to the start
    transitions = Transitions(keys, torch.ones_like(keys), states, ALPHA, dense=not sparse)
    address = utterance_keys(0, [str(b) for b in range(batch)])
    position = torch.arange(heads).expand(batch, -1)

    def case() -> tuple[Tensor, Tensor]:
        u = uniform(address, "token", position) if mode == "ffbs" else None
        return choose(law, law.topk(k, dim=-1).indices, transitions, u=u)

    return case


def milliseconds(case: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and best time of a call."""
    for _ in range(10):
        case()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        case()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times), min(times)


def main(arguments: Sequence[str] | None = None) -> None:
    config = load_config(ViterbiBenchmarkConfig, arguments)
    torch.set_num_threads(config.threads)
    result = {}
    for mode in MODES[:2]:  # sampled candidates differ by their draws, not by the path
        case = bookkeeping_case(config.heads, config.k, config.vocabulary, config.batch, mode, config.sparse)
        median, best = milliseconds(case, config.repeats)
        print(f"{mode:8} n = {config.heads}, k = {config.k}, vocabulary {config.vocabulary}, batch {config.batch}: "
              f"median {median:.3f} ms, best {best:.3f} ms")
        result[mode] = {"median_ms": median, "best_ms": best}
    print(json.dumps({**vars(config), "results": result}))


if __name__ == "__main__":
    main()
