"""What a recipe costs before it runs: memory by kind, and GPU-hours.

    dcar estimate --config car_paper device=rtx4090 processes=8
    dcar estimate --config dcpo_paper device=a100
    dcar estimate --config car_llasa_8b device=h100 processes=8 sharded=true  # once converted

The recipe's own settings can be overridden as in its command (`batch_size=4`). Counts of parameters, gradients,
optimiser state and cache are exact: the model is built without memory. Activations follow the formulas in
`launch/cost.py`, held to measured bytes by a test. Time is arithmetic divided by what a device achieves: a share of
its peak (`utilisation`). What is assumed, and where it was found, is printed with the estimate.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dcar.config import check, load_config, setting
from dcar.config.read import file_settings, read_yaml
from dcar.config.recipes import recipe_file
from dcar.errors import ConfigError
from dcar.prepare.prepared import prepared_folder, prepared_info
from launch import cost

# Dense bfloat16 tensor-core peak (FLOP/s), memory bandwidth (bytes/s), memory (bytes): the makers' data sheets.
DEVICES = {
    "rtx4090": (165e12, 1.01e12, 24e9),
    "a100": (312e12, 2.04e12, 80e9),
    "h100": (989e12, 3.35e12, 80e9),
    "h200": (989e12, 4.8e12, 141e9),
    "cpu": (60e9, 20e9, 16e9),  # one thread of a server core, float32
}


@dataclass
class EstimateConfig:
    """What the recipe does not say. Everything else on the line overrides the recipe."""

    job: str = setting("", "What the recipe is for; empty = by its keys.", choices=("", "train", "dcpo", "compare"))
    device: str = setting("a100", "What it runs on.", choices=DEVICES)
    processes: int = setting(0, "One a device; 0 = those of the Accelerate file that the recipe's launch line names, "
                                "else 1.", minimum=0)
    sharded: bool = setting(False, "FSDP or ZeRO 3: the processes divide weights, gradients and optimiser state.")
    utilisation: float = setting(0.35, "Share of the peak that training achieves.", above=0, maximum=1)
    utterances: int = setting(0, "0 = of the prepared corpus.", minimum=0)
    seconds: float = setting(0.0, "Mean length of an utterance; 0 = of the prepared corpus, else 6.", minimum=0)
    token_rate: float = setting(0.0, "Speech tokens a second; 0 = of the prepared corpus, else 50.", minimum=0)
    codes: int = setting(0, "Speech codes; 0 = of the decoder or prepared corpus, else as the recipe says.", minimum=0)
    text_rate: float = setting(13.0, "Text units a second of speech (phonemes; about 4 for byte pairs).", above=0)
    chunk: float = setting(2.5, "Mean tokens a pass of rollouts.", above=0)
    pass_overhead: float = setting(0.004, "Seconds a pass takes beside arithmetic and memory (launches, the loop).",
                                   minimum=0)
    scoring: float = setting(50.0, "Seconds of speech that vocoder and recogniser handle in a second, per process.",
                             above=0)
    json: bool = setting(False, "Print one line of JSON instead of the table.")

    def __post_init__(self):
        check(self)


def split_arguments(arguments: Sequence[str]) -> tuple[EstimateConfig, str, list[str], str]:
    """Our own settings, the job, what is left for the recipe's schema, and the recipe (empty without one)."""
    names = {f.name for f in fields(EstimateConfig)}
    own: list[str] = []
    rest: list[str] = []
    recipe = ""
    queue = list(arguments)
    if "-h" in queue or "--help" in queue:
        load_config(EstimateConfig, ["--help"])  # prints the settings and exits
    while queue:
        argument = queue.pop(0)
        key, _, value = argument.removeprefix("--").partition("=")
        if key == "config":
            recipe = value or (queue.pop(0) if queue else "")
            rest.append(f"--config={recipe}")
        else:
            (own if key in names else rest).append(argument)
    config = load_config(EstimateConfig, own)
    if not recipe and not config.job and not any("=" in a for a in rest):
        raise ConfigError("give a recipe: dcar estimate --config car_paper device=a100")
    return config, config.job or job_of(recipe, rest), rest, recipe


