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

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from dcar.config import check, load_config, setting
from dcar.config.commands import DecoderSettings
from dcar.decoding import DecodeResult, Engine, FixedChunk, Method, PolicyChunk
from dcar.decoding.columns import round_up
from dcar.decoding.engine import SYNC_EVERY
from dcar.errors import ConfigError
from dcar.model.precision import precision_of
from dcar.process import run_command
from dcar.tracking import machine
from eval.methods.registry import DEFAULT_LENGTH, Models, load_models, make_methods
from eval.speed.measure import CLOCKS, Costs, Load, Row, interleaved, measure_costs
from eval.speed.models import (
    SIZES,
    made_up_statistics,
    random_draft,
    random_models,
    random_policies,
)
from eval.verifiers.drafters import ModelDrafter
from eval.verifiers.sd import SpeculativeDecoding
from heads.build import HEAD_KINDS
from heads.policy import ChunkPolicy


@dataclass(frozen=True)
class Preset:
    """Amount of work of a benchmark."""

    load: Load
    repeats: int
    batches: Sequence[int]
    lengths: Sequence[int]  # of the prompts in front of which FAR is timed


PRESETS = {
    "full": Preset(Load(60, 50, 210), 5, (1, 8, 32, 128), (200, 500, 1000, 2000)),
    "quick": Preset(Load(60, 50, 60), 2, (1, 8, 32), (100, 400)),
    # the paper's size with `quick`: everything but steps would take minutes
    "brief": Preset(Load(20, 10, 15), 1, (), ()),
}
GROWN_TOKENS = 40
"""Tokens generated after a prompt that makes the length."""


