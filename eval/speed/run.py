"""Speed of decoding on this machine, compared with its limit.

    dcar analyse what=speed --quick                     # under a minute on two cores
    dcar analyse what=speed decoder=runs/car policy=runs/dcpo/export

It first prints the bytes that each step has to read and the read rate of the machine, hence a
floor; then the measurements, all in the same engine: CAR-k and DCAR at batch 1, batches, lengths,
verifiers, and Hugging Face's `generate` on the same weights. Repeats are interleaved and medians
printed; every run generates a fixed number of tokens (EOS is forbidden), so no method gains by
stopping early. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from dcar.config import check, load_config, setting
from dcar.decoding import DecodeResult, Engine, FixedChunk, Method, PolicyChunk
from dcar.decoding.columns import round_up
from dcar.decoding.engine import SYNC_EVERY
from dcar.errors import ConfigError
from dcar.model.car import CARConfig, CARDecoder
from dcar.model.draft import AnyDecoder, build_draft
from dcar.model.precision import (
    cast_decoder,
    chosen_dtype,
    dtype_setting,
    matched_policy,
    precision_of,
)
from dcar.process import run_command
from dcar.tracking import machine
from eval.methods.registry import DEFAULT_LENGTH, Models, load_models, make_methods
from eval.speed.measure import CLOCKS, Load, interleaved, print_card
from eval.verifiers.drafters import ModelDrafter
from eval.verifiers.mtp_viterbi import count_bigrams
from eval.verifiers.sd import SpeculativeDecoding
from eval.verifiers.statistics import VerifierStatistics
from heads.build import HEAD_KINDS, head_costs
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig
from heads.policy import (
    CandidatePolicy,
    CandidatePolicyConfig,
    ChunkPolicy,
    HiddenPolicy,
    HiddenPolicyConfig,
    shape_of,
)

SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(
        text_vocab_size=128,
        speech_vocab_size=64,
        hidden_size=64,
        num_layers=2,
        num_attention_heads=2,
        ffn_size=128,
        head_blocks=2,
        bos=True,
    ),
    "starter": dict(
        text_vocab_size=64,
        speech_vocab_size=1024,
        hidden_size=192,
        num_layers=8,
        num_attention_heads=4,
        ffn_size=704,
        bos=True,
    ),  # launch/recipes/car_starter.yaml
    "paper": dict(bos=True),
}
"""Shapes of random models, used if no checkpoint is given; CARConfig's defaults are the paper's."""


@dataclass
class SpeedConfig:
    """Settings of the speed benchmark."""

    decoder: str = setting("", "Checkpoint to measure in place of the random starter model.")
    policy: str = setting(
        "", "Policy of the checkpoint; empty = random ones, bottleneck and full width."
    )
    draft: str = setting(
        "", "Draft model of the checkpoint; empty = made from the decoder's own layers, untrained."
    )
    dtype: str = dtype_setting()
    sizes: list[str] = setting(["starter", "paper"], "Sizes of models to measure.", choices=SIZES)
    heads: str = setting(
        "independent",
        "Kind of the random models' heads: independent, or shared.",
        choices=HEAD_KINDS,
    )
    num_prediction_heads: int = setting(
        7, "Number of prediction heads of the random models.", minimum=1
    )
    chunks: list[int] = setting(
        [],
        "Chunk sizes k of CAR-k to measure; empty = all (at paper size with quick 1, 3, 7).",
        minimum=1,
    )
    quick: bool = setting(False, "Whether to take less than a minute on two cores.")
    repeats: int = setting(5, "Number of interleaved runs of everything.", minimum=1)
    policy_reads: str = setting(
        "hidden",
        "Input of the random policies: hidden states (the paper's, before the draw), or "
        "candidates, with a chunk scorer.",
        choices=("hidden", "candidates"),
    )
    num_candidates: int = setting(
        1, "Number of candidates of DCAR, for policies with a chunk scorer.", minimum=1
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
    threads: int = setting(
        1,
        "Number of torch threads; with more than one, other processes influence the times of "
        "small models.",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check(self)
        if (self.policy or self.draft) and not self.decoder:
            raise ConfigError("policy and draft belong to a checkpoint: give decoder=…")
        if self.clock == "cpu" and self.device != "cpu":
            raise ConfigError(f"clock 'cpu' measures the CPU, not '{self.device}': set clock=wall")


def random_policies(model: AnyDecoder, reads: str = "hidden") -> dict[str, ChunkPolicy]:
    """Make untrained policies that choose among all sizes with equal probability: a bottleneck
    of 256 (half the width of a small model) and the paper's full width; one that reads
    candidates is as in launch/recipes/dcpo_starter.yaml."""
    width, most = model.config.hidden_size, model.config.num_prediction_heads
    policies: dict[str, ChunkPolicy]
    if reads == "candidates":
        scorer = ChunkScorer(ChunkScorerConfig(width, most, model.config.output_size))
        config = CandidatePolicyConfig(width, most, **shape_of(scorer))
        policies = {"after the draw": CandidatePolicy(config)}
    else:
        heads = model.config.num_attention_heads
        policies = {
            name: HiddenPolicy(
                HiddenPolicyConfig(width, most, width=own, num_attention_heads=heads)
            )
            for name, own in {"bottleneck": min(256, width // 2), "full": None}.items()
        }
    device = model.norm.weight.device
    return {n: matched_policy(p.eval().to(device), model) for n, p in policies.items()}


def load_all(config: SpeedConfig, size: str) -> Models:
    """Load the models to measure, in the given dtype: checkpoints if given (the size "starter"
    only), random weights otherwise. All methods with a draft model, the reference included, use
    the same one; without a checkpoint it is made from the decoder's own layers."""
    if size == "starter" and config.decoder:
        models = load_models(
            config.decoder,
            "",
            [config.policy] if config.policy else [],
            config.device,
            config.draft,
            dtype=config.dtype,
        )
    else:
        torch.manual_seed(0)
        shape = CARConfig(
            **SIZES[size], heads=config.heads, num_prediction_heads=config.num_prediction_heads
        )
        made = CARDecoder(shape).eval()
        models = Models(
            cast_decoder(made, chosen_dtype(config.dtype, config.device)).to(config.device)
        )
    decoder = models.decoder
    models.policies = (
        {"trained": models.policies[""]}
        if models.policies
        else random_policies(decoder, config.policy_reads)
    )
    if models.draft is None and not is_brief(config, size):
        models.draft = cast_decoder(build_draft(decoder).eval(), decoder.norm.weight.dtype)
    return models


