"""Measure every figure of the docs that needs a GPU, in one process, the most important first.

    python -m launch.gpu_rows                            # device=cpu: rehearsal with tiny sizes
    python -m launch.gpu_rows parts=[methods,steps,rounds] minutes=3

`methods` times the shipped decoder and vocoder. All other parts measure models of the papers' sizes
with random weights (`launch.gpu_parts`), because times do not depend on the weights. The output of
a part is in <out>/<part>.log, and its figures are in <out>/rows.md as soon as it ends. The same
command measures what is missing. `stage-two` trains a policy for the decoder of `stage-one`.
`hours` computes from the measured rates how long this card takes for each stage of the DCAR paper's
recipe (`launch.gpu_hours`). Nothing is downloaded.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import dcar.train.car
import eval.speed.run
import rl.train
from dcar.config import check, load_config, setting
from dcar.errors import ConfigError, DCARError
from dcar.prepare.prepared import load_prepared
from dcar.process import run_claimed, run_command
from dcar.prompts.load import load_prompts, vocoder_for
from dcar.sampling import SamplingConfig
from dcar.sources.shipped import shipped
from dcar.storage import json_lines, write_text
from dcar.tracking import machine, write_json
from eval.analysis.fit_verifiers import fit
from eval.methods.registry import load_models, make_methods
from eval.results.timing import speedup, summarize, time_methods
from launch.gpu_hours import hours
from launch.gpu_parts import (
    Bench,
    Found,
    clocked,
    memory,
    prepare_found,
    recognisers_found,
    rollouts_found,
    vocoder_found,
)

Part = tuple[list[str], Callable[[list[str], Path], Found]]
"""Arguments of a part, and the function that measures with them, given these and <out>/<part>."""
RECIPES = Path(__file__).parent / "recipes"
SHAPES = {
    "rollouts": rollouts_found,
    "prepare": prepare_found,
    "recognisers": recognisers_found,
    "vocoder": vocoder_found,
}
PARTS = (
    "methods",
    "steps",
    "rounds",
    "stage-one",
    *SHAPES,
    "hours",
    "peers",
    "stage-two",
    "growth",
    "compiled",
    "sixteen-heads",
    "no-graphs",
    "steps-float32",
    "rounds-float32",
)
AIMS = {
    "dcar_speedup_over_mean_chunk": "≥ 0.92",
    "floor_share_far": "≥ 0.3",
    "decision_over_pass": "≤ 0.10",
    "round_over_far_step": "≤ 1.3, plus the steps of a draft model",
    "far_over_hf_generate": "≥ 5",
    "batch32_over_batch1": "≥ 20",
    "growth_over_kv_model": "≤ 1.3",
    "sd_over_hf_assisted": "≥ 2",
}


@dataclass
class RowsConfig:
    """Settings of `launch.gpu_rows`."""

    out: str = setting("runs/gpu_rows", "Folder to write.", place="folder")
    device: str = setting(
        "cuda",
        "Device; cpu = a rehearsal with tiny sizes, whose times have no meaning.",
        choices=("cuda", "cpu"),
    )
    minutes: float = setting(6.0, "Minutes after which no further part is started.", above=0)
    parts: list[str] = setting(list(PARTS), "Parts to measure, in this order.", choices=PARTS)

    def __post_init__(self) -> None:
        check(self)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"torch {torch.__version__} finds no GPU: run this on a machine with one and a "
                "torch built for CUDA (docs/install.md); device=cpu rehearses it here with tiny "
                "sizes"
            )


def loudness(
    completions: Sequence[Any], audio: Sequence[np.ndarray | None], sample_rate: int, **columns: Any
) -> list[float | None]:
    """Return rewards of 0 computed from the waveforms, so that rollouts are voiced without a
    recogniser."""
    return [None if wave is None else 0.0 * float(np.abs(wave).mean()) for wave in audio]


def methods_rows(device: str, utterances: int, methods: Sequence[str], out: Path) -> Found:
    """Time the methods of the quickstart end to end, decoder and vocoder, with the shipped models.

    They run in float32, so that the tokens are those of a CPU, whose word errors are known. car-1
    takes the place of FAR, because it does the same work per step.
    """
    recipe = yaml.safe_load((RECIPES / "compare_starter.yaml").read_text())
    data = str(shipped("prepared"))
    sampling, length = SamplingConfig(**recipe["sampling"]), recipe["prompt_tokens"]
    models = load_models("starter", "", ["starter"], device, dtype="float32")
    items = load_prompts(data, recipe["split"], models.decoder, length, 0, utterances)
    models.statistics = fit(
        models.decoder,
        load_prompts(data, "dev", models.decoder, length, 0, utterances),
        list(load_prepared(data, "train")["speech"]),
        sampling,
        ranks=10,
        thresholds=2,
    )
    entries = make_methods(
        ["car-1" if name == "far" else name for name in methods or recipe["methods"]],
        models,
        sampling,
    )
    records = time_methods(
        items, vocoder_for(models.decoder, data, items, "", device), entries, 0, utterances, out
    )
    found = {e.name: summarize(records, e.name) for e in entries}
    rows = []
    for name, of in found.items():
        mine = [r for r in records if r["method"] == name]
        per_pass = sum(r["tokens"] for r in mine) / sum(r["passes"] for r in mine)
        times = [f"{speedup(of, found[entries[0].name], rtf):.2f}" for rtf in ("rtf", "lm_rtf")]
        rows.append(
            (
                f"{name}, RTF end to end; of the decoder",
                f"{of['rtf']:.4f}; {of['lm_rtf']:.4f}",
                f"{' and '.join(times)} × {entries[0].name}; {per_pass:.2f} tokens per pass",
            )
        )
    return Found(rows)


def speed_rows(size: str, arguments: list[str], out: Path) -> Found:
    """Run `dcar analyse what=speed` for one size."""
    found = eval.speed.run.run(load_config(eval.speed.run.SpeedConfig, arguments))
    card, ratios, rows = found["models"][size], found["ratios"], list[tuple[str, str, str]]()
    for k, ms in card.get("ms_per_step", {}).items():
        floor, decided = card["floor_ms"][k], card["ms_per_decided_step"]
        times = [f"{ms:.3f}"]
        times += [f"{of[k]:.3f} if a policy ({name}) decides" for name, of in decided.items()]
        bound = f"floor of bytes {floor:.3f} ({floor / ms:.0%})"
        rows.append((f"CAR-{k}, ms per step", "; ".join(times), bound))
    for batch, rate in card.get("tokens_per_second_by_batch", {}).items():
        rows.append((f"CAR-2, batch {batch}, tokens per second", f"{rate:.0f}", ""))
    for length, ms in card.get("ms_per_step_by_length", {}).items():
        rows.append((f"FAR after {length} tokens, ms per step", f"{ms:.3f}", ""))
    for name, rate in card.get("peers", {}).items():
        same = card["peers_same_tokens"][name]
        rows.append(
            (
                f"greedy FAR, {name}, tokens per second",
                f"{rate:.0f}",
                "" if same else "different tokens (rounding)",
            )
        )
    for name, of in card.get("methods", {}).items():
        rows.append(
            (
                f"{name}, ms per round; tokens per second at batch 1, 32",
                f"{of['ms_per_round']:.3f}; {of['1']:.0f}, {of['32']:.0f}",
                f"{of['tokens_per_pass']:.2f} tokens per pass",
            )
        )
    rows += [
        (name, shown(ratios[name][size]), f"aim {aim}")
        for name, aim in AIMS.items()
        if name in ratios
    ]
    return Found(rows)


def shown(ratio: float | Mapping[str, Any]) -> str:
    """Format a ratio, or several by name; those by chunk size of a policy are reduced to their
    median."""
    if not isinstance(ratio, Mapping):
        return f"{ratio:.2f}"
    several = {
        name: np.median(list(r.values())) if isinstance(r, Mapping) else r
        for name, r in ratio.items()
    }
    return ", ".join(f"{name} {value:.2f}" for name, value in several.items())


def stage_one_rows(
    runs: Mapping[str, list[str]], steps: int, arguments: list[str], out: Path
) -> Found:
    """Train once for each of `runs` (name: further arguments), timing the second half of the
    steps."""
    found = Found([])
    for number, (name, more) in enumerate(runs.items()):
        folder = out.with_name(f"{out.name}-{number}" if number else out.name)
        with clocked(steps) as clock:
            dcar.train.car.main(
                [
                    *arguments,
                    *more,
                    f"max_steps={steps}",
                    f"out={folder}",
                    "resume_from_checkpoint=never",
                ]
            )
        rate = clock["tokens"] / clock["seconds"]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        found.rows.append(
            (f"stage one, {name}, speech tokens per second", f"{rate:.0f}", memory(device))
        )
        found.rates["stage_one"] = max(rate, found.rates.get("stage_one", 0.0))
    return found


def stage_two_rows(rollouts: int, arguments: list[str], out: Path) -> Found:
    """Train a policy and take the times of the last step, because the first ones capture graphs."""
    rl.train.main(arguments)
    lines = [
        line
        for _, line in json_lines(out / "log.jsonl", "a line of a log", "run the training again")
    ]
    last = [line for line in lines if "seconds_rollout" in line][-1]
    spent = {
        name.removeprefix("seconds_"): s for name, s in last.items() if name.startswith("seconds_")
    }
    # decoding runs in parallel with vocoder and recogniser
    step = max(spent["rollout"], spent.get("vocoder", 0) + spent.get("asr", 0))
    return Found(
        [
            (
                "stage two, seconds per step",
                ", ".join(f"{name} {s:.2f}" for name, s in spent.items()),
                "",
            ),
            ("rollouts with rewards, per second", f"{rollouts / step:.1f}", f"{rollouts} per step"),
        ]
    )


def hours_rows(arguments: list[str], out: Path) -> Found:
    """Compute the hours of each stage of the recipe from the rates measured by the other parts."""
    kept = [out.with_name(f"{name}.json") for name in PARTS if name != "hours"]
    rates = [json.loads(path.read_text())["rates"] for path in kept if path.exists()]
    return Found(
        [(f"{stage}, hours", spent, work) for stage, spent, work in hours(dict(ChainMap(*rates)))]
    )


def shape_rows(
    found: Callable[[Bench], Found], bench: Bench, arguments: list[str], out: Path
) -> Found:
    """Measure with a function of `launch.gpu_parts`."""
    return found(bench)


def parts(config: RowsConfig) -> dict[str, Part]:
    """Return all parts by name."""
    tiny, out, data = config.device == "cpu", Path(config.out), f"data={shipped('prepared')}"
    size, rollouts = ("tiny", 4) if tiny else ("paper", 64)
    speed = [
        f"device={config.device}",
        f"sizes=[{size}]",
        *(
            ["tokens=12", "repeats=1", "quick=true", "num_prediction_heads=3"]
            if tiny
            else ["tokens=225", "repeats=3"]
        ),
    ]
    measured = partial(speed_rows, size)
    made: dict[str, Part] = {
        "methods": (
            ["car-1", "car-8", "dcar@n4", "sd", "vadusa-2"] if tiny else [],
            lambda methods, out: methods_rows(config.device, 1 if tiny else 10, methods, out),
        )
    }
    for name, asked in {
        "steps": ["parts=[steps]"],
        "rounds": ["parts=[methods]"],
        "peers": ["parts=[peers]"],
        "growth": ["parts=[growth]"],
        "no-graphs": ["parts=[steps]", "graphs=false"],
        "compiled": ["parts=[steps]", f"compile={'false' if tiny else 'true'}", "chunks=[1,3]"],
        "sixteen-heads": [
            "parts=[steps]",
            "heads=shared",
            "num_prediction_heads=16",
            "policy_reads=candidates",
            "num_candidates=4",
            "chunks=[1,8,16]",
        ],
    }.items():
        made[name] = [*speed, "dtype=bfloat16", *asked], measured
    for name in ("steps", "rounds"):
        made[f"{name}-float32"] = (
            [a.replace("bfloat16", "float32") for a in made[name][0]],
            measured,
        )
    runs = {
        "plain, batches of 10,000 tokens": ["per_device_train_batch_tokens=10000"],
        "plain, 40,000 tokens": ["per_device_train_batch_tokens=40000"],
        "compiled, 40,000 tokens": [
            "per_device_train_batch_tokens=40000",
            "torch_compile=true",
        ],
    }
    tiny_runs = {"plain, batches of 1,000 tokens": ["per_device_train_batch_tokens=1000"]}
    made["stage-one"] = (
        [
            "--config",
            f"{RECIPES / 'car_paper.yaml'}",
            data,
            "gradient_accumulation_steps=1",
            "dataloader_num_workers=0",
            *(
                [
                    "model.hidden_size=32",
                    "model.num_layers=2",
                    "model.num_attention_heads=2",
                    "model.ffn_size=64",
                    "model.head_blocks=1",
                    "bf16=false",
                ]
                if tiny
                else []
            ),
        ],
        partial(stage_one_rows, tiny_runs if tiny else runs, 4 if tiny else 40),
    )
    for name, found in SHAPES.items():
        made[name] = [f"device={config.device}"], partial(shape_rows, found, Bench(config.device))
    made["hours"] = [], hours_rows
    made["stage-two"] = (
        [
            "--config",
            f"{RECIPES / 'dcpo_paper.yaml'}",
            data,
            f"decoder={out / 'stage-one'}",
            f"out={out / 'stage-two'}",
            "vocoder=starter",
            "min_seconds=0",
            "reward_funcs=[token_likelihood,range_penalty,launch.gpu_rows.loudness]",
            "eval_strategy=no",
            "save_strategy=no",
            f"per_device_train_batch_size={rollouts}",
            *(
                [
                    "num_generations=2",
                    "max_steps=1",
                    "max_train_prompts=2",
                    "max_completion_length=12",
                    "policy_heads=2",
                ]
                if tiny
                else ["max_steps=4", "max_train_prompts=64", "max_completion_length=250"]
            ),
        ],
        partial(stage_two_rows, rollouts),
    )
    return made


def measure(part: Part, out: Path) -> Found:
    """Run a part, with its output in <out>.log. Raises DCARError with the cause if it fails."""
    arguments, run_part = part
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with (
        out.with_suffix(".log").open("w", buffering=1) as log,
        redirect_stdout(log),
        redirect_stderr(log),
    ):
        try:
            found = run_part(arguments, out)
            if on_gpu and not any("GiB" in other for *_, other in found.rows):
                found.rows.append(("peak memory", memory("cuda"), ""))
            return found
        except (Exception, SystemExit) as error:  # the other parts are measured in any case
            traceback.print_exc()
            raise DCARError(
                f"{type(error).__name__}: {str(error)[:200]}; see {out.with_suffix('.log')}"
            ) from error
        finally:
            gc.collect()
            torch.cuda.empty_cache()


def table(out: Path, names: Sequence[str]) -> str:
    """Format the measured figures of these parts as a Markdown table."""
    where = "no GPU, tiny sizes: a rehearsal"
    if torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    lines = [
        f"{where}; {machine()}; torch {torch.__version__}",
        "",
        "| part | what | measured | compare |",
        "| --- | --- | --- | --- |",
    ]
    for name in names:
        kept = out / f"{name}.json"
        found = [("not measured yet", "", "")]
        if kept.exists():
            found = json.loads(kept.read_text())["rows"]
        lines += [f"| {name} | {' | '.join(row)} |" for row in found]
    return "\n".join(lines) + "\n"


def run(config: RowsConfig) -> int:
    """Measure what has not been measured yet. Returns exit status 1 if a part is missing in the
    end."""
    out, ends = Path(config.out), time.monotonic() + 60 * config.minutes
    out.mkdir(parents=True, exist_ok=True)
    every, missing = parts(config), 0
    for name in config.parts:
        kept, part = out / f"{name}.json", every[name]
        if (
            name != "hours"
            and kept.exists()
            and json.loads(kept.read_text())["arguments"] == part[0]
        ):
            print(f"== {name}: measured before", flush=True)
            continue
        kept.unlink(missing_ok=True)
        started = time.monotonic()
        try:
            if started >= ends:
                raise DCARError("the time is up; run the same command again to continue here")
            print(f"== {name}: {' '.join(part[0])}", flush=True)
            found = measure(part, out / name)
        except DCARError as error:
            missing += 1
            print(f"{name}: {error}", flush=True)
            continue
        write_json(
            kept,
            {
                "arguments": part[0],
                "seconds": time.monotonic() - started,
                "rows": found.rows,
                "rates": found.rates,
            },
        )
        write_text(out / "rows.md", table(out, config.parts))
        print(
            "\n".join(f"  {what}: {measured}  [{other}]" for what, measured, other in found.rows),
            flush=True,
        )
    print(
        f"\n{table(out, config.parts)}\n{len(config.parts) - missing} of {len(config.parts)} "
        f"parts; {out / 'rows.md'}"
    )
    return 1 if missing else 0


def main(arguments: Sequence[str] | None = None) -> int:
    # configured before stderr is redirected: a handler must not keep the log of a part
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return run_claimed(run, load_config(RowsConfig, arguments))


if __name__ == "__main__":
    sys.exit(run_command("gpu_rows", main))
