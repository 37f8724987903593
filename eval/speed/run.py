"""How fast decoding is on this machine, beside how fast it could be.

    python -m eval.speed --quick                     # under a minute on two cores
    python -m eval.speed decoder=runs/car policy=runs/dcpo/export

First a card of what each step has to read and what the machine can read, hence a floor; then the measurements, in the
static engine unless said otherwise: CAR-k and DCAR at batch 1, the policy's share of a step, a group's
rollouts in one batch against one by one, batches, lengths, and Hugging Face's `generate` on the same weights.
Repeats are interleaved, medians printed with their range; every run speaks a fixed number of tokens (EOS forbidden),
so no method gains by stopping early. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from dcar.config import check, load_config, setting
from dcar.decoding.engine.run import engine_for
from dcar.errors import ConfigError
from dcar.model.car import CARConfig, CARDecoder
from dcar.model.draft import AnyDecoder, build_draft
from dcar.process import run_command
from dcar.tracking import machine
from eval.methods.registry import Models, load_models
from eval.results.timing import module_device
from eval.speed import engine as measure
from eval.speed.measure import CLOCKS, Load, chosen_clock, measure_car, memory_rates, print_card
from heads.build import HEAD_KINDS, check_kind
from heads.chunk_scorer import ChunkScorerConfig
from heads.costs import head_costs
from heads.policy import ChunkPolicy, ChunkPolicyConfig

SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(text_vocab_size=128, speech_vocab_size=64, hidden_size=64, num_layers=2, num_attention_heads=2,
                 ffn_size=128, head_blocks=2, bos=True),
    "starter": dict(text_vocab_size=64, speech_vocab_size=1024, hidden_size=192, num_layers=8, num_attention_heads=4,
                    ffn_size=704, bos=True),  # launch/recipes/car_starter.yaml
    "paper": dict(bos=True),
}
"""Shapes of random models, used where no checkpoint is given; CARConfig's defaults are the paper's."""

HEADS = ("heads", "num_prediction_heads", "head_width", "tie_heads")
"""Settings that say which heads random models have."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class SpeedConfig:
    """Settings of the speed benchmark."""

    decoder: str = setting("", "Checkpoint measured in the place of the random starter model.")
    policy: str = setting("", "Its policy; empty = random ones, bottleneck and full width.")
    draft: str = setting("", "Its draft model; empty = made of the decoder's own layers, untrained.")
    far_decoder: str = setting("", "The checkpoint behind `far`; empty = the decoder's own base head.")
    dtype: str = setting("float32", "Of weights, cache and arithmetic.", choices=DTYPES)
    sizes: list[str] = setting(["starter", "paper"], "Models that are measured.", choices=SIZES)
    heads: str = setting("independent", "Kind of the random models' heads: independent, or shared.", choices=HEAD_KINDS)
    num_prediction_heads: int = setting(7, "Heads of the random models.", minimum=1)
    head_width: int = setting(0, "Width inside the blocks of shared heads; 0 = twice the model's.", minimum=0)
    tie_heads: bool = setting(False, "The base head is the output layer of shared heads too.")
    chunks: list[int] = setting([], "Sizes of CAR-k that are measured; empty = all (at paper size with quick 1, 3, 7).",
                                minimum=1)
    quick: bool = setting(False, "Under a minute on two cores.")
    repeats: int = setting(5, "Interleaved runs of everything.", minimum=1)
    group: int = setting(8, "Rollouts of one utterance.", minimum=2)
    policy_reads: str = setting("hidden", "What the random policies see: hidden states (the paper's, before the draw), "
                                          "or candidates, with a chunk scorer.", choices=("hidden", "candidates"))
    num_candidates: int = setting(1, "Candidates that DCAR draws side by side, for policies with a chunk scorer.",
                                  minimum=1, old=("draws",))
    actions: int = setting(0, "Random policies choose among 1 … actions tokens (5: 3 on average); 0 = all heads.",
                           minimum=0)
    device: str = setting("cpu", "cpu or cuda.")
    methods: list[str] = setting(["far", "sd", "sd@draft"], "Of eval.methods, by either loop.")
    parts: list[str] = setting(lambda: list(PARTS), "Of steps, rollouts, growth (batch and length), methods, and peers "
                                                    "(Hugging Face on the same weights).")
    tokens: int = setting(0, "Speech tokens of a run; 0 = 210, with quick 60 (paper size: 15).", minimum=0)
    clock: str = setting("wall", "cpu: processor time of this process, for a CPU on which other jobs run.",
                         choices=CLOCKS)
    threads: int = setting(1, "Of torch; with more, whatever else runs decides the times of small models.", minimum=1)

    def __post_init__(self) -> None:
        check(self)
        if (self.policy or self.draft or self.far_decoder) and not self.decoder:
            raise ConfigError("policy, draft and far_decoder belong to a checkpoint: give decoder=…")
        check_kind(self.heads, head_width=self.head_width, tie_heads=self.tie_heads)
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ConfigError(f"unknown parts {unknown}; choose among {', '.join(PARTS)}")
        if self.clock == "cpu" and self.device != "cpu":
            raise ConfigError(f"clock 'cpu' measures the CPU, not '{self.device}': set clock=wall")


