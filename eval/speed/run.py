"""Speed of decoding on this machine, compared with its limit.

    dcar analyse what=speed --quick                     # under a minute on two cores
    dcar analyse what=speed decoder=runs/car policy=runs/dcpo/export

It first prints the bytes that each step has to read and the rate at which the machine reads them,
hence a floor; then the measurements, all in the same engine: CAR-k and DCAR at batch 1, batches,
lengths, verifiers, and Hugging Face's `generate` on the same weights. Repeats are interleaved and
medians printed; every run generates a fixed number of tokens (EOS is forbidden), so no method gains
by stopping early. The last line is one JSON object. `python -m launch.gpu_rows` measures the same
rows on a GPU, with those of the models around the decoder.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from dcar.config import check, load_config, setting
from dcar.config.commands import DecoderSettings
from dcar.decoding import DecodeResult, Engine, FixedChunk, Method, PolicyChunk
from dcar.decoding.engine import QUEUED
from dcar.errors import ConfigError
from dcar.methods import Models, load_models, make_methods
from dcar.model.draft import AnyDecoder
from dcar.model.precision import precision_of
from dcar.process import own_device, run_command
from dcar.tracking import machine
from eval.speed.measure import Costs, Load, SpeedRow, TimedRun, interleaved, measure_costs
from eval.speed.models import (
    SIZES,
    made_up_statistics,
    random_draft,
    random_models,
    random_policies,
)
from eval.verifiers.drafters import DEFAULT_LENGTH
from heads.build import HEAD_KINDS


@dataclass(frozen=True)
class Preset:
    """Amount of work of a benchmark."""

    load: Load
    repeats: int
    batches: Sequence[int]
    lengths: Sequence[int]  # of the prompts in front of which FAR is timed


FULL = Preset(Load(60, 50, 210), 5, (1, 8, 32, 128), (200, 500, 1000, 2000))
QUICK = Preset(Load(60, 50, 60), 2, (1, 8, 32), (100, 400))
BRIEF = Preset(Load(20, 10, 15), 1, (), ())
"""The paper's size with `quick`, where everything but steps would take minutes."""
GROWN_TOKENS = 40
"""Tokens generated after a prompt that makes the length."""


@dataclass
class SpeedConfig(DecoderSettings):
    """Settings of the speed benchmark."""

    decoder: str = setting("", "Checkpoint to measure in place of the random starter model.")
    policy: str = setting(
        "", "Policy of the checkpoint; empty = random ones, bottleneck and full width."
    )
    sizes: list[str] = setting(["starter", "paper"], "Sizes of models to measure.", choices=SIZES)
    heads: str = setting(
        "independent",
        "Heads and policies of the random models. independent: seven, and policies that decide "
        "before the draw (the paper's); shared: sixteen, and one that decides after it.",
        choices=HEAD_KINDS,
    )
    chunks: list[int] = setting(
        [],
        "Chunk sizes k of CAR-k to measure; empty = all (at paper size with quick 1, 3, 7).",
        minimum=1,
    )
    quick: bool = setting(False, "Whether to take less than a minute on two cores.")
    repeats: int = setting(0, "Interleaved runs of everything; 0 = 5, with quick 2.", minimum=0)
    num_candidates: int = setting(
        1, "Number of candidates of DCAR, for a policy that decides after the draw.", minimum=1
    )
    device: str = setting("cpu", "cpu or cuda.")
    parts: list[str] = setting(
        ["steps", "growth", "peers"],
        "Further measurements. growth: by batch and length; peers: Hugging Face on the same "
        "weights; methods: all of them at batch 1 and 32.",
        choices=("steps", "growth", "peers", "methods"),
    )
    tokens: int = setting(
        0, "Number of speech tokens of a run; 0 = 210, with quick 60 (paper size: 15).", minimum=0
    )
    graphs: bool = setting(True, "Whether to use CUDA graphs on a GPU.")
    compile: bool = setting(True, "Whether to compile steps on a GPU.")

    def __post_init__(self) -> None:
        check(self)
        if self.policy and not self.decoder:
            raise ConfigError("policy belongs to a checkpoint: give decoder=…")

    def preset(self, size: str) -> Preset:
        """Return the amount of work for a size of models."""
        return FULL if not self.quick else BRIEF if size == "paper" else QUICK


