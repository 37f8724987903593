"""The static engine in the speed benchmark: chunk-wise methods, DCAR, lengths, batches, and its peers."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dcar.decoding import ChunkMethod, DecodeResult, FixedChunk, PolicyChunk, Prompt, decode
from dcar.decoding.engine.run import StaticEngine, engine_for
from dcar.decoding.fast.passes import FastDecoder
from dcar.errors import ConfigError
from dcar.model.draft import AnyDecoder
from dcar.sampling import SamplingConfig
from eval.methods.chains import DEFAULT_LENGTH
from eval.methods.registry import Entry, Models, make_methods
from eval.results.timing import module_device
from eval.speed.measure import Load, Spread, clock, interleaved, spread
from eval.verifiers.drafters import ModelDrafter
from eval.verifiers.sd import SpeculativeDecoding
from heads.policy import ChunkPolicy


def measure_dcar(model: AnyDecoder, engine: StaticEngine, policy: ChunkPolicy, load: Load,
                 repeats: int, num_candidates: int = 1) -> dict[str, Any]:
    """DCAR (actions drawn, so that an untrained policy too uses all sizes) against FAR in the same engine: tokens/s
    without the prefill, the mean chunk, the policy's share of a step of equal chunk size, and what such a step takes in
    times of one of CAR-k, with all that is drawn and dropped."""
    prompts, middle = load.prompts(model, 1), min(10 if policy.config.after_draw else 3, policy.config.num_actions)
    dcar = ChunkMethod(PolicyChunk(policy, "sample", num_candidates=num_candidates))
    forced = ChunkMethod(PolicyChunk(policy, forced={prompts[0].utterance_id: [middle]}, num_candidates=num_candidates))
    last: dict[str, DecodeResult] = {}
    timed: list[dict[str, float]] = []  # of the forced runs, warm-up first

    def speak(name: str, method: ChunkMethod, tokens: int) -> None:
        last[name] = engine.decode(prompts, method, load.sampling(tokens))[0]
        if name == "forced":
            timed.append(last[name].seconds)

    t = load.tokens
    runs = {"prefill": partial(speak, "prefill", ChunkMethod(FixedChunk(1)), 1),
            "prefill dcar": partial(speak, "prefill dcar", dcar, 1),
            "far": partial(speak, "far", ChunkMethod(FixedChunk(1)), t),
            "middle": partial(speak, "middle", ChunkMethod(FixedChunk(middle)), t),
            "forced": partial(speak, "forced", forced, t), "dcar": partial(speak, "dcar", dcar, t)}
    engine.clock = clock()  # that of the benchmark, so that other jobs do not count where it is the processor's
    seconds = interleaved(runs, repeats, module_device(model))
    prefill = {name: statistics.median(seconds[name]) for name in ("prefill", "prefill dcar")}
    passes = last["dcar"].target_passes - 1  # the first chunk comes with the prefill
    rest = t - last["dcar"].emitted[0]
    far = [(s - prefill["prefill"]) / (t - 1) for s in seconds["far"]]  # seconds a token
    mine = [(s - prefill["prefill dcar"]) / rest for s in seconds["dcar"]]
    mean = rest / passes
    over = [(a - prefill["prefill dcar"]) / (b - prefill["prefill"])
            for a, b in zip(seconds["forced"], seconds["middle"], strict=True)]
    on_cpu = module_device(model).type == "cpu"
    if on_cpu:  # timed inside the run: what slows a step slows its policy too
        share = [s["policy"] / (s["lm"] - prefill["prefill dcar"] - s["policy"]) for s in timed[1:]]
    else:
        share = [ratio - 1 for ratio in over]
    return {"kept": middle, "over_fixed": spread(over), "mean_chunk": mean,
            "speedup": spread([a / b for a, b in zip(far, mine, strict=True)]),
            "ms_per_step": spread([1e3 * m * mean for m in mine]), "tokens_per_second": spread([1 / m for m in mine]),
            "policy_share": spread(share)}


def measure_engine_batches(model: AnyDecoder, load: Load, batches: Sequence[int], repeats: int) -> dict[int, Spread]:
    """Tokens/s of CAR-2 over all rows of a batch, in engines made for each."""
    engines = {b: engine_for(model, load.prompts(model, b), load.sampling(), batch=b) for b in batches}
    runs = {b: partial(e.decode, load.prompts(model, b), ChunkMethod(FixedChunk(2)), load.sampling())
            for b, e in engines.items()}
    seconds = interleaved(runs, repeats, module_device(model))
    return {b: spread([b * load.tokens / s for s in seconds[b]]) for b in batches}


def measure_lengths(model: AnyDecoder, lengths: Sequence[int], repeats: int, window: int = 40) -> dict[int, Spread]:
    """ms a step of FAR around a given number of speech positions: the prompt makes the length, `window` tokens are
    spoken behind it, the prefill is taken off."""
    loads = {n: Load(60, n, window) for n in lengths}
    most = loads[max(lengths)]
    engine = engine_for(model, most.prompts(model, 1), most.sampling(), batch=1)
    method = ChunkMethod(FixedChunk(1))
    runs: dict[Any, Callable[[], Any]] = {}
    for n, load in loads.items():
        prompts = load.prompts(model, 1)
        runs[n] = partial(engine.decode, prompts, method, load.sampling())
        runs[n, "prefill"] = partial(engine.decode, prompts, method, load.sampling(1))
    seconds = interleaved(runs, repeats, module_device(model))
    return {n: spread([1e3 * (a - b) / (window - 1) for a, b in zip(seconds[n], seconds[n, "prefill"], strict=True)])
            for n in lengths}


def measure_rollout_engines(model: AnyDecoder, policy: ChunkPolicy, load: Load, group: int,
                            repeats: int) -> dict[str, Spread]:
    """Seconds of a group's rollouts with hidden states kept: one by one in the reference loop and in the engine (the
    way of a trainer that generates sequentially), and in one batch that shares the prefill."""
    prompts, method = load.prompts(model, 1), ChunkMethod(PolicyChunk(policy, "sample"))
    sampling = load.sampling()
    one = engine_for(model, prompts, sampling, batch=1, policy=policy)
    many = engine_for(model, prompts, sampling, batch=group, policy=policy)

    def singly(speak: Callable[..., Any]) -> None:
        for seed in range(group):
            speak(prompts, method, sampling, seed=seed, record_hidden=True)

    return {name: spread(s) for name, s in interleaved({
        "loop one by one": partial(singly, partial(decode, model)), "engine one by one": partial(singly, one.decode),
        "engine batch": partial(many.decode, prompts, method, sampling, group_size=group, record_hidden=True),
    }, repeats, module_device(model)).items()}


def measure_peers(models: Models, load: Load, repeats: int) -> dict[str, Any]:
    """Greedy next-token decoding of the same weights: the engine, the loop (with the decoder's own passes and with fast
    ones), Hugging Face `generate` with a dynamic and a static cache; and with the same draft model and draft length on
    both sides, `sd` with fast passes and assisted generation."""
    from eval.speed.hf_peer import CausalLMPeer, generate

    model, draft = models.decoder, models.draft
    if draft is None:
        raise ConfigError("the peers need a draft model")
    prompt: Prompt = load.prompts(model, 1)[0]
    t = load.tokens
    greedy = SamplingConfig(temperature=0, min_tokens=t + 16, max_tokens=t, max_tokens_per_text_unit=float(t))
    peer, method = CausalLMPeer(model), ChunkMethod(FixedChunk(1))
    assistant, verified = CausalLMPeer(draft), list[DecodeResult]()
    reader, quick_draft = FastDecoder(model), FastDecoder(draft)
    engine = engine_for(model, [prompt], greedy, batch=1)
    spoken: dict[str, list[int]] = {}

    def speculate() -> list[int]:
        verifier = SpeculativeDecoding("sd@draft", ModelDrafter(quick_draft, DEFAULT_LENGTH))
        verified[:] = decode(reader, [prompt], verifier, greedy)
        return verified[0].tokens

    def note(name: str, speak: Callable[[], list[int]]) -> None:
        spoken[name] = speak()

    runs: dict[str, Callable[[], Any]] = {
        "static engine": lambda: note("static engine", lambda: engine.decode([prompt], method, greedy)[0].tokens),
        "loop": lambda: note("loop", lambda: decode(model, [prompt], method, greedy)[0].tokens),
        "fast loop": lambda: note("fast loop", lambda: decode(reader, [prompt], method, greedy)[0].tokens),
        "hf dynamic": lambda: note("hf dynamic", lambda: generate(peer, prompt, t)),
        "hf static": lambda: note("hf static", lambda: generate(peer, prompt, t, static=True)),
        "sd": lambda: note("sd", speculate),
        "hf assisted": lambda: note("hf assisted", lambda: generate(peer, prompt, t, assistant=assistant,
                                                                    draft_length=DEFAULT_LENGTH)),
    }
    seconds = interleaved(runs, repeats, module_device(model))
    return {"tokens_per_second": {name: spread([t / s for s in seconds[name]]) for name in runs},
            "same_tokens": {name: spoken[name] == spoken["loop"] for name in runs},
            "draft_accepted": verified[0].accepted / max(1, verified[0].proposed), "draft_length": DEFAULT_LENGTH}


def measure_named(names: Sequence[str], models: Models, load: Load, repeats: int) -> dict[str, dict[str, Spread]]:
    """Tokens/s of methods by name (a verifier, say), with the decoder's own passes ("loop") and with
    those of a FastDecoder ("fast"). ConfigError for one that these models cannot run."""
    if not names:
        return {}
    prompts = load.prompts(models.decoder, 1)
    quick = copy.copy(models)
    quick.fast = True
    runs: dict[Any, Callable[[], Any]] = {
        (e.name, way): partial(_decode, e, prompts)
        for way, of in (("loop", models), ("fast", quick)) for e in make_methods(names, of, load.sampling())}
    seconds = interleaved(runs, repeats, module_device(models.decoder))
    out: dict[str, dict[str, Spread]] = {}
    for (name, way), times in seconds.items():
        out.setdefault(name, {})[way] = spread([load.tokens / s for s in times])
    return out


def _decode(entry: Entry, prompts: Sequence[Prompt]) -> list[DecodeResult]:
    return decode(entry.decoder, prompts, entry.build(), entry.sampling)
