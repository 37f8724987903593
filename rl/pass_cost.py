"""Reward for speed: the time that decoding takes, at an exchange rate in word errors.

A pass that keeps k tokens, with its decision, takes fixed + per_token * k ms, of which per_token
contains the vocoder. An utterance of mean chunk size k therefore takes fixed / k + per_token ms a
token. The reward falls by `points_per_percent` points of word error (0.01 of the reward each) for
every per cent that this is above the mean. On a CPU it hardly falls beyond ten tokens; on a GPU a
pass takes as long for sixteen tokens as for one. Not in the paper.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dcar.decoding import Engine, PolicyChunk
from dcar.model.draft import AnyDecoder
from dcar.prepare.prepared import read_json
from dcar.prompts.items import PromptItem
from dcar.sampling import SamplingConfig
from dcar.tracking import write_json
from dcar.vocoder.base import Vocoder
from dcar.vocoder.voicing import voice
from heads.policy import ChunkPolicy

TOKENS = 240  # of a timed utterance
REPEATS = 5


class PassCost(NamedTuple):
    """Time in milliseconds."""

    fixed: float  # of a pass with its decision, whatever it reads
    per_token: float  # of a token: in the pass that reads it, and in the vocoder

    def per_token_at(self, mean_size: float) -> float:
        """Return the ms per token of speech in chunks of this mean size."""
        return self.fixed / mean_size + self.per_token

    def saved(self, sizes: Sequence[np.ndarray], mean_size: float, window: int) -> list[np.ndarray]:
        """Return what each decision of several rollouts saves against chunks of the mean size,
        given the sizes that were chosen: the share of the time of `window` tokens.

        A chunk of k tokens takes fixed + per_token k ms, and k tokens take k times the mean. Over
        an utterance of n tokens the sum is n / window times the share of its time that it saves.
        """
        share = self.fixed / (window * self.per_token_at(mean_size))
        return [share * (chosen / mean_size - 1) for chosen in sizes]


def measure_pass_cost(
    base: AnyDecoder,
    policy: ChunkPolicy,
    vocoder: Vocoder,
    item: PromptItem,
    sampling: SamplingConfig,
    num_candidates: int,
) -> PassCost:
    """Time decoding of one utterance at a time in the shortest and the longest chunks that the
    policy can choose, and the vocoder, on this machine. On a CPU the time of this process counts,
    which waits for no other, but is a fifth longer beside others."""
    device = next(base.parameters()).device
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    allowed = policy.config.sizes or range(1, policy.config.num_actions + 1)
    sizes = [min(allowed), max(allowed)]

    def run(size: int, tokens: int) -> Callable[[], Any]:
        fixed_length = SamplingConfig(
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            min_tokens=tokens,
            max_tokens=tokens,
            max_tokens_per_text_unit=tokens,
        )
        forced = {item.utterance_id: [size]}
        method = PolicyChunk(policy, "sample", forced=forced, num_candidates=num_candidates)
        engine = Engine(base, method, fixed_length, 1)
        return lambda: engine.decode([item])[0].tokens

    runs: dict[int, Callable[[], Any]] = {size: run(size, TOKENS) for size in sizes}
    runs[0] = run(sizes[-1], 1)  # what precedes the passes
    spoken = [list(runs[sizes[-1]]())]
    runs[-1] = lambda: voice(vocoder, spoken, [item.speaker_embedding], [item.text])
    best = {size: float("inf") for size in runs}
    for _ in range(1 + REPEATS):  # the first one warms up
        for size, call in runs.items():
            started = clock()
            call()
            best[size] = min(best[size], 1e3 * (clock() - started))
    passes = [-(-TOKENS // size) - 1 for size in sizes]  # the last chunk is not read
    read = [TOKENS - size for size in sizes]
    (fixed, per_token), *_ = np.linalg.lstsq(
        np.stack((passes, read), 1), np.array([best[size] - best[0] for size in sizes])
    )
    return PassCost(max(float(fixed), 1e-6), max(float(per_token), 0.0) + best[-1] / TOKENS)


def stored_pass_cost(path: Path, again: bool, measure: Callable[[], PassCost]) -> PassCost:
    """Return the cost in a file, which a run that is resumed has written, or else (or `again`) a
    measured one, and store it."""
    if not again and (stored := read_json(path)) is not None:
        return PassCost(**stored)
    cost = measure()
    write_json(path, cost._asdict())
    return cost