def load_all(config: SpeedConfig, size: str) -> Models:
    """Return the models to measure: checkpoints if given (the size "starter" only), random weights
    otherwise."""
    if size != "starter" or not config.decoder:
        return random_models(size, config.heads, config.device, config.dtype)
    policies = [f"trained={config.policy}"] if config.policy else []
    models = load_models(config.decoder, "", policies, config.device, dtype=config.dtype)
    models.policies = models.policies or random_policies(models.decoder)
    return models


class Timed(NamedTuple):
    """Time and result of decoding an utterance."""

    ms: float  # of a round, without the prefill
    seconds: float  # of the whole
    result: DecodeResult


@dataclass(frozen=True)
class Benchmark:
    """Models of one size, what a step of the decoder reads, and the amount of work."""

    config: SpeedConfig
    models: Models
    costs: Costs
    preset: Preset
    load: Load

    @property
    def decoder(self) -> AnyDecoder:
        return self.models.decoder

    def time(self, runs: Mapping[str, Callable[[], Any]]) -> dict[str, TimedRun]:
        """Time each run, all interleaved."""
        repeats = self.config.repeats or self.preset.repeats
        return interleaved(runs, repeats, self.config.device)

    def decoding(
        self, method: Method, load: Load, rows: int = 1, temperature: float = 1.0
    ) -> tuple[Engine, Callable[[], list[DecodeResult]]]:
        """Return an engine with the settings of the benchmark, and a run of it."""
        used = {"graphs": self.config.graphs, "compile": self.config.compile}
        settings: Any = {name: False for name, wanted in used.items() if not wanted}
        engine = Engine(self.decoder, method, load.sampling(temperature), rows, **settings)
        return engine, partial(engine.decode, load.prompts(self.decoder, rows))

    def time_rounds(self, groups: Sequence[tuple[Mapping[str, Method], Load]]) -> dict[str, Timed]:
        """Time a round at batch 1 of each method, all interleaved. The methods of a group have the
        same prefill: with the first round of the first method, it is measured separately and
        subtracted."""
        runs: dict[str, Callable[[], list[DecodeResult]]] = {}
        engines: dict[str, Engine] = {}
        prefill_of: dict[str, str] = {}
        for number, (methods, load) in enumerate(groups):
            prefill = f"prefill {number}"
            first = next(iter(methods.values()))
            _, runs[prefill] = self.decoding(first, replace(load, tokens=1))
            for name, method in methods.items():
                engines[name], runs[name] = self.decoding(method, load)
                prefill_of[name] = prefill
        timings = self.time(runs)
        timed = {}
        for name, engine in engines.items():
            seconds, (result,) = timings[name]
            rounds = executed(engine, result.passes) - executed(engine, 1)
            rest = seconds - timings[prefill_of[name]].seconds
            timed[name] = Timed(1e3 * rest / max(1, rounds), seconds, result)
        return timed


def executed(engine: Engine, rounds: int) -> int:
    """Return the number of rounds that an engine executes to complete an utterance of so many: a
    GPU has begun the next one when the host learns that it is complete."""
    return rounds if engine.eager else rounds + QUEUED


def measure_steps(b: Benchmark) -> list[SpeedRow]:
    """Measure CAR-k at batch 1, without a policy and with one that decides on every chunk; and
    DCAR."""
    heads, policies = b.decoder.config.num_prediction_heads, b.models.policies
    all_sizes = [1, 3, 7] if b.preset is BRIEF else range(1, heads + 1)
    sizes = [k for k in sorted({1, *(b.config.chunks or all_sizes)}) if k <= heads]
    (uid,) = (prompt.utterance_id for prompt in b.load.prompts(b.decoder))
    groups: list[tuple[dict[str, Method], Load]]
    groups = [({f"car-{k}": FixedChunk(k) for k in sizes}, b.load)]
    for name, policy in policies.items():
        deciding = partial(PolicyChunk, policy, num_candidates=b.config.num_candidates)
        # the policy decides, but k tokens are kept whatever it chooses
        methods = {f"{name}, {k}": deciding(forced={uid: [k]}) for k in sizes}
        # sampled, so that an untrained policy also uses all sizes
        groups.append(({**methods, name: deciding(mode="sample")}, b.load))
    timed = b.time_rounds(groups)
    rows, far = [], timed["car-1"].ms
    for k in sizes:
        ms, floor = timed[f"car-{k}"].ms, b.costs.floor_ms(k)
        values = {"": ms}
        values |= {f"if a policy ({name}) decides": timed[f"{name}, {k}"].ms for name in policies}
        compare = f"floor of bytes {floor:.3f} ({floor / ms:.0%})"
        rows.append(SpeedRow(f"CAR-{k}, ms per step", values, compare))
    rows.append(
        SpeedRow("floor of bytes over a FAR step", {"": b.costs.floor_ms(1) / far}, "aim ≥ 0.3")
    )
    shares = {
        name: median(timed[f"{name}, {k}"].ms / timed[f"car-{k}"].ms - 1 for k in sizes)
        for name in policies
    }
    rows.append(SpeedRow("a decision over a pass", shares, "aim ≤ 0.10"))
    for name, policy in policies.items():
        result, share = timed[name].result, far / timed[name].ms
        # the first chunk comes with the prefill
        mean = (len(result.tokens) - result.emitted[0]) / max(1, result.passes - 1)
        read = b.costs.parameters(mean) + sum(p.numel() for p in policy.parameters())
        values = {
            "": share,
            "of the bound by bytes": share * read / b.costs.far,
            "tokens per step": mean,
            "× FAR": share * mean,
        }
        what = f"speed-up of DCAR ({name} policy) over its tokens per step"
        rows.append(SpeedRow(what, values, "aim ≥ 0.92"))
    return rows


