"""How fast decoding is on this machine, beside how fast it could be.

    dcar analyse what=speed --quick                     # under a minute on two cores
    dcar analyse what=speed decoder=runs/car policy=runs/dcpo/export

First a card of what each step has to read and what the machine can read, hence a floor; then the measurements, in the
static engine unless said otherwise: CAR-k and DCAR at batch 1, batches, lengths, and Hugging Face's `generate` on the
same weights. Repeats are interleaved, medians printed with their range; every run speaks a fixed number of tokens (EOS
forbidden), so no method gains by stopping early. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from dcar.decoding.engine.run import StaticEngine, engine_for
from dcar.decoding.fast.passes import FastDecoder

from dcar.config import check, load_config, setting
from dcar.decoding import ChunkMethod, DecodeResult, FixedChunk, Method, PolicyChunk, Prompt, decode
from dcar.errors import ConfigError
from dcar.model.car import CARConfig, CARDecoder
from dcar.model.draft import AnyDecoder, build_draft
from dcar.model.precision import cast_decoder, chosen_dtype, dtype_setting, matched_policy, precision_of
from dcar.process import run_command
from dcar.tracking import machine
from eval.methods.registry import DEFAULT_LENGTH, Models, load_models, make_methods
from eval.speed.measure import CLOCKS, Load, interleaved, print_card, shown
from eval.verifiers.drafters import ModelDrafter
from eval.verifiers.sd import SpeculativeDecoding
from heads.build import HEAD_KINDS, check_kind, head_costs
from heads.chunk_scorer import ChunkScorerConfig
from heads.policy import ChunkPolicy, ChunkPolicyConfig

SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(text_vocab_size=128, speech_vocab_size=64, hidden_size=64, num_layers=2, num_attention_heads=2,
                 ffn_size=128, head_blocks=2, bos=True),
    "starter": dict(text_vocab_size=64, speech_vocab_size=1024, hidden_size=192, num_layers=8, num_attention_heads=4,
                    ffn_size=704, bos=True),  # launch/recipes/car_starter.yaml
    "paper": dict(bos=True),
}
"""Shapes of random models, used where no checkpoint is given; CARConfig's defaults are the paper's."""

@dataclass
class SpeedConfig:
    """Settings of the speed benchmark."""

    decoder: str = setting("", "Checkpoint measured in the place of the random starter model.")
    policy: str = setting("", "Its policy; empty = random ones, bottleneck and full width.")
    draft: str = setting("", "Its draft model; empty = made of the decoder's own layers, untrained.")
    dtype: str = dtype_setting()
    sizes: list[str] = setting(["starter", "paper"], "Models that are measured.", choices=SIZES)
    heads: str = setting("independent", "Kind of the random models' heads: independent, or shared.", choices=HEAD_KINDS)
    num_prediction_heads: int = setting(7, "Heads of the random models.", minimum=1)
    head_width: int = setting(0, "Width inside the blocks of shared heads; 0 = twice the model's.", minimum=0)
    tie_heads: bool = setting(False, "The base head is the output layer of shared heads too.")
    chunks: list[int] = setting([], "Sizes of CAR-k that are measured; empty = all (at paper size with quick 1, 3, 7).",
                                minimum=1)
    quick: bool = setting(False, "Under a minute on two cores.")
    repeats: int = setting(5, "Interleaved runs of everything.", minimum=1)
    policy_reads: str = setting("hidden", "What the random policies see: hidden states (the paper's, before the draw), "
                                          "or candidates, with a chunk scorer.", choices=("hidden", "candidates"))
    num_candidates: int = setting(1, "Candidates that DCAR draws side by side, for policies with a chunk scorer.",
                                  minimum=1)
    device: str = setting("cpu", "cpu or cuda.")
    parts: list[str] = setting(["steps", "growth", "peers"], "Growth: by batch and length; peers: Hugging Face on the "
                               "same weights; methods: verifiers too, at batch 1 and 32.",
                               choices=("steps", "growth", "peers", "methods"))
    tokens: int = setting(0, "Speech tokens of a run; 0 = 210, with quick 60 (paper size: 15).", minimum=0)
    graphs: bool = setting(True, "CUDA graphs, on a GPU.")
    clock: str = setting("wall", "cpu: processor time of this process, for a CPU on which other jobs run.",
                         choices=CLOCKS)
    threads: int = setting(1, "Of torch; with more, whatever else runs decides the times of small models.", minimum=1)

    def __post_init__(self) -> None:
        check(self)
        if (self.policy or self.draft) and not self.decoder:
            raise ConfigError("policy and draft belong to a checkpoint: give decoder=…")
        check_kind(self.heads, head_width=self.head_width, tie_heads=self.tie_heads)
        if self.clock == "cpu" and self.device != "cpu":
            raise ConfigError(f"clock 'cpu' measures the CPU, not '{self.device}': set clock=wall")


def random_policies(model: AnyDecoder, reads: str = "hidden") -> dict[str, ChunkPolicy]:
    """Untrained policies, which choose among all sizes alike: a bottleneck of 256 (half the width of a small model) and
    the paper's full width; one that reads candidates is as launch/recipes/dcpo_starter.yaml makes it."""
    width, most = model.config.hidden_size, model.config.num_prediction_heads
    shape = dict(hidden_size=width, num_actions=most, num_attention_heads=model.config.num_attention_heads)
    if reads == "candidates":
        chunk_scorer = ChunkScorerConfig(width, most, model.config.output_size)
        made = {"after the draw": ChunkPolicyConfig(
            **shape, width=None, reads=reads, chunk_scorer_width=chunk_scorer.width,
            chunk_scorer_embedding=chunk_scorer.embedding_size, chunk_scorer_ids=chunk_scorer.vocab_size)}
    else:
        made = {"bottleneck": ChunkPolicyConfig(**shape, width=min(256, width // 2)),
                "full": ChunkPolicyConfig(**shape, width=None)}
    device = model.norm.weight.device
    return {name: matched_policy(ChunkPolicy(config).eval().to(device), model) for name, config in made.items()}


def load_all(config: SpeedConfig, size: str) -> Models:
    """What is measured, in the dtype asked for: checkpoints where they are given (the size "starter" only), random
    weights elsewhere. The draft model is one for all that drafts by a model, the peer included; without a checkpoint
    it is made of the decoder's own layers."""
    if size == "starter" and config.decoder:
        models = load_models(config.decoder, "", [config.policy] if config.policy else [],
                             config.device, config.draft, dtype=config.dtype)
    else:
        torch.manual_seed(0)
        heads = {n: getattr(config, n) for n in ("heads", "num_prediction_heads", "head_width", "tie_heads")}
        made = CARDecoder(CARConfig(**SIZES[size], **heads)).eval()
        models = Models(cast_decoder(made, chosen_dtype(config.dtype, config.device)).to(config.device))
    decoder = models.decoder
    models.policies = ({"trained": models.policies[""]} if models.policies else
                       random_policies(decoder, config.policy_reads))
    if models.draft is None and not is_brief(config, size):
        models.draft = cast_decoder(build_draft(decoder).eval(), decoder.norm.weight.dtype)
    return models


def is_brief(config: SpeedConfig, size: str) -> bool:
    """Whether only steps are measured, because all of it would take minutes."""
    return config.quick and size == "paper"


@dataclass
class Measurement:
    """One model that is measured, and where its figures go: `card` is its own, `ratios` [name][size] are of all."""

    config: SpeedConfig
    size: str
    models: Models
    card: dict[str, Any]
    ratios: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        config, self.brief = self.config, is_brief(self.config, self.size)
        tokens = config.tokens or (15 if self.brief else 60 if config.quick else 210)
        self.load = Load(20, 10, tokens) if self.brief else Load(60, 50, tokens)
        self.repeats = 1 if self.brief else min(config.repeats, 3) if config.quick else config.repeats
        self.few, self.once = min(self.repeats, 2 if config.quick else 3), min(self.repeats, 1 if config.quick else 3)
        self.decoder, self.prompts = self.models.decoder, self.load.prompts(self.models.decoder)

    def ratio(self, name: str, value: Any) -> None:
        self.ratios.setdefault(name, {})[self.size] = value

    def time(self, runs: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, list[float]]:
        return interleaved(runs, repeats, self.decoder.norm.weight.device, CLOCKS[self.config.clock])

    def engine(self, batch: int = 1, prompts: Sequence[Prompt] = (), **how: Any) -> StaticEngine:
        return engine_for(self.decoder, prompts or self.prompts, self.load.sampling(), batch=batch,
                          graphs=None if self.config.graphs else False, **how)

    def reader(self, decoder: AnyDecoder) -> FastDecoder:
        return FastDecoder(decoder, graphs=None if self.config.graphs else False)

    def steps(self, sizes: Sequence[int], repeats: int, ways: Mapping[str, Way]) -> dict[str, dict[int, list[float]]]:
        """ms a step that keeps k tokens, of each way, interleaved; its prefill, measured by itself, is taken off."""
        runs = {(name, k): partial(speak, self.prompts, method(k or 1), self.load.sampling(None if k else 1))
                for name, (speak, method) in ways.items() for k in (0, *sizes)}
        seconds = self.time(runs, repeats)
        prefill = {name: median(seconds[name, 0]) for name in ways}
        return {name: {k: [1e3 * (s - prefill[name]) / max(1, self.load.steps(k) - 1) for s in seconds[name, k]]
                       for k in sizes} for name in ways}


Way = tuple[Callable[..., Any], Callable[[int], ChunkMethod]]
"""What speaks, an engine's `decode` or the loop's, and how k tokens a step are asked for."""


def _car(k: int) -> ChunkMethod:
    return ChunkMethod(FixedChunk(k))


def _steps(m: Measurement) -> None:
    """CAR-k at batch 1 in the engine, without a policy and where one decides on every chunk; DCAR."""
    card, heads = m.card, m.decoder.config.num_prediction_heads
    engines = {name: m.engine(policy=policy) for name, policy in m.models.policies.items()}
    engine = next(iter(engines.values()))
    asked = sorted({1, *m.config.chunks}) if m.config.chunks else [1, 3, 7] if m.brief else range(1, heads + 1)
    chosen = [k for k in asked if k <= heads]

    def forced(policy: ChunkPolicy, k: int) -> ChunkMethod:
        """It decides, and k tokens are kept whatever it says."""
        return ChunkMethod(PolicyChunk(policy, forced={m.prompts[0].utterance_id: [k]},
                                       num_candidates=m.config.num_candidates))

    found = m.steps(chosen, m.repeats, {"": (engine.decode, _car)} | {
        name: (engines[name].decode, partial(forced, policy)) for name, policy in m.models.policies.items()})
    car, floor = {k: median(ms) for k, ms in found.pop("").items()}, card["floor_ms"]
    print("keeps k    ms a step  tokens/s  % of floor" + "".join(f"; {name} decides: ms, × CAR-k" for name in found))
    shares = {name: {str(k): median(ms[k]) / car[k] - 1 for k in chosen} for name, ms in found.items()}
    for k, ms in car.items():
        print(f"CAR-{k:<2} {ms:13.3f} {1e3 * k / ms:9.1f} {100 * floor[str(k)] / ms:11.0f}" + "".join(
            f"{median(of[k]):14.3f} {1 + shares[name][str(k)]:5.2f}" for name, of in found.items()))
    m.ratio("car_k_over_k_times_car_1", {str(k): car[1] / car[k] for k in car if k > 1})
    m.ratio("car_k_bound", {str(k): floor["1"] / floor[str(k)] for k in car if k > 1})
    m.ratio("floor_share_far", floor["1"] / car[1])
    m.ratio("decision_over_pass", shares)
    card["ms_per_step"] = {str(k): ms for k, ms in car.items()}
    card["ms_per_decided_step"] = {name: {str(k): median(ms[k]) for k in chosen} for name, ms in found.items()}
    for name in engines:
        _dcar(m, engines[name], name)
    if m.brief:
        return
    loop = m.steps([1], m.few, {"": (partial(decode, m.decoder), _car)})[""][1]
    m.ratio("static_over_loop", median(loop) / car[1])
    print(f"reference loop, CAR-1: {shown(loop)} ms a step")


def _dcar(m: Measurement, engine: StaticEngine, name: str) -> None:
    """DCAR (actions drawn, so that an untrained policy too uses all sizes) against FAR in the same engine, without the
    prefill."""
    policy, t = m.models.policies[name], m.load.tokens
    dcar = ChunkMethod(PolicyChunk(policy, "sample", num_candidates=m.config.num_candidates))
    spoken: dict[str, DecodeResult] = {}

    def speak(what: str, method: ChunkMethod, tokens: int = t) -> None:
        spoken[what] = engine.decode(m.prompts, method, m.load.sampling(tokens))[0]

    seconds = m.time({
        "prefill": partial(speak, "prefill", _car(1), 1), "prefill dcar": partial(speak, "prefill dcar", dcar, 1),
        "far": partial(speak, "far", _car(1)), "dcar": partial(speak, "dcar", dcar)}, m.repeats)
    plain, prefill = median(seconds["prefill"]), median(seconds["prefill dcar"])
    rest = t - spoken["dcar"].emitted[0]  # the first chunk comes with the prefill
    mean = rest / (spoken["dcar"].target_passes - 1)
    speedup = median([(a - plain) / (t - 1) * rest / (b - prefill)
                      for a, b in zip(seconds["far"], seconds["dcar"], strict=True)])
    print(f"DCAR ({name} policy): {mean:.2f} tokens a step, {speedup:.2f} × FAR")
    if m.size not in m.ratios.get("dcar_speedup_over_mean_chunk", ()):
        read = m.card["read_far"] + head_costs(m.decoder.heads).read(mean) + m.card["read_policy"][name]
        bound = speedup / mean * read / m.card["read_far"]
        m.ratio("dcar_speedup_over_mean_chunk", speedup / mean)
        m.ratio("dcar_over_own_bound", bound)
        print(f"that is {speedup / mean:.3f} of its chunk, {bound:.3f} of what its bytes allow")


def _growth(m: Measurement, window: int = 40) -> None:
    """Cost against batch, and against length: the prompt makes the length, `window` tokens are spoken behind it."""
    model, card, quick, far = m.decoder, m.card, m.config.quick, ChunkMethod(FixedChunk(1))
    batches = {b: m.load.prompts(model, b) for b in ([1, 8, 32] if quick else [1, 8, 32, 128])}
    engines = {b: m.engine(b, prompts) for b, prompts in batches.items()}
    seconds = m.time({b: partial(engines[b].decode, prompts, ChunkMethod(FixedChunk(2)), m.load.sampling())
                      for b, prompts in batches.items()}, m.once)
    rate = {b: b * m.load.tokens / median(s) for b, s in seconds.items()}
    print("batches, tokens/s: " + "  ".join(f"{b}: {r:.0f}" for b, r in rate.items()))
    m.ratio("batch8_over_batch1", rate[8] / rate[1])
    m.ratio("batch32_over_batch1", rate[32] / rate[1])
    card["tokens_per_second_by_batch"] = {str(b): r for b, r in rate.items()}

    loads = {n: Load(60, n, window) for n in ([100, 400] if quick else [200, 500, 1000, 2000])}
    shortest, longest = min(loads), max(loads)
    engine = engine_for(model, loads[longest].prompts(model), loads[longest].sampling(), batch=1)
    seconds = m.time({(n, tokens): partial(engine.decode, load.prompts(model), far, load.sampling(tokens))
                      for n, load in loads.items() for tokens in (1, window)}, m.few)
    grown = {n: median([1e3 * (a - b) / (window - 1) for a, b in zip(seconds[n, window], seconds[n, 1], strict=True)])
             for n in loads}
    weights, kv = model.norm.weight.element_size() * card["read_far"], card["kv_bytes_per_token"]
    allowed = {n: grown[shortest] * (weights + n * kv) / (weights + shortest * kv) for n in grown}
    print("ms a step by length: " + "  ".join(f"{n}: {ms:.2f} (bytes: {allowed[n]:.2f})" for n, ms in grown.items()))
    m.ratio("growth_over_kv_model", grown[longest] / allowed[longest])
    card["ms_per_step_by_length"] = {str(n): ms for n, ms in grown.items()}


def _peers(m: Measurement) -> None:
    """Greedy next-token decoding of the same weights: the engine, the loop (with the decoder's own passes and with fast
    ones), Hugging Face `generate` with a dynamic and a static cache; and with the same draft model and draft length on
    both sides, `sd` with fast passes and assisted generation."""
    from eval.speed.hf_peer import CausalLMPeer, generate

    model, t, (prompt,) = m.decoder, m.load.tokens, m.prompts
    draft = m.models.draft
    assert draft is not None
    greedy, far = m.load.sampling(temperature=0.0), ChunkMethod(FixedChunk(1))
    peer, assistant, reader = CausalLMPeer(model), CausalLMPeer(draft), m.reader(model)
    verifier = SpeculativeDecoding("sd@draft", ModelDrafter(m.reader(draft), DEFAULT_LENGTH))
    engine, spoken = m.engine(), dict[str, list[int]]()
    verified: list[DecodeResult] = []

    def speculate() -> list[int]:
        verified[:] = decode(reader, [prompt], verifier, greedy)
        return verified[0].tokens

    ways: dict[str, Callable[[], list[int]]] = {
        "static engine": lambda: engine.decode([prompt], far, greedy)[0].tokens,
        "loop": lambda: decode(model, [prompt], far, greedy)[0].tokens,
        "fast loop": lambda: decode(reader, [prompt], far, greedy)[0].tokens,
        "hf dynamic": lambda: generate(peer, prompt, t), "hf static": lambda: generate(peer, prompt, t, static=True),
        "sd": speculate,
        "hf assisted": lambda: generate(peer, prompt, t, assistant=assistant, draft_length=DEFAULT_LENGTH)}
    seconds = m.time({name: partial(lambda name, way: spoken.update({name: way()}), name, way)
                      for name, way in ways.items()}, m.few)
    speed = {name: t / median(s) for name, s in seconds.items()}
    same = {name: tokens == spoken["loop"] for name, tokens in spoken.items()}
    print("greedy FAR on the same weights, tokens/s: " + "; ".join(
        f"{name} {rate:.1f}{'' if same[name] else ' (other tokens)'}" for name, rate in speed.items()))
    m.ratio("far_over_hf_generate", speed["static engine"] / max(speed["hf dynamic"], speed["hf static"]))
    m.ratio("sd_over_hf_assisted", speed["sd"] / speed["hf assisted"])
    kept = verified[0].accepted / max(1, verified[0].proposed)
    print(f"sd and hf assisted: one draft model, drafts of {DEFAULT_LENGTH}; sd kept {100 * kept:.0f} % of the drafted "
          "tokens")
    m.card |= {"peers": speed, "peers_same_tokens": same, "draft_accepted": kept}


def _methods(m: Measurement) -> None:
    """The families of methods in the loop with fast passes, which all of them can use, at batch 1 and 32. Of random
    weights it is the time that says something, not how much of a draft is accepted."""
    model, heads, draft = m.decoder, m.decoder.config.num_prediction_heads, m.models.draft
    assert draft is not None
    reader, policy = m.reader(model), next(iter(m.models.policies.values()))
    built: dict[str, Callable[[], Method]] = {f"car-{k}": partial(_car, k) for k in sorted({1, min(3, heads), heads})}
    built["dcar"] = lambda: ChunkMethod(PolicyChunk(policy, "sample", num_candidates=m.config.num_candidates))
    verifying = Models(model)
    verifying.draft = m.reader(draft)  # type: ignore[assignment]
    built |= {e.name: e.build for e in make_methods(
        ["sd@draft", "sd", "ssd-0.4", "pcg-0.42", "typical", "topk-verify-50"], verifying)}
    batches = {b: m.load.prompts(model, b) for b in (1, 32)}
    passes: dict[tuple[str, int], float] = {}

    def speak(name: str, batch: int) -> None:
        spoken = decode(reader, batches[batch], built[name](), m.load.sampling(), batch_size=batch)
        passes[name, batch] = sum(len(r.tokens) for r in spoken) / sum(r.target_passes for r in spoken)

    seconds = m.time({key: partial(speak, *key) for key in ((name, b) for name in built for b in batches)}, m.once)
    card = m.card["methods"] = {name: {str(b): {"tokens_per_second": b * m.load.tokens / median(seconds[name, b]),
                                               "tokens_per_pass": passes[name, b]} for b in batches} for name in built}
    for name, of in card.items():
        print(f"{name:16}" + "".join(f"  batch {b}: {x['tokens_per_second']:9.1f} tokens/s, "
                                     f"{x['tokens_per_pass']:.2f} a pass" for b, x in of.items()))


PARTS: dict[str, Callable[[Measurement], None]] = {
    "steps": _steps, "growth": _growth, "peers": _peers, "methods": _methods}


def run(config: SpeedConfig) -> dict[str, Any]:
    """Measure and print; returns the object of the last line."""
    started, cpu_started = time.perf_counter(), time.process_time()
    torch.set_num_threads(config.threads)
    device = torch.device(config.device)
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    print(f"machine: {machine()}; device {device}; torch {torch.__version__}; up to {config.repeats} interleaved "
          f"repeats, medians, {config.clock} clock")
    if busy > cores / 2:
        print(f"NOTE: the machine is busy (load {busy:.1f} on {cores} cores); times are not those of an idle one")
    ratios: dict[str, Any] = {}
    cards: dict[str, Any] = {}
    for size in config.sizes:
        models = load_all(config, size)
        cards[size] = print_card(size, models.decoder, models.policies, device) | precision_of(models.decoder)
        measured = Measurement(config, size, models, cards[size], ratios)
        for part in ["steps"] if measured.brief else config.parts:
            PARTS[part](measured)
    spent = {"wall": time.perf_counter() - started, "cpu": time.process_time() - cpu_started}
    print(f"the benchmark took {spent['wall']:.0f} s, {spent['cpu']:.0f} s of the processor")
    result = {"machine": machine(), "device": config.device, "dtype": config.dtype, "clock": config.clock,
              "quick": config.quick, "load": busy, "cores": cores, "seconds": spent, "ratios": ratios, "models": cards}
    print(json.dumps(result))
    return result


def main(arguments: list[str] | None = None) -> None:
    run(load_config(SpeedConfig, arguments))


if __name__ == "__main__":
    sys.exit(run_command("eval.speed.run", main))
