"""Speed of methods end to end, of steps as the host sees them, of the vocoder, and of both
trainings, at the papers' sizes. Times do not depend on the weights."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import dcar.train.car
import rl.train
from dcar.config import load_config
from dcar.decoding import Engine, PolicyChunk
from dcar.methods import load_models, make_methods
from dcar.prepare.prepared import load_prepared
from dcar.prompts.load import load_prompts, vocoder_for
from dcar.sources.shipped import shipped
from dcar.storage import json_lines
from dcar.train.car import CARTrainer
from dcar.vocoder.acoustic import SPEAKER_DIM, VocoderConfig
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.training.pack import FRAME_RATE, SAMPLE_RATE, VocoderData
from dcar.vocoder.training.trainer import Trainer, TrainVocoderConfig
from eval.analysis.fit_verifiers import fit
from eval.compare.config import CompareConfig
from eval.results.timing import read_timings, speed_of, speedup, synchronize, time_methods
from eval.speed.measure import Load, SpeedRow, interleaved
from eval.speed.models import made_up_statistics, random_models
from rl.rollout import forced_sizes

CODES, TOKEN_RATE = 2048, 50


def seconds(call: Callable[[], object], device: str) -> float:
    """Return the seconds that a call takes, after a warm-up."""
    return interleaved({"": call}, 1, device)[""].seconds


def measure_methods(device: str, out: Path) -> list[SpeedRow]:
    """Time the methods of the quickstart end to end, decoder and vocoder, with the shipped models.

    They run in float32, so that the tokens are those of a CPU, whose word errors are known. car-1
    takes the place of FAR, because it does the same work per step.
    """
    recipe = load_config(CompareConfig, ["--config", "compare_starter"])
    names = ["car-1" if name == "far" else name for name in recipe.methods]
    utterances = 10
    if device == "cpu":
        names, utterances = ["car-1", "car-8", "dcar@n4", "sd", "vadusa-2"], 1
    data, sampling = str(shipped("prepared")), recipe.sampling
    models = load_models("starter", "", ["starter-t1.0"], device, dtype="float32")
    precision = torch.get_float32_matmul_precision()  # TF32, since a model was loaded
    items, dev = (
        load_prompts(data, split, models.decoder, recipe.prompt_tokens, 0, utterances)
        for split in (recipe.split, "dev")
    )
    speech = list(load_prepared(data, "train")["speech"])
    models.statistics = fit(models.decoder, dev, speech, sampling, ranks=10, thresholds=2)
    entries = make_methods(names, models, sampling)
    vocoder = vocoder_for(models.decoder, data, items, "", device)
    torch.set_float32_matmul_precision("highest")
    try:
        time_methods(items, vocoder, entries, 0, out / "timings")
    finally:
        torch.set_float32_matmul_precision(precision)
    times, rows = read_timings(items, entries, 0, out / "timings"), []
    first = entries[0].name
    for name in (entry.name for entry in entries):
        mine = [time for time in times if time.method == name]
        tokens = sum(time.tokens for time in mine) / sum(time.passes for time in mine)
        speed, gain = speed_of(times, name), speedup(times, name, first)
        if speed is None or gain is None:
            rows.append(SpeedRow(f"{name}, RTF end to end", {}, "no speech"))
            continue
        values = {"": speed.rtf, "of the decoder": speed.lm_rtf}
        compare = f"{gain.total:.2f} and {gain.lm:.2f} × {first}; {tokens:.2f} tokens per pass"
        rows.append(SpeedRow(f"{name}, RTF end to end", values, compare))
        rows.append(SpeedRow(f"{name}, seconds to first audio", {"": speed.first_audio or 0.0}))
    return rows


def replay_ms(engine: Engine, count: int = 200) -> float:
    """Return the milliseconds of a replay of an engine's step of the most rows and columns,
    measured on the device."""
    graphs = engine.graphs.captured()
    graph = graphs[max(key for key in graphs if key[0] == "step")]
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    first.record()
    for _ in range(count):
        graph.replay()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / count


def measure_replays(device: str, _out: Path) -> list[SpeedRow]:
    """Measure a step of six methods at batch 1 and 32: as the host sees it, and, on a GPU, its
    graph alone. What the first has more than the second, the host adds.

    A step of the host is the time by which decoding takes longer for more tokens, over the number
    of further rounds.
    """
    tiny = device == "cpu"
    size, dtype = ("tiny", "float32") if tiny else ("paper", "bfloat16")
    models = random_models(size, "independent", device, dtype)
    models.statistics = made_up_statistics(models.decoder)
    models.policies = {"": models.policies["full"]}
    loads = [Load(20, 10, n) for n in (6, 12)] if tiny else [Load(60, 50, n) for n in (113, 225)]
    rows = []
    for entry in make_methods("car-1 car-7 dcar sd pcg-0.42 vadusa-2".split(), models):
        for batch in (1, 2) if tiny else (1, 32):
            engines = [
                Engine(models.decoder, entry.method, load.sampling(), batch) for load in loads
            ]
            runs = {
                str(i): partial(engine.decode, load.prompts(models.decoder, batch))
                for i, (engine, load) in enumerate(zip(engines, loads, strict=True))
            }
            (few, brief), (many, long) = interleaved(runs, 1 if tiny else 3, device).values()
            rounds = [max(result.passes for result in results) for results in (brief, long)]
            values = {"": 1e3 * (many - few) / max(1, rounds[1] - rounds[0])}
            if engines[1].graphs.enabled:
                values["of its graph alone"] = replay_ms(engines[1])
            rows.append(SpeedRow(f"{entry.name}, batch {batch}, ms per step", values))
    return rows


def made_up_audio(device: str) -> VocoderData:
    """Return training data for the vocoder: rows of noise with random tokens."""
    rows, tokens = 8, 120
    count = rows * tokens
    frames = count * FRAME_RATE // TOKEN_RATE
    torch.manual_seed(0)
    with torch.device(device):
        samples = torch.randint(-3000, 3000, (count * SAMPLE_RATE // TOKEN_RATE,))
        return VocoderData(
            waves=samples.to(torch.int16),
            tokens=torch.randint(CODES, (count,)),
            log_f0=torch.full((frames,), 5.0),
            voiced=torch.ones(frames),
            lengths=torch.full((rows,), tokens),
            speaker=torch.randn(rows, SPEAKER_DIM),
            voice=torch.arange(rows) % 2,
            validation=torch.arange(rows) == 0,
            top=torch.full((rows,), 12_000.0),
            tokenizer_checksum="",
        )


def measure_vocoder(device: str, _out: Path) -> list[SpeedRow]:
    """Measure the vocoder: synthesis of utterances of 6 s in batches, pieces of a stream, and
    training steps."""
    tiny = device == "cpu"
    vocoder = TokenVocoder(VocoderConfig(vocab_size=CODES)).to(device).eval()
    tokens, rows = 25 if tiny else 6 * TOKEN_RATE, []
    for batch in (1, 2) if tiny else (1, 16, 64):
        speech = [[(7 * i + b) % CODES for i in range(tokens)] for b in range(batch)]
        voices = np.random.default_rng(0).standard_normal((batch, SPEAKER_DIM)).astype(np.float32)
        spent = seconds(partial(vocoder.synthesize, speech, voices), device)
        what = f"vocoder, batch {batch}, seconds of audio per second"
        speed = batch * tokens / TOKEN_RATE / spent
        rows.append(SpeedRow(what, {"": speed}))
    stream, count = vocoder.stream(voices[0]), 1 if tiny else 20
    stream.push([1] * 150)
    spent = seconds(lambda: [stream.push([1] * 25) for _ in range(count)], device)
    rows.append(SpeedRow("vocoder, ms of a streamed piece of 0.5 s", {"": 1e3 * spent / count}))
    config = TrainVocoderConfig(data="random", model={"vocab_size": CODES}, bf16=not tiny)
    trainer = Trainer(config, made_up_audio(device), torch.device(device))
    steps = 1 if tiny else 20
    speed = steps / seconds(lambda: [trainer.step() for _ in range(steps)], device)
    rows.append(SpeedRow("vocoder, training steps per second", {"": speed}))
    return rows


def measure_rollouts(device: str, _out: Path) -> list[SpeedRow]:
    """Measure the rollouts of a DCPO step, half of them with forced sizes: decoding, and with
    the vocoder."""
    tiny = device == "cpu"
    size, dtype = ("tiny", "float32") if tiny else ("paper", "bfloat16")
    models = random_models(size, "independent", device, dtype)
    load = Load(20, 10, 12) if tiny else Load(60, 150, 250)
    groups, members = (1, 2) if tiny else (8, 8)
    prompts, rows = load.prompts(models.decoder, groups), groups * members
    forced = {
        prompt.utterance_id: forced_sizes(group, members, [2, 3], "policy_ratio")
        for group, prompt in enumerate(prompts)
    }
    method = PolicyChunk(models.policies["full"], "sample", forced=forced)
    engine = Engine(models.decoder, method, load.sampling(), rows, record_hidden=True)
    decode = partial(engine.decode, prompts, seed=0, group_size=members)
    decoded, results = interleaved({"": decode}, 1, device)[""]
    config = VocoderConfig(vocab_size=models.decoder.config.speech_vocab_size)
    vocoder, voices = TokenVocoder(config).to(device).eval(), np.zeros((rows, SPEAKER_DIM), "f")
    voiced = seconds(lambda: vocoder.synthesize([r.tokens for r in results], voices), device)
    what, aim = f"rollouts of {load.tokens} tokens, {rows} rows, per second", "aim ≥ 400"
    return [
        SpeedRow(f"{what}: tokens only", {"": rows / decoded}, aim),
        SpeedRow(f"{what}: with the vocoder", {"": rows / (decoded + voiced)}),
    ]


@contextmanager
def recorded_steps(count: int) -> Iterator[list[tuple[float, int]]]:
    """Record the start of each of `count` training steps within the block and its number of speech
    tokens. The device is waited for only where the measured steps begin and end."""
    original = CARTrainer.training_step
    steps: list[tuple[float, int]] = []

    def step(self: CARTrainer, model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        if len(steps) in (count // 2, count - 1):
            synchronize(self.args.device)
        steps.append((time.perf_counter(), len(inputs["positions"])))
        return original(self, model, inputs, *rest)

    with patch.object(CARTrainer, "training_step", step):
        yield steps


def tokens_per_second(steps: Sequence[tuple[float, int]]) -> float:
    """Return the speed of the second half of recorded steps, except the last one, which has no
    end."""
    measured = steps[len(steps) // 2 :]
    return sum(tokens for _, tokens in measured[:-1]) / (measured[-1][0] - measured[0][0])


def measure_stage_one(device: str, out: Path) -> list[SpeedRow]:
    """Train with batches of the paper's size, with larger ones, and compiled."""
    steps, tokens = 40, "per_device_train_batch_tokens"
    runs = {
        "plain, batches of 10,000 tokens": [f"{tokens}=10000"],
        "plain, 40,000 tokens": [f"{tokens}=40000"],
        "compiled, 40,000 tokens": [f"{tokens}=40000", "torch_compile=true"],
    }
    if device == "cpu":
        steps, tiny = 4, {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 2}
        tiny |= {"ffn_size": 64, "head_blocks": 1}
        shape = [f"model.{name}={size}" for name, size in tiny.items()]
        runs = {"plain, batches of 1,000 tokens": [f"{tokens}=1000", "bf16=false", *shape]}
    common = ["--config", "car_paper", f"data={shipped('prepared')}", f"out={out}"]
    common += ["gradient_accumulation_steps=1", "dataloader_num_workers=0", f"max_steps={steps}"]
    rows = []
    for name, settings in runs.items():
        with recorded_steps(steps) as recorded:
            dcar.train.car.main([*common, "resume_from_checkpoint=never", *settings])
        speed = tokens_per_second(recorded)
        rows.append(SpeedRow(f"stage one, {name}, speech tokens per second", {"": speed}))
    return rows