def measure_growth(b: Benchmark) -> list[SpeedRow]:
    """Measure cost by batch, and by length of what is in the cache."""
    batches, lengths, far = b.preset.batches, b.preset.lengths, FixedChunk(1)
    timings = b.time({str(n): b.decoding(FixedChunk(2), b.load, n)[1] for n in batches})
    rate = {n: n * b.load.tokens / timings[str(n)].seconds for n in batches}
    rows = [SpeedRow(f"CAR-2, batch {n}, tokens per second", {"": r}) for n, r in rate.items()]
    rows.append(SpeedRow("batch 32 over batch 1", {"": rate[32] / rate[1]}, "aim ≥ 20"))
    timed = b.time_rounds([({str(n): far}, Load(60, n, GROWN_TOKENS)) for n in lengths])
    weights, kv = b.costs.parameter_bytes * b.costs.far, b.costs.position_bytes
    growth = {n: (weights + n * kv) / (weights + lengths[0] * kv) for n in lengths}
    shortest, longest = (timed[str(n)].ms for n in (lengths[0], lengths[-1]))
    for n in lengths:
        by_bytes = f"by bytes {shortest * growth[n]:.3f}"
        rows.append(
            SpeedRow(f"FAR after {n} tokens, ms per step", {"": timed[str(n)].ms}, by_bytes)
        )
    grown = longest / shortest / growth[lengths[-1]]
    return [*rows, SpeedRow("growth over that of bytes", {"": grown}, "aim ≤ 1.3")]


def measure_peers(b: Benchmark) -> list[SpeedRow]:
    """Compare greedy next-token decoding of the same weights: the engine, and Hugging Face
    `generate` with a dynamic and a static cache; and, with the same draft model and draft
    length, `sd` and assisted generation."""
    from eval.speed.hf_peer import CausalLMPeer, generate

    (prompt,), draft = b.load.prompts(b.decoder), random_draft(b.decoder)
    (sd,) = make_methods(["sd@draft"], Models(b.decoder, draft=draft))
    hugging_face = partial(generate, CausalLMPeer(b.decoder), prompt, b.load.tokens)
    assisted = {"assistant": CausalLMPeer(draft), "draft_length": DEFAULT_LENGTH}
    timings = b.time(
        {
            "engine": b.decoding(FixedChunk(1), b.load, temperature=0.0)[1],
            "hf dynamic": hugging_face,
            "hf static": partial(hugging_face, static=True),
            "sd": b.decoding(sd.method, b.load, temperature=0.0)[1],
            "hf assisted": partial(hugging_face, **assisted),
        }
    )
    (far,), (drafted,) = timings["engine"].result, timings["sd"].result
    seconds, rows = {name: timing.seconds for name, timing in timings.items()}, []
    for name, (spent, result) in timings.items():
        tokens = result if name.startswith("hf") else result[0].tokens
        note = "" if tokens == far.tokens else "different tokens (rounding)"
        what = f"greedy FAR, {name}, tokens per second"
        rows.append(SpeedRow(what, {"": b.load.tokens / spent}, note))
    best = min(seconds["hf dynamic"], seconds["hf static"])
    rows.append(
        SpeedRow("engine over Hugging Face generate", {"": best / seconds["engine"]}, "aim ≥ 5")
    )
    accepted = sum(drafted.accepted) / max(1, sum(drafted.proposed))
    note = f"aim ≥ 2; {accepted:.0%} of the drafted tokens accepted"
    ratio = seconds["hf assisted"] / seconds["sd"]
    return [*rows, SpeedRow("sd over assisted generation", {"": ratio}, note)]