def is_brief(config: SpeedConfig, size: str) -> bool:
    """Return whether only steps are measured, because everything would take minutes."""
    return config.quick and size == "paper"


@dataclass
class Measurement:
    """Model that is measured, and its results: `card` is its own, `ratios` [name][size] are
    common to all."""

    config: SpeedConfig
    size: str
    models: Models
    card: dict[str, Any]
    ratios: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        config, self.brief = self.config, is_brief(self.config, self.size)
        if self.brief:
            tokens, self.repeats = 15, 1
        elif config.quick:
            tokens, self.repeats = 60, min(config.repeats, 3)
        else:
            tokens, self.repeats = 210, config.repeats
        tokens = config.tokens or tokens
        self.load = Load(20, 10, tokens) if self.brief else Load(60, 50, tokens)
        self.few = min(self.repeats, 2 if config.quick else 3)
        self.once = min(self.repeats, 1 if config.quick else 3)
        self.decoder, self.prompts = self.models.decoder, self.load.prompts(self.models.decoder)

    def ratio(self, name: str, value: Any) -> None:
        self.ratios.setdefault(name, {})[self.size] = value

    def time(self, runs: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, list[float]]:
        return interleaved(
            runs, repeats, self.decoder.norm.weight.device, CLOCKS[self.config.clock]
        )

    def engine(
        self,
        method: Method,
        load: Load | None = None,
        tokens: int | None = None,
        rows: int = 1,
        temperature: float = 1.0,
    ) -> Engine:
        sampling = (load or self.load).sampling(tokens, temperature)
        return Engine(
            self.decoder,
            method,
            sampling,
            rows,
            graphs=None if self.config.graphs else False,
            compile=self.config.compile,
        )

    def rounds(
        self,
        ways: Mapping[Any, Mapping[Any, Method]],
        repeats: int,
        loads: Mapping[Any, Load] | None = None,
    ) -> dict[Any, dict[Any, Timed]]:
        """Time a round at batch 1 of each method of each way, all interleaved. The prefill of a
        way, with the first round of its first method, is measured separately and subtracted.
        loads: by way, if they differ."""
        prompts = {way: (loads or {}).get(way, self.load).prompts(self.decoder) for way in ways}
        engines = {
            (way, k): self.engine(method, (loads or {}).get(way))
            for way, methods in ways.items()
            for k, method in methods.items()
        }
        prefills = {
            way: self.engine(next(iter(methods.values())), tokens=1)
            for way, methods in ways.items()
        }
        spoken: dict[Any, DecodeResult] = {}

        def speak(key: Any) -> None:
            spoken[key] = engines[key].decode(prompts[key[0]])[0]

        runs: dict[Any, Callable[[], Any]] = {key: partial(speak, key) for key in engines}
        runs |= {way: partial(engine.decode, prompts[way]) for way, engine in prefills.items()}
        seconds, found = self.time(runs, repeats), dict[Any, dict[Any, Timed]]()
        for (way, k), engine in engines.items():
            count = executed(engine, spoken[way, k].passes) - executed(engine, 1)
            rest = median(seconds[way, k]) - median(seconds[way])
            found.setdefault(way, {})[k] = Timed(
                1e3 * rest / max(1, count), median(seconds[way, k]), spoken[way, k]
            )
        return found