def random_policies(model: AnyDecoder, actions: int = 0, reads: str = "hidden") -> dict[str, ChunkPolicy]:
    """Untrained policies, which choose among 1 … `actions` tokens (0: up to all heads) alike: a bottleneck of 256 (half
    the width of a small model), and the paper's full width; one that reads candidates is as launch/recipes/
    dcpo_starter.yaml makes it."""
    width, most = model.config.hidden_size, model.config.num_prediction_heads
    actions, heads = min(actions or most, most), model.config.num_attention_heads
    shape = dict(hidden_size=width, num_actions=actions, num_attention_heads=heads)
    if reads == "candidates":
        chunk_scorer = ChunkScorerConfig(width, most, model.config.output_size)
        made = {"after the draw": ChunkPolicyConfig(
            **shape, width=None, reads=reads, score_width=0, chunk_scorer_width=chunk_scorer.width,
            chunk_scorer_embedding=chunk_scorer.embedding_size, chunk_scorer_ids=chunk_scorer.vocab_size)}
    else:
        made = {"bottleneck": ChunkPolicyConfig(**shape, width=min(256, width // 2)),
                "full": ChunkPolicyConfig(**shape, width=None)}
    return {name: placed(ChunkPolicy(config).eval(), model) for name, config in made.items()}


def placed(policy: ChunkPolicy, model: AnyDecoder) -> ChunkPolicy:
    """A policy on the decoder's device, and in its type where it reads hidden states; scores of candidates and a
    chunk scorer are small, and computed in float32."""
    policy = policy.to(module_device(model))
    return policy if policy.layer is None else policy.to(model.norm.weight.dtype)


def load_all(config: SpeedConfig, size: str) -> Models:
    """What is measured, in the dtype asked for: checkpoints where they are given (the size "starter" only), random
    weights elsewhere. The draft model is one for all that drafts by a model, the peer included; without a checkpoint
    it is made of the decoder's own layers."""
    if size == "starter" and config.decoder:
        models = load_models(config.decoder, config.far_decoder, [config.policy] if config.policy else [],
                             config.device, config.draft)  # checks what belongs together, before anything is rounded
    else:
        torch.manual_seed(0)
        heads = {name: getattr(config, name) for name in HEADS}
        models = Models(CARDecoder(CARConfig(**SIZES[size], **heads)).eval().to(config.device))
    dtype = DTYPES[config.dtype]
    decoder = models.decoder.to(dtype)
    if models.policies:
        models.policies = {"trained": placed(models.policies[""], decoder)}
    else:
        models.policies = random_policies(decoder, config.actions, config.policy_reads)
    models.far_decoder = decoder if models.far_decoder is None else models.far_decoder.to(dtype)
    if not is_brief(config, size):
        models.draft = (models.draft or cast(AnyDecoder, build_draft(decoder).eval())).to(dtype)
    return models


def is_brief(config: SpeedConfig, size: str) -> bool:
    """Whether only steps are measured, because all of it would take minutes."""
    return config.quick and size == "paper"


RATIOS = ("car_k_over_k_times_car_1", "car_k_bound", "static_over_loop", "graphed_over_eager",
          "dcar_speedup_over_mean_chunk", "dcar_over_own_bound", "policy_share_of_step", "dcar_step_over_car_step",
          "far_over_hf_generate", "sd_over_hf_assisted",
          "rollouts_over_sequential", "rollouts_over_sequential_engine", "batch8_over_batch1", "batch32_over_batch1",
          "growth_over_kv_model", "floor_share_far")


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

    def ratio(self, name: str, value: Any) -> None:
        self.ratios[name][self.size] = value


def _steps(m: Measurement) -> None:
    """CAR-k and DCAR at batch 1, in the engine, and what their steps consist of."""
    model, load, card, heads = m.models.decoder, m.load, m.card, m.models.decoder.config.num_prediction_heads
    engines = {name: engine_for(model, load.prompts(model, 1), load.sampling(), batch=1, policy=policy)
               for name, policy in m.models.policies.items()}
    engine = next(iter(engines.values()))
    asked = sorted({1, *m.config.chunks}) if m.config.chunks else [1, 3, 7] if m.brief else range(1, heads + 1)
    chosen = [k for k in asked if k <= heads]
    car = measure_car(model, load, chosen, m.repeats, engine.decode)
    floor = card["floor_ms"]
    print("method     ms a step                       tokens/s                        with prefill         % of floor")
    for k, got in car.items():
        print(f"CAR-{k}  {got['ms_per_step']!s:30}  {got['tokens_per_second']!s:30}  {got['with_prefill']!s:30} "
              f"{100 * floor[k] / got['ms_per_step'].median:.0f}")
    rate = {k: got["tokens_per_second"].median for k, got in car.items()}
    m.ratio("car_k_over_k_times_car_1", {str(k): rate[k] / (k * rate[1]) for k in car if k > 1})
    m.ratio("car_k_bound", {str(k): floor[1] / floor[k] for k in car if k > 1})
    m.ratio("floor_share_far", floor[1] / car[1]["ms_per_step"].median)
    card["ms_per_step"] = {str(k): got["ms_per_step"].median for k, got in car.items()}

    shares, over = {}, {}
    for name, policy in m.models.policies.items():
        dcar = measure.measure_dcar(model, engines[name], policy, load, m.repeats, m.config.num_candidates)
        share, mean = dcar["policy_share"], dcar["mean_chunk"]
        print(f"DCAR ({name} policy): {mean:.2f} tokens a step, {dcar['tokens_per_second']} tokens/s, "
              f"{dcar['speedup'].median:.2f} × FAR; the policy adds {100 * share.median:.1f} % to a step "
              f"({100 * share.low:.1f}–{100 * share.high:.1f})")
        print(f"a step in which it keeps {dcar['kept']} tokens takes {dcar['over_fixed']} times one of "
              f"CAR-{dcar['kept']}")
        shares[name], over[name] = share.median, dcar["over_fixed"].median
        if len(shares) == 1:
            ratio = dcar["speedup"].median / mean
            read = card["read_far"] + head_costs(model.heads).read(mean) + card["read_policy"][name]
            m.ratio("dcar_speedup_over_mean_chunk", ratio)
            m.ratio("dcar_over_own_bound", ratio * read / card["read_far"])
            print(f"that is {ratio:.3f} of its chunk, {ratio * read / card['read_far']:.3f} of what its bytes allow")
    m.ratio("policy_share_of_step", shares)
    m.ratio("dcar_step_over_car_step", over)
    if m.brief:
        return
    loop = measure_car(model, load, [1], m.few)
    m.ratio("static_over_loop", rate[1] / loop[1]["tokens_per_second"].median)
    print(f"reference loop, CAR-1: {loop[1]['ms_per_step']} ms a step")
    if engine.graphs.enabled:
        eager = engine_for(model, load.prompts(model, 1), load.sampling(), batch=1, graphs=False)
        launched = measure_car(model, load, chosen, m.few, eager.decode)
        print("without graphs, ms a step: " + "  ".join(f"CAR-{k} {got['ms_per_step'].median:.2f}"
                                                        for k, got in launched.items()))
        m.ratio("graphed_over_eager", {str(k): rate[k] / got["tokens_per_second"].median
                                       for k, got in launched.items()})
        card["ms_per_step_eager"] = {str(k): got["ms_per_step"].median for k, got in launched.items()}


def _rollouts(m: Measurement) -> None:
    policy = next(iter(m.models.policies.values()))
    rollouts = measure.measure_rollout_engines(m.models.decoder, policy, m.load, m.config.group, m.once)
    together = rollouts["engine batch"].median
    m.ratio("rollouts_over_sequential", rollouts["loop one by one"].median / together)
    m.ratio("rollouts_over_sequential_engine", rollouts["engine one by one"].median / together)
    print(f"{m.config.group} rollouts, s: " + "; ".join(f"{name} {s}" for name, s in rollouts.items()))


def _growth(m: Measurement) -> None:
    """Cost against batch and length."""
    model, card, quick = m.models.decoder, m.card, m.config.quick
    batches = measure.measure_engine_batches(model, m.load, [1, 8, 32] if quick else [1, 8, 32, 128], m.once)
    print("batches, tokens/s: " + "  ".join(f"{b}: {s.median:.0f}" for b, s in batches.items()))
    m.ratio("batch8_over_batch1", batches[8].median / batches[1].median)
    m.ratio("batch32_over_batch1", batches[32].median / batches[1].median)
    card["tokens_per_second_by_batch"] = {str(b): s.median for b, s in batches.items()}

    grown = measure.measure_lengths(model, [100, 400] if quick else [200, 500, 1000, 2000], m.few)
    shortest, longest = min(grown), max(grown)
    weights, kv = model.norm.weight.element_size() * card["read_far"], card["kv_bytes_per_token"]
    bytes_model = {n: grown[shortest].median * (weights + n * kv) / (weights + shortest * kv) for n in grown}
    print("ms a step by length: " + "  ".join(f"{n}: {s.median:.2f} (bytes: {bytes_model[n]:.2f})"
                                              for n, s in grown.items()))
    m.ratio("growth_over_kv_model", grown[longest].median / bytes_model[longest])
    card["ms_per_step_by_length"] = {str(n): s.median for n, s in grown.items()}


def _methods(m: Measurement) -> None:
    own_far = m.models.far_decoder is not m.models.decoder
    whose = "the FAR checkpoint" if own_far else "CAR-1's weights, no FAR checkpoint was given"
    for name, rate_of in measure.measure_named(m.config.methods, m.models, m.load, m.few).items():
        print(f"{name}: {rate_of['loop']} tokens/s in the loop, {rate_of['fast']} with fast passes"
              f"{' (' + whose + ')' if name == 'far' else ''}")
        m.card.setdefault("methods", {})[name] = {way: s.median for way, s in rate_of.items()}
    m.card["far_weights"] = whose


def _peers(m: Measurement) -> None:
    peers = measure.measure_peers(m.models, m.load, m.few)
    speed = peers["tokens_per_second"]
    print("greedy FAR on the same weights, tokens/s: " + "; ".join(
        f"{name} {s}{'' if peers['same_tokens'][name] else ' (other tokens)'}" for name, s in speed.items()))
    best = max(speed["hf dynamic"].median, speed["hf static"].median)
    m.ratio("far_over_hf_generate", speed["static engine"].median / best)
    m.ratio("sd_over_hf_assisted", speed["sd"].median / speed["hf assisted"].median)
    kept, drafted = peers["draft_accepted"], peers["draft_length"]
    print(f"sd and hf assisted: one draft model, drafts of {drafted}; sd kept {100 * kept:.0f} % of the drafted tokens")
    m.card["peers"] = {name: s.median for name, s in speed.items()}
    m.card["peers_same_tokens"] = peers["same_tokens"]
    m.card["draft_accepted"] = kept


PARTS: dict[str, Callable[[Measurement], None]] = {
    "steps": _steps, "rollouts": _rollouts, "growth": _growth, "methods": _methods, "peers": _peers,
}


def run(config: SpeedConfig) -> dict[str, Any]:
    """Measure and print; returns the object of the last line."""
    started, cpu_started = time.perf_counter(), time.process_time()
    torch.set_num_threads(config.threads)
    chosen_clock.set(config.clock)
    device = torch.device(config.device)
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    print(f"machine: {machine()}; device {device}; torch {torch.__version__}; up to {config.repeats} interleaved "
          f"repeats, medians, {config.clock} clock")
    if busy > cores / 2:
        print(f"NOTE: the machine is busy (load {busy:.1f} on {cores} cores); times are not those of an idle one")
    rates = memory_rates(device, DTYPES[config.dtype], 64 if config.quick else 256)
    ratios: dict[str, Any] = {name: {} for name in RATIOS}
    cards: dict[str, Any] = {}
    for size in config.sizes:
        models = load_all(config, size)
        cards[size] = print_card(size, models.decoder, models.policies, rates, device)
        measured = Measurement(config, size, models, cards[size], ratios)
        for part in ["steps"] if measured.brief else config.parts:
            PARTS[part](measured)
        cards[size]["floor_ms"] = {str(k): ms for k, ms in cards[size]["floor_ms"].items()}
    spent = {"wall": time.perf_counter() - started, "cpu": time.process_time() - cpu_started}
    print(f"the benchmark took {spent['wall']:.0f} s, {spent['cpu']:.0f} s of the processor")
    result = {"machine": machine(), "device": config.device, "dtype": config.dtype, "clock": config.clock,
              "quick": config.quick, "load": busy, "cores": cores, "seconds": spent, "rates": rates, "ratios": ratios,
              "models": cards}
    print(json.dumps(result))
    return result


def main(arguments: list[str] | None = None) -> None:
    run(load_config(SpeedConfig, arguments))


if __name__ == "__main__":
    sys.exit(run_command("eval.speed.run", main))