def measure_methods(b: Benchmark) -> list[SpeedRow]:
    """Measure every family of methods at batch 1 and 32. With random weights only the time of a
    round is meaningful, not the acceptance of drafts."""
    heads, candidates = b.decoder.config.num_prediction_heads, b.config.num_candidates
    names = [
        *(f"car-{k}" for k in sorted({1, min(3, heads), heads})),
        f"random-1-{heads}",
        f"end-on-confident-1-{heads}",
        "dcar-sampled" + (f"@n{candidates}" if candidates > 1 else ""),
        "entropy-0.8",
        f"mtp-viterbi-{heads}",
        *("sd", "sd@draft", "ssd-0.4", "pcg-0.42", "vadusa-2", "typical", "topk-verify-50"),
    ]
    policy = next(iter(b.models.policies.values()))
    draft, statistics = random_draft(b.decoder), made_up_statistics(b.decoder)
    models = Models(b.decoder, None, {"": policy}, draft, statistics)
    methods = {entry.name: entry.method for entry in make_methods(names, models)}
    timed = b.time_rounds([(methods, b.load)])
    many = b.time({name: b.decoding(m, b.load, 32)[1] for name, m in methods.items()})
    rows = []
    for name, (ms, seconds, result) in timed.items():
        values = {
            "": ms,
            "tokens per second at batch 1": b.load.tokens / seconds,
            "at batch 32": 32 * b.load.tokens / many[name].seconds,
        }
        tokens = f"{result.tokens_per_pass:.2f} tokens per pass"
        rows.append(SpeedRow(f"{name}, ms per round", values, tokens))
    ratios = {name: of.ms / timed["car-1"].ms for name, of in timed.items()}
    aim = "aim ≤ 1.3, plus the steps of a draft model"
    return [*rows, SpeedRow("a round over a FAR step", ratios, aim)]


PARTS: dict[str, Callable[[Benchmark], list[SpeedRow]]] = {
    "steps": measure_steps,
    "growth": measure_growth,
    "peers": measure_peers,
    "methods": measure_methods,
}


def measure(config: SpeedConfig, size: str) -> list[SpeedRow]:
    """Return the rows of all parts for one size of models, printed as they are measured."""
    models, preset = load_all(config, size), config.preset(size)
    decoder, costs = models.decoder, measure_costs(models.decoder)
    most, load = decoder.config.num_prediction_heads, preset.load
    parameters = {
        "": sum(p.numel() for p in decoder.parameters()),
        "FAR reads": costs.far,
        f"all {most} heads add": costs.heads.read(most),
    }
    for name, policy in models.policies.items():
        parameters[f"policy ({name})"] = sum(p.numel() for p in policy.parameters())
    millions = {name: count / 1e6 for name, count in parameters.items()}
    floor = {f"CAR-{k}": costs.floor_ms(k) for k in range(1, most + 1)}
    read = f"{costs.bytes_per_second / 1e9:.1f} GB/s"
    rows = [
        SpeedRow("M parameters", millions, precision_of(decoder)["dtype"]),
        SpeedRow("floor of bytes, ms per step", floor, f"weights of this size are read at {read}"),
    ]
    print(f"\n== {size}", *rows, sep="\n")
    load = replace(load, tokens=config.tokens or load.tokens)
    benchmark = Benchmark(config, models, costs, preset, load)
    for part in ["steps"] if preset is BRIEF else config.parts:
        measured = PARTS[part](benchmark)
        print(*measured, sep="\n", flush=True)
        rows += measured
    return rows


def run(config: SpeedConfig) -> dict[str, list[SpeedRow]]:
    """Measure and print. Return the rows by size. Raises ConfigError for a missing device."""
    config.device = own_device(config.device)
    torch.set_num_threads(1)  # with more, other processes influence the times of small models
    busy = os.getloadavg()[0]  # of a busy machine, times are longer than those of an idle one
    print(f"{machine()}; load {busy:.1f}; device {config.device}; torch {torch.__version__}")
    rows = {size: measure(config, size) for size in config.sizes}
    described = {size: [asdict(row) for row in of] for size, of in rows.items()}
    print(json.dumps({"machine": machine(), "load": busy, **vars(config), "rows": described}))
    return rows


CONFIG = SpeedConfig


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, given `[key=value …]`."""
    run(load_config(CONFIG, arguments))


if __name__ == "__main__":
    sys.exit(run_command("eval.speed.run", main))