def loudness(audio: Sequence[np.ndarray | None], **_: Any) -> list[float | None]:
    """Return rewards of 0 computed from the waveforms, so that rollouts are voiced without a
    recogniser."""
    return [None if wave is None else 0.0 * float(np.abs(wave).mean()) for wave in audio]


def measure_stage_two(device: str, out: Path) -> list[SpeedRow]:
    """Train a policy for the decoder of `stage-one` and take the times of the last step, because
    the first ones capture graphs."""
    rollouts, size = 64, ["max_steps=4", "limit=64", "max_tokens=250"]
    if device == "cpu":
        rollouts, size = 4, ["max_steps=1", "limit=2", "max_tokens=12"]
        size += ["num_generations=2", "policy_heads=2"]
    common = ["--config", "dcpo_paper", f"data={shipped('prepared')}", f"out={out}"]
    common += [f"decoder={out.with_name('stage-one')}", "vocoder=starter", "min_seconds=0"]
    common += ["reward_funcs=[token_likelihood,range_penalty,launch.gpu_parts.loudness]"]
    common += ["eval_strategy=no", "save_strategy=no", f"per_device_train_batch_size={rollouts}"]
    rl.train.main([*common, *size])
    lines = json_lines(out / "log.jsonl", "a line of a log", "run the training again")
    last = [line for _, line in lines if "seconds_rollout" in line][-1]
    prefix = "seconds_"
    spent = {name.removeprefix(prefix): s for name, s in last.items() if name.startswith(prefix)}
    # decoding runs in parallel with vocoder and recogniser
    step = max(spent["rollout"], spent.get("vocoder", 0) + spent.get("recognizer", 0))
    speed = SpeedRow(
        "rollouts with rewards, per second", {"": rollouts / step}, f"{rollouts} per step"
    )
    return [SpeedRow("stage two, seconds per step", spent), speed]