def job_of(recipe: str | Path, overrides: Sequence[str]) -> str:
    """Which job a recipe is for, by keys that only one of them has. ConfigError where that is not clear."""
    keys = {given.key for given in file_settings(recipe)} if recipe else set()
    keys |= {a.removeprefix("--").partition("=")[0].split(".")[0] for a in overrides}
    for job, marks in (("compare", {"methods"}),
                       ("dcpo", {"num_generations", "policy_width", "forced_rows", "guidance"}),
                       ("train", {"model", "max_steps", "backbone"})):
        if keys & marks:
            return job
    raise ConfigError(f"{recipe}: no recipe of stage one, DCPO or a comparison by its keys; give job=train, dcpo or "
                      "compare")


def processes_of(recipe: str | Path) -> tuple[int, str]:
    """How many processes a recipe means, by its launch line (its variant's, if that has one), and where that was
    found."""
    path, variant = recipe_file(recipe) if recipe else (None, "")
    text = path.read_text(encoding="utf-8") if path else ""
    line = r"accelerate launch --config_file (\S+)(?:.*--num_processes[ =](\d+))?"
    found = variant and re.search(rf"{line}.*:{re.escape(variant)}$", text, re.M) or re.search(line, text)
    if not found:
        return 1, "nothing in the recipe says more"
    if found[2]:
        return int(found[2]), "the recipe's launch line"
    settings, _ = read_yaml(Path(__file__).parents[1] / found[1])
    return int(settings["num_processes"]), f"{found[1]}, which the recipe's launch line names"


@dataclass
class Workload:
    """Mean utterance of the corpus: how many there are, speech tokens and text units of each; tokens a second, speech
    codes and text units that there are (0: not known); and what of it was assumed."""

    utterances: int
    speech: float
    text: float
    token_rate: float
    codes: int
    text_vocab: int
    assumptions: list[str]


def workload(config: EstimateConfig, data: str, split: str) -> Workload:
    """From prepared.json where there is one, else from the settings."""
    seconds, count, rate, codes, text_vocab = config.seconds, config.utterances, config.token_rate, config.codes, 0
    notes = []
    if (prepared_folder(data) / "prepared.json").is_file():
        info = prepared_info(data)
        counts = info["counts"].get(split) or next(iter(info["counts"].values()))
        count = count or counts["utterances"]
        if not seconds and "seconds" in counts:
            seconds = counts["seconds"] / counts["utterances"]
        codes = codes or info["tokenizer"]["vocab_size"]
        rate = rate or info["tokenizer"]["rate_hz"]
        text_vocab = info["phonemes"]["size"]
        notes.append(f"utterances, codes and token rate of {data} where not given")
    else:
        notes.append(f"there is no prepared corpus in '{data}': what it would say is given or assumed")
    notes.append(f"{seconds:.2f} s an utterance" if seconds else "6 s an utterance: assumed, give seconds=…")
    rate, seconds = rate or 50.0, seconds or 6.0
    notes.append(f"{rate:g} speech tokens and {config.text_rate:g} text units a second of speech (text_rate)")
    return Workload(count, seconds * rate, seconds * config.text_rate, rate, codes, text_vocab, notes)


def estimate(arguments: Sequence[str]) -> dict[str, Any]:
    """The estimate of a recipe: what it assumes, bytes per process by kind, seconds, GPU-hours. ConfigError."""
    config, job, rest, recipe = split_arguments(arguments)
    source = "given"
    if not config.processes:
        config.processes, source = processes_of(recipe)
    peak, bandwidth, memory = DEVICES[config.device]
    rate = peak * config.utilisation
    device = cost.Device(rate, bandwidth, config.pass_overhead)
    result = {"train": _train, "dcpo": _dcpo, "compare": _compare}[job](config, rest, device)
    total = sum(result["bytes"].values())
    assumptions = [f"{config.processes} process{'es' * (config.processes > 1)}: {source}",
                   f"arithmetic: utilisation {config.utilisation:g} of a peak of {peak / 1e12:g} TFLOP/s",
                   *result.pop("assumptions")]
    return {"job": job, "device": config.device, "processes": config.processes, **result, "bytes_total": total,
            "fits": total < 0.92 * memory, "device_bytes": memory, "flops_per_second": rate,
            "hours": result["seconds"] / 3600, "gpu_hours": result["seconds"] * config.processes / 3600,
            "assumptions": assumptions}


