"""Measuring tools of the speed benchmark: repeats, equal work, the bytes that a step has to
read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcar.decoding import Prompt
from dcar.model.draft import AnyDecoder
from dcar.sampling import SamplingConfig
from eval.results.timing import synchronize
from heads.build import head_costs
from heads.policy import ChunkPolicy

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def interleaved(
    runs: Mapping[Any, Callable[[], Any]],
    repeats: int,
    device: torch.device,
    now: Callable[[], float] = time.perf_counter,
) -> dict[Any, list[float]]:
    """Return the seconds of each run, `repeats` times, one after the other in rotating order;
    the first round is a warm-up."""
    names = list(runs)
    seconds: dict[Any, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            synchronize(device)
            started = now()
            runs[name]()
            synchronize(device)
            if turn:
                seconds[name].append(now() - started)
    return seconds


def read_sizes(model: AnyDecoder) -> dict[str, int]:
    """Return the parameters that one batch-1 step reads: the trunk with the base head; those
    shared by additional heads, if one of them is kept; and those of each. Of the embedding
    tables it reads only rows, so they do not count."""
    trunk = sum(p.numel() for p in (*model.layers.parameters(), *model.norm.parameters()))
    costs = head_costs(model.heads)
    return {"far": trunk + model.heads.base.weight.numel(), "heads": costs.once, "head": costs.each}


def read_rate(device: torch.device, dtype: torch.dtype, parameters: int) -> float:
    """Measure GB/s of reading `parameters` weights again and again, as for a small model that
    fits a cache."""
    matrix = torch.ones(max(1, parameters // 1024), 1024, device=device, dtype=dtype)
    vector = torch.ones(1024, device=device, dtype=dtype)
    times_each = 1 if device.type == "cpu" else 20  # or the launch of one product would count
    (times,) = interleaved(
        {"read": lambda: [matrix @ vector for _ in range(times_each)]}, 10, device
    ).values()
    return times_each * matrix.nbytes / 1e9 / min(times)


def print_card(
    name: str, model: AnyDecoder, policies: Mapping[str, ChunkPolicy], device: torch.device
) -> dict[str, Any]:
    """Print the bytes that a step of this model reads, and the least time in which this machine
    reads them: `floor_ms` by k."""
    sizes, costs = read_sizes(model), head_costs(model.heads)
    total, k_max = sum(p.numel() for p in model.parameters()), model.config.num_prediction_heads
    dtype = model.norm.weight.dtype
    rate = read_rate(device, dtype, min(sizes["far"], 64 << 20))
    policy_sizes = {
        n: sum(p.numel() for p in policy.parameters()) for n, policy in policies.items()
    }
    floor = {
        str(k): (sizes["far"] + costs.read(k)) * dtype.itemsize / rate / 1e6
        for k in range(1, k_max + 1)
    }
    kv = 2 * model.config.num_layers * model.config.hidden_size * dtype.itemsize
    print(
        f"\n== {name}: {total / 1e6:.2f} M parameters, {model.config.num_layers} layers × "
        f"{model.config.hidden_size}, {k_max} heads, {str(dtype).removeprefix('torch.')}; weights "
        f"{dtype.itemsize * total / 2**20:.1f} MiB, KV cache {kv} bytes per position\n"
        f"read per step, M parameters: FAR {sizes['far'] / 1e6:.2f}; all {k_max} heads add "
        f"{costs.read(k_max) / 1e6:.2f} ({sizes['heads'] / 1e6:.2f} shared, "
        f"{sizes['head'] / 1e6:.3f} each); "
        + "; ".join(f"policy ({n}) {size / 1e6:.2f}" for n, size in policy_sizes.items())
        + f"\nweights of this size are read at {rate:.1f} GB/s\n"
        "floor, ms per step: " + "  ".join(f"CAR-{k} {ms:.2f}" for k, ms in floor.items())
    )
    return {
        "parameters": total,
        "read_far": sizes["far"],
        "read_heads": sizes["heads"],
        "read_head": sizes["head"],
        "read_policy": policy_sizes,
        "read_gb_s": rate,
        "floor_ms": floor,
        "weight_bytes": dtype.itemsize * total,
        "kv_bytes_per_token": kv,
    }


@dataclass(frozen=True)
class Load:
    """Work of a run: a text of `text` units after a prompt of `prompt` tokens, exactly `tokens`
    tokens long."""

    text: int
    prompt: int
    tokens: int

    def prompts(self, model: AnyDecoder, count: int = 1) -> list[Prompt]:
        c = model.config
        return [
            Prompt(
                f"u{i}",
                tuple((7 * i + 3 * j) % (c.text_vocab_size - 1) + 1 for j in range(self.text)),
                tuple((5 * i + 11 * j) % c.speech_vocab_size for j in range(self.prompt)),
            )
            for i in range(count)
        ]

    def sampling(self, tokens: int | None = None, temperature: float = 1.0) -> SamplingConfig:
        tokens = tokens or self.tokens
        return SamplingConfig(
            temperature,
            min_tokens=tokens + 16,
            max_tokens=tokens,
            max_tokens_per_text_unit=float(tokens),
        )