class Timed(NamedTuple):
    """Time and passes of decoding an utterance."""

    ms: float  # of a round, without the prefill
    seconds: float  # of the whole
    result: DecodeResult


def executed(engine: Engine, rounds: int) -> int:
    """Return the number of rounds that an engine executes to complete an utterance of so many:
    on a GPU it synchronises only every few rounds."""
    return rounds if engine.exact else round_up(rounds, SYNC_EVERY)


def _car(k: int) -> FixedChunk:
    return FixedChunk(k)


def _steps(m: Measurement) -> None:
    """Measure CAR-k at batch 1, without a policy and with one that decides on every chunk; and
    DCAR."""
    card, heads, floor, n = (
        m.card,
        m.decoder.config.num_prediction_heads,
        m.card["floor_ms"],
        m.config.num_candidates,
    )
    sizes = list(range(1, heads + 1))
    if m.config.chunks:
        sizes = sorted({1, *m.config.chunks})
    elif m.brief:
        sizes = [1, 3, 7]
    chosen, speaker = [k for k in sizes if k <= heads], m.prompts[0].utterance_id

    def forced(policy: ChunkPolicy, k: int) -> PolicyChunk:
        """Let the policy decide, but keep k tokens whatever it chooses."""
        return PolicyChunk(policy, forced={speaker: [k]}, num_candidates=n)

    ways: dict[str, dict[int, Method]] = {"": {k: _car(k) for k in chosen}}
    for name, policy in m.models.policies.items():
        # key 0: DCAR, with sampled actions, so that an untrained policy also uses all sizes
        dcar = PolicyChunk(policy, "sample", num_candidates=n)
        ways[name] = {**{k: forced(policy, k) for k in chosen}, 0: dcar}
    found = m.rounds(ways, m.repeats)
    car = {k: timed.ms for k, timed in found.pop("").items()}
    decided = {name: {str(k): of[k].ms for k in chosen} for name, of in found.items()}
    shares = {name: {str(k): decided[name][str(k)] / car[k] - 1 for k in chosen} for name in found}
    print(
        "keeps k  ms per step  tokens/s  % of floor"
        + "".join(f"; {name} decides: ms, × CAR-k" for name in found)
    )
    for k, ms in car.items():
        print(
            f"CAR-{k:<2} {ms:13.3f} {1e3 * k / ms:9.1f} {100 * floor[str(k)] / ms:11.0f}"
            + "".join(
                f"{decided[name][str(k)]:14.3f} {1 + shares[name][str(k)]:5.2f}" for name in found
            )
        )
    m.ratio("car_k_over_k_times_car_1", {str(k): car[1] / car[k] for k in car if k > 1})
    m.ratio("car_k_bound", {str(k): floor["1"] / floor[str(k)] for k in car if k > 1})
    m.ratio("floor_share_far", floor["1"] / car[1])
    m.ratio("decision_over_pass", shares)
    card["ms_per_step"] = {str(k): ms for k, ms in car.items()}
    card["ms_per_decided_step"] = decided
    for name, of in found.items():
        _dcar(m, name, of[0], car[1])


def _dcar(m: Measurement, name: str, dcar: Timed, far: float) -> None:
    """Compare DCAR with FAR in the same engine: far ms per step, dcar.ms per round. The first
    chunk comes with the prefill."""
    result, kept = dcar.result, far / dcar.ms
    mean = (len(result.tokens) - result.emitted[0]) / max(1, result.passes - 1)
    print(f"DCAR ({name} policy): {mean:.2f} tokens per step, {kept * mean:.2f} × FAR")
    if m.size not in m.ratios.get("dcar_speedup_over_mean_chunk", ()):
        read = (
            m.card["read_far"]
            + head_costs(m.decoder.heads).read(mean)
            + m.card["read_policy"][name]
        )
        m.ratio("dcar_speedup_over_mean_chunk", kept)
        m.ratio("dcar_over_own_bound", kept * read / m.card["read_far"])
        print(
            f"speed-up / tokens per step: {kept:.3f}; speed-up / the bound by bytes read: "
            f"{kept * read / m.card['read_far']:.3f}"
        )


