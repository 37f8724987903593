"""Tools of the benchmark: rows of its table, interleaved repeats, equal work, and the bytes that a
step has to read."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from dcar.decoding import Prompt
from dcar.model.draft import AnyDecoder
from dcar.sampling import SamplingConfig
from eval.results.timing import synchronize
from heads.build import HeadCosts, head_costs


@dataclass(frozen=True)
class SpeedRow:
    """Row of the benchmark's table: what was measured, with its unit; the values by label ("" for
    the only or first one); and what to compare them with."""

    what: str
    values: Mapping[str, float]
    compare: str = ""

    @property
    def measured(self) -> str:
        """Values with their labels as text; a row without values was not measured."""
        texts = [f"{number(value)} {label}".strip() for label, value in self.values.items()]
        return "; ".join(texts) or "not measured"

    def __str__(self) -> str:
        return f"  {self.what}: {self.measured}" + (f"  [{self.compare}]" if self.compare else "")


def number(value: float) -> str:
    """Format a number with three digits or more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


class TimedRun(NamedTuple):
    """Median seconds of a run, and the result of its last repeat."""

    seconds: float
    result: Any


def interleaved(
    runs: Mapping[str, Callable[[], Any]], repeats: int, device: str | torch.device
) -> dict[str, TimedRun]:
    """Time each run in `repeats` rounds of rotating order; a first round is a warm-up."""
    names, results, device = list(runs), dict[str, Any](), torch.device(device)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            synchronize(device)
            started = time.perf_counter()
            results[name] = runs[name]()
            synchronize(device)
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: TimedRun(median(seconds[name]), results[name]) for name in names}


@dataclass(frozen=True)
class Load:
    """Work of a run: a text of `text` units after a prompt of `prompt` tokens, exactly `tokens`
    tokens long."""

    text: int
    prompt: int
    tokens: int

    def prompts(self, model: AnyDecoder, count: int = 1) -> list[Prompt]:
        """Return prompts of different content, u0, u1, …"""
        c = model.config
        return [
            Prompt(
                f"u{i}",
                tuple((7 * i + 3 * j) % (c.text_vocab_size - 1) + 1 for j in range(self.text)),
                tuple((5 * i + 11 * j) % c.speech_vocab_size for j in range(self.prompt)),
            )
            for i in range(count)
        ]

    def sampling(self, temperature: float = 1.0) -> SamplingConfig:
        """Return settings under which EOS is forbidden until the end."""
        return SamplingConfig(
            temperature,
            min_tokens=self.tokens + 16,
            max_tokens=self.tokens,
            max_tokens_per_text_unit=float(self.tokens),
        )


@dataclass(frozen=True)
class Costs:
    """Bytes that a step at batch 1 reads, and the time in which this machine reads them. Of the
    embedding tables a step reads only rows, so they do not count."""

    far: int  # parameters of the trunk and the base head
    heads: HeadCosts
    parameter_bytes: int
    position_bytes: int  # of the KV cache
    bytes_per_second: float

    def parameters(self, k: float) -> float:
        """Return the number of parameters that a step which keeps k tokens reads."""
        return self.far + self.heads.read(k)

    def floor_ms(self, k: float) -> float:
        """Return the milliseconds in which they are read."""
        return 1e3 * self.parameter_bytes * self.parameters(k) / self.bytes_per_second


def measure_costs(model: AnyDecoder) -> Costs:
    """Count what a step reads, and measure the rate of reading so many weights again and again, as
    for a small model that fits a cache."""
    weight, config = model.norm.weight, model.config
    trunk = sum(p.numel() for p in (*model.layers.parameters(), *model.norm.parameters()))
    far, size = trunk + model.heads.base.weight.numel(), weight.element_size()
    rows = max(1, min(far, 64 << 20) // 1024)
    matrix = torch.ones(rows, 1024, device=weight.device, dtype=weight.dtype)
    vector = torch.ones(1024, device=weight.device, dtype=weight.dtype)
    times = 1 if weight.device.type == "cpu" else 20  # or the launch of one would count
    read = {"": lambda: [matrix @ vector for _ in range(times)]}
    seconds = min(interleaved(read, 1, weight.device)[""].seconds for _ in range(10))
    kv = 2 * config.num_layers * config.hidden_size * size
    return Costs(far, head_costs(model.heads), size, kv, times * matrix.nbytes / seconds)