def _train(config: EstimateConfig, rest: list[str], device: cost.Device) -> dict[str, Any]:
    from dcar.train.car import TrainConfig

    recipe = load_config(TrainConfig, rest)
    work = workload(config, recipe.data, "train")
    if not recipe.backbone.path:  # as stage one does
        recipe.model.speech_vocab_size = work.codes or recipe.model.speech_vocab_size
        recipe.model.text_vocab_size = work.text_vocab or recipe.model.text_vocab_size
    model = cost.meta_model(recipe)
    text, prompt = layout(model.config, recipe.prompt_tokens, work)
    tokens = cost.Tokens(recipe.batch_size, text, work.speech + prompt, work.speech)
    sizes = cost.training_bytes(model, recipe.optimizer, storage=recipe.backbone.dtype)
    parts = config.processes if config.sharded else 1
    layers = {k: v / parts for k, v in sizes.items()}
    layers["activations"] = cost.activation_bytes(model, tokens, recipe.bf16, recipe.gradient_checkpointing,
                                                  recipe.head_positions)
    flops = cost.training_flops(model, tokens, recipe.gradient_checkpointing, recipe.head_positions)
    step = flops * recipe.gradient_accumulation / device.flops
    return {
        "parameters": cost.count(model), "trained": cost.count(model, trained=True), "bytes": layers,
        "flops_per_step": flops * recipe.gradient_accumulation, "seconds_per_step": step,
        "seconds": step * recipe.max_steps, "steps": recipe.max_steps,
        "audio_hours": recipe.max_steps * recipe.batch_size * recipe.gradient_accumulation * config.processes
        * work.speech / work.token_rate / 3600,
        "assumptions": [codes_note(model, work), *work.assumptions],
    }


def layout(config: Any, prompt_tokens: int, work: Workload) -> tuple[float, float]:
    """Text positions, and speech positions of the prompt: a crop, or another utterance with its text."""
    text = work.text * (1 if config.bos else 2) + cost.template(config)
    return text, prompt_tokens if config.bos else work.speech


def codes_note(model: Any, work: Workload) -> str:
    """How many speech codes the model has, and who says so."""
    codes = model.config.speech_vocab_size
    known = codes == work.codes
    return f"{codes} speech codes" + ("" if known else ", as recipe or decoder say; another number: codes=…")


def _decoder(path: str, work: Workload) -> tuple[Any, list[str]]:
    """The decoder of a recipe without its weights, and what was assumed: the paper's shape with the corpus' codes where
    it has not been trained yet."""
    from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder
    from dcar.model.car import CARConfig, CARDecoder
    from dcar.model.load import load_decoder_config

    known = path == "starter" or (Path(path) / "config.json").is_file()
    found = load_decoder_config(path) if known else CARConfig()
    if not known and work.codes:
        found.speech_vocab_size = work.codes
    model = cost.on_meta(lambda: BackboneDecoder(found) if isinstance(found, BackboneConfig) else CARDecoder(found))
    note = f"decoder {path}" if known else f"there is no decoder in '{path}' yet: of the paper's size"
    return model, [note, codes_note(model, work)]