@dataclass
class SpeedConfig(DecoderSettings):
    """Settings of the speed benchmark."""

    decoder: str = setting("", "Checkpoint to measure in place of the random starter model.")
    policy: str = setting(
        "", "Policy of the checkpoint; empty = random ones, bottleneck and full width."
    )
    draft: str = setting(
        "", "Draft model of the checkpoint; empty = made from the decoder's own layers, untrained."
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
    compile: bool = setting(False, "Whether to compile the whole step with torch.compile.")
    clock: str = setting(
        "wall",
        "Clock. cpu: processor time of this process, for a CPU on which other jobs run.",
        choices=CLOCKS,
    )

    def __post_init__(self) -> None:
        check(self)
        if (self.policy or self.draft) and not self.decoder:
            raise ConfigError("policy and draft belong to a checkpoint: give decoder=…")
        if self.clock == "cpu" and self.device != "cpu":
            raise ConfigError(f"clock 'cpu' measures the CPU, not '{self.device}': set clock=wall")

    def preset(self, size: str) -> str:
        """Return the name of the preset for a size of models."""
        return ("brief" if size == "paper" else "quick") if self.quick else "full"


def load_all(config: SpeedConfig, size: str) -> Models:
    """Return the models to measure: checkpoints if given (the size "starter" only), random weights
    otherwise. All methods with a draft model, the peer included, use the same one."""
    if size != "starter" or not config.decoder:
        draft = config.preset(size) != "brief"
        return random_models(size, config.heads, config.device, config.dtype, draft)
    policies = [config.policy] if config.policy else []
    models = load_models(
        config.decoder, "", policies, config.device, config.draft, dtype=config.dtype
    )
    if config.policy:
        models.policies = {"trained": models.policies[""]}
    else:
        models.policies = random_policies(models.decoder)
    models.draft = models.draft or random_draft(models.decoder)
    return models


class Timed(NamedTuple):
    """Time and result of decoding an utterance."""

    ms: float  # of a round, without the prefill
    seconds: float  # of the whole
    result: DecodeResult


class Group(NamedTuple):
    """Methods by name whose prefill takes the same time, and their work."""

    methods: Mapping[str, Method]
    load: Load


class Benchmark:
    """Models of one size, and the amount of work with them."""

    def __init__(self, config: SpeedConfig, size: str, models: Models, costs: Costs) -> None:
        """See `SpeedConfig`. costs: of the decoder."""
        self.config, self.models, self.decoder, self.costs = config, models, models.decoder, costs
        self.brief = config.preset(size) == "brief"
        self.preset = PRESETS[config.preset(size)]
        load = self.preset.load
        self.load = Load(load.text, load.prompt, config.tokens or load.tokens)

    def time(self, runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median seconds of each run."""
        repeats = self.config.repeats or self.preset.repeats
        return interleaved(runs, repeats, self.config.device, self.config.clock)

    def engine(
        self, method: Method, load: Load | None = None, rows: int = 1, temperature: float = 1.0
    ) -> Engine:
        """Return an engine with the settings of the benchmark."""
        sampling, graphs = (load or self.load).sampling(temperature), self.config.graphs
        return Engine(
            self.decoder,
            method,
            sampling,
            rows,
            graphs=None if graphs else False,
            compile=self.config.compile,
        )

    def time_rounds(self, groups: Sequence[Group]) -> dict[str, Timed]:
        """Time a round at batch 1 of each method, all interleaved. The prefill of a group, with
        the first round of its first method, is measured separately and subtracted."""
        runs: dict[str, Callable[[], object]] = {}
        engines: dict[str, Engine] = {}
        results: dict[str, DecodeResult] = {}
        prefill_of: dict[str, str] = {}

        def decode(name: str, load: Load) -> None:
            (results[name],) = engines[name].decode(load.prompts(self.decoder))

        for number, (methods, load) in enumerate(groups):
            first = f"prefill {number}"
            one_token = Load(load.text, load.prompt, 1)
            engines[first] = self.engine(next(iter(methods.values())), one_token)
            runs[first] = partial(decode, first, one_token)
            for name, method in methods.items():
                engines[name] = self.engine(method, load)
                runs[name], prefill_of[name] = partial(decode, name, load), first
        seconds = self.time(runs)
        timed = {}
        for name, first in prefill_of.items():
            engine, rest = engines[name], seconds[name] - seconds[first]
            rounds = executed(engine, results[name].passes) - executed(engine, 1)
            timed[name] = Timed(1e3 * rest / max(1, rounds), seconds[name], results[name])
        return timed


def executed(engine: Engine, rounds: int) -> int:
    """Return the number of rounds that an engine executes to complete an utterance of so many: on
    a GPU it synchronises only every few rounds."""
    return rounds if engine.eager else round_up(rounds, SYNC_EVERY)


def measure_steps(b: Benchmark) -> list[Row]:
    """Measure CAR-k at batch 1, without a policy and with one that decides on every chunk; and
    DCAR."""
    heads, policies = b.decoder.config.num_prediction_heads, b.models.policies
    all_sizes = [1, 3, 7] if b.brief else range(1, heads + 1)
    sizes = [k for k in sorted({1, *(b.config.chunks or all_sizes)}) if k <= heads]
    (uid,) = (prompt.utterance_id for prompt in b.load.prompts(b.decoder))

    def decides(policy: ChunkPolicy, **settings: Any) -> Method:
        candidates = b.config.num_candidates
        return PolicyChunk(policy, num_candidates=candidates, **settings)

    groups = [Group({f"car-{k}": FixedChunk(k) for k in sizes}, b.load)]
    for name, policy in policies.items():
        # the policy decides, but k tokens are kept whatever it chooses
        methods = {f"{name}, {k}": decides(policy, forced={uid: [k]}) for k in sizes}
        # sampled, so that an untrained policy also uses all sizes
        groups.append(Group({**methods, name: decides(policy, mode="sample")}, b.load))
    timed = b.time_rounds(groups)
    rows, far = [], timed["car-1"].ms
    for k in sizes:
        ms, floor = timed[f"car-{k}"].ms, b.costs.floor_ms(k)
        values = {"": ms}
        values |= {f"if a policy ({name}) decides": timed[f"{name}, {k}"].ms for name in policies}
        compare = f"floor of bytes {floor:.3f} ({floor / ms:.0%})"
        rows.append(Row(f"CAR-{k}, ms per step", values, compare))
    rows.append(Row("floor of bytes over a FAR step", {"": b.costs.floor_ms(1) / far}, "aim ≥ 0.3"))
    shares = {
        name: median(timed[f"{name}, {k}"].ms / timed[f"car-{k}"].ms - 1 for k in sizes)
        for name in policies
    }
    rows.append(Row("a decision over a pass", shares, "aim ≤ 0.10"))
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
        rows.append(Row(what, values, "aim ≥ 0.92"))
    return rows


def measure_growth(b: Benchmark) -> list[Row]:
    """Measure cost by batch, and by length of what is in the cache."""

    def decode(batch: int) -> Callable[[], object]:
        engine = b.engine(FixedChunk(2), rows=batch)
        return partial(engine.decode, b.load.prompts(b.decoder, batch))

    seconds = b.time({str(batch): decode(batch) for batch in b.preset.batches})
    rate = {batch: batch * b.load.tokens / seconds[str(batch)] for batch in b.preset.batches}
    rows = [Row(f"CAR-2, batch {n}, tokens per second", {"": r}) for n, r in rate.items()]
    rows.append(Row("batch 32 over batch 1", {"": rate[32] / rate[1]}, "aim ≥ 20"))
    lengths, far = b.preset.lengths, FixedChunk(1)
    timed = b.time_rounds([Group({str(n): far}, Load(60, n, GROWN_TOKENS)) for n in lengths])
    weights, kv = b.costs.parameter_bytes * b.costs.far, b.costs.position_bytes
    growth = {n: (weights + n * kv) / (weights + lengths[0] * kv) for n in lengths}
    for n in lengths:
        by_bytes = f"by bytes {timed[str(lengths[0])].ms * growth[n]:.3f}"
        rows.append(Row(f"FAR after {n} tokens, ms per step", {"": timed[str(n)].ms}, by_bytes))
    grown = timed[str(lengths[-1])].ms / timed[str(lengths[0])].ms
    rows.append(Row("growth over that of bytes", {"": grown / growth[lengths[-1]]}, "aim ≤ 1.3"))
    return rows


def measure_peers(b: Benchmark) -> list[Row]:
    """Compare greedy next-token decoding of the same weights: the engine, and Hugging Face
    `generate` with a dynamic and a static cache; and, with the same draft model and draft
    length, `sd` and assisted generation."""
    from eval.speed.hf_peer import CausalLMPeer, generate

    (prompt,), draft = b.load.prompts(b.decoder), b.models.draft
    assert draft is not None
    peer, assistant = CausalLMPeer(b.decoder), CausalLMPeer(draft)
    verifier = SpeculativeDecoding("sd@draft", ModelDrafter(draft, DEFAULT_LENGTH))
    far_engine = b.engine(FixedChunk(1), temperature=0.0)
    sd_engine = b.engine(verifier, temperature=0.0)
    tokens: dict[str, list[int]] = {}
    accepted: list[float] = []

    def sd() -> list[int]:
        (result,) = sd_engine.decode([prompt])
        accepted[:] = [sum(result.accepted) / max(1, sum(result.proposed))]
        return result.tokens

    hugging_face = partial(generate, peer, prompt, b.load.tokens)
    runs: dict[str, Callable[[], list[int]]] = {
        "engine": lambda: far_engine.decode([prompt])[0].tokens,
        "hf dynamic": hugging_face,
        "hf static": partial(hugging_face, static=True),
        "sd": sd,
        "hf assisted": partial(hugging_face, assistant=assistant, draft_length=DEFAULT_LENGTH),
    }

    def decode(name: str) -> None:
        tokens[name] = runs[name]()

    seconds = b.time({name: partial(decode, name) for name in runs})
    rows = []
    for name in runs:
        note = "" if tokens[name] == tokens["engine"] else "different tokens (rounding)"
        what = f"greedy FAR, {name}, tokens per second"
        rows.append(Row(what, {"": b.load.tokens / seconds[name]}, note))
    best = min(seconds["hf dynamic"], seconds["hf static"])
    rows.append(Row("engine over Hugging Face generate", {"": best / seconds["engine"]}, "aim ≥ 5"))
    note = f"aim ≥ 2; {accepted[0]:.0%} of the drafted tokens accepted"
    ratio = seconds["hf assisted"] / seconds["sd"]
    return [*rows, Row("sd over assisted generation", {"": ratio}, note)]


def measure_methods(b: Benchmark) -> list[Row]:
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
        "sd",
        "sd@draft",
        "ssd-0.4",
        "pcg-0.42",
        "vadusa-2",
        "typical",
        "topk-verify-50",
    ]
    policy = next(iter(b.models.policies.values()))
    statistics = made_up_statistics(b.decoder)
    models = Models(b.decoder, None, {"": policy}, b.models.draft, statistics)
    methods = {e.name: e.method for e in make_methods(names, models)}
    timed = b.time_rounds([Group({name: method}, b.load) for name, method in methods.items()])
    prompts = b.load.prompts(b.decoder, 32)
    many = b.time(
        {name: partial(b.engine(m, rows=32).decode, prompts) for name, m in methods.items()}
    )
    rows = []
    for name, (ms, seconds, result) in timed.items():
        values = {
            "": ms,
            "tokens per second at batch 1": b.load.tokens / seconds,
            "at batch 32": 32 * b.load.tokens / many[name],
        }
        rows.append(
            Row(f"{name}, ms per round", values, f"{result.tokens_per_pass:.2f} tokens per pass")
        )
    ratios = {name: of.ms / timed["car-1"].ms for name, of in timed.items()}
    aim = "aim ≤ 1.3, plus the steps of a draft model"
    return [*rows, Row("a round over a FAR step", ratios, aim)]


PARTS: dict[str, Callable[[Benchmark], list[Row]]] = {
    "steps": measure_steps,
    "growth": measure_growth,
    "peers": measure_peers,
    "methods": measure_methods,
}


def measure(config: SpeedConfig, size: str) -> list[Row]:
    """Return the rows of all parts for one size of models, printed as they are measured."""
    models = load_all(config, size)
    decoder, costs = models.decoder, measure_costs(models.decoder)
    total, most = sum(p.numel() for p in decoder.parameters()), decoder.config.num_prediction_heads
    parameters = {"": total / 1e6, "FAR reads": costs.far / 1e6}
    parameters[f"all {most} heads add"] = costs.heads.read(most) / 1e6
    for name, policy in models.policies.items():
        parameters[f"policy ({name})"] = sum(p.numel() for p in policy.parameters()) / 1e6
    floor = {f"CAR-{k}": costs.floor_ms(k) for k in range(1, most + 1)}
    read = f"{costs.bytes_per_second / 1e9:.1f} GB/s"
    rows = [
        Row("M parameters", parameters, f"{precision_of(decoder)['dtype']}"),
        Row("floor of bytes, ms per step", floor, f"weights of this size are read at {read}"),
    ]
    print(f"\n== {size}", *rows, sep="\n")
    benchmark = Benchmark(config, size, models, costs)
    for part in ["steps"] if benchmark.brief else config.parts:
        measured = PARTS[part](benchmark)
        print(*measured, sep="\n", flush=True)
        rows += measured
    return rows


def run(config: SpeedConfig) -> dict[str, list[Row]]:
    """Measure and print. Return the rows by size."""
    torch.set_num_threads(1)  # with more, other processes influence the times of small models
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    print(f"{machine()}; device {config.device}; torch {torch.__version__}; {config.clock} clock")
    if busy > cores / 2:
        print(
            f"NOTE: the machine is busy (load {busy:.1f} on {cores} cores), so times are longer "
            "than on an idle one"
        )
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