def _growth(m: Measurement, window: int = 40) -> None:
    """Measure cost by batch, and by length: the prompt makes the length, and `window` tokens are
    generated after it."""
    model, card, quick = m.decoder, m.card, m.config.quick
    batches = {b: m.load.prompts(model, b) for b in ([1, 8, 32] if quick else [1, 8, 32, 128])}
    seconds = m.time(
        {b: partial(m.engine(_car(2), rows=b).decode, prompts) for b, prompts in batches.items()},
        m.once,
    )
    rate = {b: b * m.load.tokens / median(s) for b, s in seconds.items()}
    print("batches, tokens/s: " + "  ".join(f"{b}: {r:.0f}" for b, r in rate.items()))
    m.ratio("batch8_over_batch1", rate[8] / rate[1])
    m.ratio("batch32_over_batch1", rate[32] / rate[1])
    card["tokens_per_second_by_batch"] = {str(b): r for b, r in rate.items()}

    loads = {n: Load(60, n, window) for n in ([100, 400] if quick else [200, 500, 1000, 2000])}
    shortest, longest = min(loads), max(loads)
    grown = {
        n: of[1].ms for n, of in m.rounds({n: {1: _car(1)} for n in loads}, m.few, loads).items()
    }
    weights, kv = model.norm.weight.element_size() * card["read_far"], card["kv_bytes_per_token"]
    allowed = {n: grown[shortest] * (weights + n * kv) / (weights + shortest * kv) for n in grown}
    print(
        "ms per step by length: "
        + "  ".join(f"{n}: {ms:.2f} (bytes: {allowed[n]:.2f})" for n, ms in grown.items())
    )
    m.ratio("growth_over_kv_model", grown[longest] / allowed[longest])
    card["ms_per_step_by_length"] = {str(n): ms for n, ms in grown.items()}


def _peers(m: Measurement) -> None:
    """Compare greedy next-token decoding of the same weights: the engine, and Hugging Face
    `generate` with a dynamic and a static cache; and, with the same draft model and draft
    length, `sd` and assisted generation."""
    from eval.speed.hf_peer import CausalLMPeer, generate

    t, (prompt,), draft = m.load.tokens, m.prompts, m.models.draft
    assert draft is not None
    peer, assistant = CausalLMPeer(m.decoder), CausalLMPeer(draft)
    verifier = SpeculativeDecoding("sd@draft", ModelDrafter(draft, DEFAULT_LENGTH))
    spoken: dict[str, DecodeResult | list[int]] = {}

    def ours(method: Method) -> Callable[[], DecodeResult]:
        engine = m.engine(method, temperature=0.0)
        return lambda: engine.decode([prompt])[0]

    ways: dict[str, Callable[[], DecodeResult | list[int]]] = {
        "engine": ours(_car(1)),
        "hf dynamic": lambda: generate(peer, prompt, t),
        "hf static": lambda: generate(peer, prompt, t, static=True),
        "sd": ours(verifier),
        "hf assisted": lambda: generate(
            peer, prompt, t, assistant=assistant, draft_length=DEFAULT_LENGTH
        ),
    }
    seconds = m.time(
        {
            name: partial(lambda name, way: spoken.update({name: way()}), name, way)
            for name, way in ways.items()
        },
        m.few,
    )
    speed = {name: t / median(s) for name, s in seconds.items()}
    tokens = {name: s.tokens if isinstance(s, DecodeResult) else s for name, s in spoken.items()}
    same = {name: tokens[name] == tokens["engine"] for name in ways}
    print(
        "greedy FAR on the same weights, tokens/s: "
        + "; ".join(
            f"{name} {rate:.1f}{'' if same[name] else ' (different tokens)'}"
            for name, rate in speed.items()
        )
    )
    m.ratio("far_over_hf_generate", speed["engine"] / max(speed["hf dynamic"], speed["hf static"]))
    m.ratio("sd_over_hf_assisted", speed["sd"] / speed["hf assisted"])
    sd = spoken["sd"]
    assert isinstance(sd, DecodeResult)
    kept = sum(sd.accepted) / max(1, sum(sd.proposed))
    print(
        f"sd and hf assisted: same draft model, drafts of {DEFAULT_LENGTH} tokens; sd kept "
        f"{100 * kept:.0f} % of the drafted tokens"
    )
    m.card |= {"peers": speed, "peers_same_tokens": same, "draft_accepted": kept}