def _dcpo(config: EstimateConfig, rest: list[str], device: cost.Device) -> dict[str, Any]:
    from heads.policy import ChunkPolicy, ChunkPolicyConfig
    from rl.config import DCPOConfig

    recipe = load_config(DCPOConfig, [*rest, "use_cpu=true"])
    work = workload(config, recipe.data, "train")
    base, notes = _decoder(recipe.decoder, work)
    policy = cost.on_meta(lambda: ChunkPolicy(ChunkPolicyConfig(
        base.config.hidden_size, base.config.num_prediction_heads, recipe.policy_width, recipe.policy_heads)))
    prompts = min(work.utterances or 10**9, recipe.max_train_prompts or 10**9)
    if prompts == 10**9:
        raise ConfigError(f"no prepared corpus in '{recipe.data}' and no max_train_prompts: give utterances=…")
    rows, (text, prompt) = recipe.per_device_train_batch_size, layout(base.config, recipe.prompt_tokens, work)
    rollout = cost.decode_seconds(base, device, rows, text, prompt, work.speech, config.chunk)
    tokens = rows * (prompt + work.speech)
    update = 3 * 2 * cost.count(policy) * tokens * recipe.num_iterations / device.flops
    score = rows * work.speech / work.token_rate / config.scoring
    steps = -(-prompts // (recipe.prompts_per_step * config.processes)) * recipe.num_train_epochs
    step = max(rollout, score) + update  # rewards are computed beside the rollouts
    size = 2 if recipe.hidden_dtype == "float16" else 4
    capacity = text + prompt + work.text * recipe.max_tokens_per_text_unit
    memory = {"base": cost.count(base) * 4, "kv_cache": cost.kv_bytes(base.config, rows, capacity),
              "hidden": rows * capacity * base.config.hidden_size * 4 + tokens * base.config.hidden_size * size,
              "policy": cost.count(policy) * 4 * (4 + 2)}  # weights, gradients, two moments; two frozen copies
    spoken = 2 * (recipe.max_eval_prompts or 0) * (recipe.num_train_epochs + 1) if recipe.eval_strategy != "no" else 0
    evaluation = -(-spoken // config.processes) * (rollout / rows + work.speech / work.token_rate / config.scoring)
    return {"parameters": cost.count(base), "trained": cost.count(policy), "bytes": memory,
            "steps": steps, "seconds_per_step": step, "seconds_rollout": rollout, "seconds_scoring": score,
            "seconds_update": update, "seconds_evaluation": evaluation, "seconds": steps * step + evaluation,
            "assumptions": [*notes, *work.assumptions, *decoding_notes(config)]}


def _compare(config: EstimateConfig, rest: list[str], device: cost.Device) -> dict[str, Any]:
    from eval.compare.run import CompareConfig
    from eval.compare.sweeps import expand_names
    from eval.methods.samplings import split_label

    recipe = load_config(CompareConfig, rest)
    work = workload(config, recipe.data, recipe.split)
    base, notes = _decoder(recipe.decoder, work)
    utterances = min(work.utterances or 10**9, recipe.limit or 10**9)
    if utterances == 10**9:
        raise ConfigError(f"no prepared corpus in '{recipe.data}' and no limit: give utterances=…")
    text, prompt = layout(base.config, recipe.prompt_tokens, work)
    audio = work.speech / work.token_rate
    spoken = utterances * len(recipe.seeds)
    seconds = timing = 0.0
    for name in expand_names(recipe.methods):
        name, _, _ = split_label(name)  # no sampling changes what a pass costs
        size = 1.0 if name == "far" else float(name[4:]) if name.startswith("car-") else config.chunk
        batch = cost.decode_seconds(base, device, recipe.batch_size, text, prompt, work.speech, size)
        seconds += spoken / recipe.batch_size * batch + spoken * audio / config.scoring
        timing += 2 * min(recipe.timing_utterances, utterances) * cost.decode_seconds(
            base, device, 1, text, prompt, work.speech, size)
    capacity = text + prompt + min(recipe.sampling.max_tokens, work.text * recipe.sampling.max_tokens_per_text_unit)
    memory = {"decoder": cost.count(base) * 4 * (2 if recipe.far_decoder else 1),
              "kv_cache": cost.kv_bytes(base.config, recipe.batch_size, capacity)}
    return {"parameters": cost.count(base), "trained": 0, "bytes": memory, "utterances": spoken,
            "seconds_timing": timing, "seconds": seconds / config.processes + timing,
            "assumptions": [*notes, *work.assumptions, *decoding_notes(config)]}


def decoding_notes(config: EstimateConfig) -> list[str]:
    """What the time of decoding and scoring rests on."""
    return [f"{config.chunk:g} tokens a pass where no method fixes them (chunk), {1000 * config.pass_overhead:g} ms of "
            "overhead a pass (pass_overhead)",
            f"vocoder and recogniser handle {config.scoring:g} s of speech a second, per process (scoring)"]


def table(result: dict[str, Any]) -> str:
    """The estimate for people."""
    def size(value: float) -> str:
        return f"{value / 1e9:9.3f} GB"

    lines = [f"{result['job']} on {result['processes']} x {result['device']}",
             f"parameters      {result['parameters'] / 1e6:9.2f} M, trained {result['trained'] / 1e6:.2f} M"]
    lines += [f"{name:15} {size(value)}" for name, value in result["bytes"].items()]
    lines.append(f"{'together':15} {size(result['bytes_total'])} of {result['device_bytes'] / 1e9:.0f} GB per process"
                 + ("" if result["fits"] else ": does not fit; less batch, gradient_checkpointing, sharded=true"))
    for name in ("seconds_per_step", "seconds_rollout", "seconds_scoring", "seconds_update", "seconds_timing"):
        if name in result:
            lines.append(f"{name:18} {result[name]:.4g}")
    lines.append(f"{result['hours']:.2f} hours, {result['gpu_hours']:.2f} device-hours"
                 + (f" for {result['steps']:.0f} steps" if "steps" in result else ""))
    lines += ["assumed:", *(f"  - {note}" for note in result["assumptions"])]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    result = estimate(arguments)
    wanted = split_arguments(arguments)[0].json
    print(json.dumps(result) if wanted else table(result))