def made_up_statistics(model: AnyDecoder) -> VerifierStatistics:
    """Return invented statistics for timing methods that need some: every lower rank is half as
    likely."""
    codes, depths = model.config.speech_vocab_size, model.config.num_prediction_heads - 1
    keys, counts = count_bigrams([[(7 * i) % codes for i in range(4 * codes)]], codes)
    accuracy = (0.5 ** torch.arange(1, 11)).repeat(depths, 1)
    return VerifierStatistics(
        model.checksum(),
        model.config.tokenizer,
        codes + 2,
        accuracy,
        keys,
        counts,
        torch.tensor([0.0, 1.0]),
        torch.tensor([1.0, 2.0]),
    )


def _methods(m: Measurement) -> None:
    """Measure every family of methods at batch 1 and 32. With random weights only the time of a
    round is meaningful, not the acceptance of drafts."""
    model, heads, n = m.decoder, m.decoder.config.num_prediction_heads, m.config.num_candidates
    dcar = "dcar-sampled" + (f"@n{n}" if n > 1 else "")
    names = [
        *(f"car-{k}" for k in sorted({1, min(3, heads), heads})),
        f"random-1-{heads}",
        f"end-on-confident-1-{heads}",
        dcar,
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
    models = Models(
        model,
        None,
        {"": next(iter(m.models.policies.values()))},
        m.models.draft,
        made_up_statistics(model),
    )
    methods = {e.name: e.method for e in make_methods(names, models)}
    alone = {
        name: of[0]
        for name, of in m.rounds(
            {name: {0: method} for name, method in methods.items()}, m.once
        ).items()
    }
    prompts = m.load.prompts(model, 32)
    many = m.time(
        {
            name: partial(m.engine(method, rows=32).decode, prompts)
            for name, method in methods.items()
        },
        m.once,
    )
    far = alone["car-1"].ms
    m.ratio("round_over_far_step", {name: timed.ms / far for name, timed in alone.items()})
    card = m.card["methods"] = {
        name: {
            "1": m.load.tokens / timed.seconds,
            "32": 32 * m.load.tokens / median(many[name]),
            "ms_per_round": timed.ms,
            "tokens_per_pass": timed.result.tokens_per_pass,
        }
        for name, timed in alone.items()
    }
    for name, of in card.items():
        print(
            f"{name:20} {of['ms_per_round']:9.3f} ms per round, {of['ms_per_round'] / far:5.2f} × "
            f"FAR, {of['tokens_per_pass']:5.2f} tokens; tokens/s {of['1']:9.1f} at batch 1, "
            f"{of['32']:9.1f} at batch 32"
        )


PARTS: dict[str, Callable[[Measurement], None]] = {
    "steps": _steps,
    "growth": _growth,
    "peers": _peers,
    "methods": _methods,
}


def run(config: SpeedConfig) -> dict[str, Any]:
    """Measure and print. Return the object of the last line."""
    started, cpu_started = time.perf_counter(), time.process_time()
    torch.set_num_threads(config.threads)
    device = torch.device(config.device)
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    print(
        f"machine: {machine()}; device {device}; torch {torch.__version__}; up to {config.repeats} "
        f"interleaved repeats, medians, {config.clock} clock"
    )
    if busy > cores / 2:
        print(
            f"NOTE: the machine is busy (load {busy:.1f} on {cores} cores), so times are longer "
            "than on an idle one"
        )
    ratios: dict[str, Any] = {}
    cards: dict[str, Any] = {}
    for size in config.sizes:
        models = load_all(config, size)
        cards[size] = print_card(size, models.decoder, models.policies, device) | precision_of(
            models.decoder
        )
        measured = Measurement(config, size, models, cards[size], ratios)
        for part in ["steps"] if measured.brief else config.parts:
            PARTS[part](measured)
    spent = {"wall": time.perf_counter() - started, "cpu": time.process_time() - cpu_started}
    print(f"the benchmark took {spent['wall']:.0f} s, {spent['cpu']:.0f} s of CPU time")
    result = {
        "machine": machine(),
        "device": config.device,
        "dtype": config.dtype,
        "clock": config.clock,
        "quick": config.quick,
        "load": busy,
        "cores": cores,
        "seconds": spent,
        "ratios": ratios,
        "models": cards,
    }
    print(json.dumps(result))
    return result


def main(arguments: list[str] | None = None) -> None:
    run(load_config(SpeedConfig, arguments))


if __name__ == "__main__":
    sys.exit(run_command("eval.speed.run", main))
