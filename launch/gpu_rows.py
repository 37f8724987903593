"""Every figure of the docs that needs a GPU, in eight minutes of one card: decoding, Hugging Face beside it, training.

    python -m launch.gpu_rows                            # device=cpu rehearses it with tiny sizes

Weights of paper size are random: times need no others. Each part is a command, which is printed; its output is
<out>/<part>.log. What it measured is in <out>/rows.md as soon as it ends; run again, what is missing is done.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dcar.config import check, load_config, setting
from dcar.errors import ConfigError, DCARError
from dcar.process import run_claimed, run_command
from dcar.sources.shipped import shipped
from dcar.storage import json_lines, write_text
from dcar.tracking import machine, write_json

Rows = list[tuple[str, str, str]]  # what, measured, beside it a floor or an aim
TESTS = Path(__file__).parents[1] / "tests" / "dcar" / "decoding" / "test_gpu.py"
AIMS = {"dcar_speedup_over_mean_chunk": "≥ 0.92", "floor_share_far": "≥ 0.4", "far_over_hf_generate": "≥ 5",
        "batch32_over_batch1": "≥ 20", "growth_over_kv_model": "≤ 1.3", "sd_over_hf_assisted": "≥ 2"}


@dataclass
class RowsConfig:
    """Settings of the measurement."""

    out: str = setting("runs/gpu_rows", "Folder to write.", place="folder")
    device: str = setting("cuda", "cpu: a rehearsal with tiny sizes, whose times say nothing.", choices=("cuda", "cpu"))
    minutes: float = setting(8.0, "After these nothing more is begun, and what runs is stopped.", above=0)

    def __post_init__(self) -> None:
        check(self)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"torch {torch.__version__} finds no GPU: run this on a machine with one, with a torch "
                              "built for CUDA (docs/install.md); device=cpu rehearses it here with tiny sizes")


def speed_rows(size: str, out: Path) -> Rows:
    """Of the last line of `dcar analyse what=speed`."""
    found = json.loads(out.with_suffix(".log").read_text().splitlines()[-1])
    card, rows = found["models"][size], Rows()
    for k, ms in card.get("ms_per_step", {}).items():
        floor, decided = card["floor_ms"][k], card["ms_per_decided_step"]
        rows.append((f"CAR-{k}, ms a step", "; ".join(
            [f"{ms:.3f}", *(f"{of[k]:.3f} where a policy ({name}) decides" for name, of in decided.items())]),
            f"floor of bytes {floor:.3f} ({floor / ms:.0%})"))
    for batch, rate in card.get("tokens_per_second_by_batch", {}).items():
        rows.append((f"CAR-2, batch {batch}, tokens a second", f"{rate:.0f}", ""))
    for length, ms in card.get("ms_per_step_by_length", {}).items():
        rows.append((f"FAR behind {length} tokens, ms a step", f"{ms:.3f}", ""))
    for name, rate in card.get("peers", {}).items():
        same = card["peers_same_tokens"][name]
        rows.append((f"greedy FAR, {name}, tokens a second", f"{rate:.0f}", "" if same else "other tokens (rounding)"))
    for name, of in card.get("methods", {}).items():
        rates = ", ".join(f"{x['tokens_per_second']:.0f} at batch {b}" for b, x in of.items())
        rows.append((f"{name}, loop, tokens a second", rates, f"{of['1']['tokens_per_pass']:.2f} tokens a pass"))
    return rows + [(name, f"{found['ratios'][name][size]:.2f}", f"aim {aim}") for name, aim in AIMS.items()
                   if name in found["ratios"]]


def stage_one_rows(out: Path) -> Rows:
    """The rate of the progress bar when it was full for the first time, before the model was evaluated and saved."""
    shown = re.search(r"(\d+)/\1 \[.*?([\d.]+)(s/it|it/s)", out.with_suffix(".log").read_text())
    if shown is None:
        raise DCARError(f"{out.with_suffix('.log')} shows no rate of steps")
    ms = 1e3 * float(shown[2]) if shown[3] == "s/it" else 1e3 / float(shown[2])
    return [("stage one, ms a step of 16 utterances", f"{ms:.0f}", "")]


def stage_two_rows(rollouts: int, out: Path) -> Rows:
    """Of the last step; the first ones capture graphs."""
    lines = [line for _, line in json_lines(out / "log.jsonl", "a line of a log", "run the training again")]
    last = [line for line in lines if "seconds_rollout" in line][-1]
    spent = {name.removeprefix("seconds_"): s for name, s in last.items() if name.startswith("seconds_")}
    step = max(spent["rollout"], spent.get("vocoder", 0) + spent.get("asr", 0))  # these run side by side
    return [("stage two, seconds of a step", ", ".join(f"{name} {s:.2f}" for name, s in spent.items()), ""),
            ("rollouts with rewards, a second", f"{rollouts / step:.1f}", f"{rollouts} a step")]


def tested_rows(out: Path) -> Rows:
    return [("tests of GPU code", out.with_suffix(".log").read_text().splitlines()[-1].strip("= "), "the CPU's tokens")]


def parts(config: RowsConfig) -> dict[str, tuple[list[str], Callable[[Path], Rows]]]:
    """Name -> a module with its arguments, and what reads its rows; what matters most stands first."""
    tiny, out, data = config.device == "cpu", Path(config.out), f"data={shipped('prepared')}"
    size, rollouts = ("tiny", 4) if tiny else ("paper", 64)
    speed = ["eval.speed.run", f"device={config.device}", f"sizes=[{size}]", *(
        ["tokens=12", "repeats=1", "quick=true", "num_prediction_heads=3"] if tiny else ["tokens=105", "repeats=3"])]
    read = partial(speed_rows, size)
    made: dict[str, tuple[list[str], Callable[[Path], Rows]]] = {}
    for dtype in ("bfloat16", "float32"):
        for part in ("steps", "peers", "growth", "methods"):
            made[f"{part}-{dtype}"] = [*speed, f"dtype={dtype}", f"parts=[{part}]"], read
        made[f"no-graphs-{dtype}"] = [*speed, f"dtype={dtype}", "parts=[steps]", "graphs=false"], read
    made["sixteen-heads"] = [*speed, "parts=[steps]", "heads=shared", "num_prediction_heads=16",
                             "policy_reads=candidates", "num_candidates=4"], read
    recipes, car = Path(__file__).parent / "recipes", f"{out / 'stage-one'}"
    made["stage-one"] = ["dcar.train", "--config", f"{recipes / 'car_paper.yaml'}", data, f"out={car}",
                         "gradient_accumulation=1", "workers=0", *(
        ["model.hidden_size=32", "model.num_layers=2", "model.num_attention_heads=2", "model.ffn_size=64",
         "model.head_blocks=1", "max_steps=2", "bf16=false"] if tiny else ["max_steps=40", "batch_size=16"])
    ], stage_one_rows
    made["stage-two"] = ["rl.train", "--config", f"{recipes / 'dcpo_paper.yaml'}", data, f"decoder={car}",
                         f"out={out / 'stage-two'}", "vocoder=starter", "recognizer=starter", "min_seconds=0",
                         "eval_strategy=no", "save_strategy=no", f"per_device_train_batch_size={rollouts}", *(
        ["num_generations=2", "max_steps=1", "max_train_prompts=2", "max_completion_length=12", "policy_heads=2",
         "reward_funcs=[token_likelihood,range_penalty]"]
        if tiny else ["max_steps=4", "max_train_prompts=64", "max_completion_length=250"])
    ], partial(stage_two_rows, rollouts)
    if TESTS.is_file():
        made["tests"] = ["pytest", "-q", "-n", "0", "--no-header", str(TESTS)], tested_rows
    first = ["steps-bfloat16", "peers-bfloat16", "stage-one", "stage-two", "tests"]
    return {name: made[name] for name in [*first, *made] if name in made}


def start(arguments: Sequence[str], log: Path, seconds: float) -> None:
    """Run a module; its output is in `log`. DCARError where it fails or takes longer."""
    with log.open("w") as file:
        try:
            done = subprocess.run([sys.executable, "-m", *arguments], stdout=file, stderr=file, timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise DCARError(f"stopped after {seconds:.0f} s; the same command does it again") from error
    if done.returncode:
        last = (log.read_text().strip() or "no output").splitlines()[-1]
        raise DCARError(f"failed with status {done.returncode}: {last[:200]}; see {log}")


def table(out: Path, names: Sequence[str]) -> str:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU, tiny sizes: a rehearsal"
    lines = [f"{where}; {machine()}; torch {torch.__version__}", "", "| part | what | measured | beside |",
             "| --- | --- | --- | --- |"]
    for name in names:
        kept = out / f"{name}.json"
        found = json.loads(kept.read_text())["rows"] if kept.exists() else [("not measured yet", "", "")]
        lines += [f"| {name} | {' | '.join(row)} |" for row in found]
    return "\n".join(lines) + "\n"


def run(config: RowsConfig) -> int:
    """Measure what is not there yet; exit status 1 where something is missing in the end."""
    out, ends = Path(config.out), time.monotonic() + 60 * config.minutes
    out.mkdir(parents=True, exist_ok=True)
    every, missing = parts(config), 0
    for name, (command, read) in every.items():
        kept, left = out / f"{name}.json", ends - time.monotonic()
        if kept.exists() and json.loads(kept.read_text())["command"] == command:
            print(f"== {name}: measured before", flush=True)
            continue
        kept.unlink(missing_ok=True)
        try:
            if left <= 0:
                raise DCARError("the time is up; the same command goes on here")
            print(f"== {name}: python -m {' '.join(command)}", flush=True)
            start(command, out / f"{name}.log", left)
            rows = read(out / name)
        except DCARError as error:
            missing += 1
            print(f"{name}: {error}", flush=True)
            continue
        write_json(kept, {"command": command, "rows": rows})
        write_text(out / "rows.md", table(out, list(every)))
        print("\n".join(f"  {what}: {measured}  [{beside}]" for what, measured, beside in rows), flush=True)
    print(f"\n{table(out, list(every))}\n{len(every) - missing} of {len(every)} parts; {out / 'rows.md'}")
    return 1 if missing else 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_claimed(run, load_config(RowsConfig, arguments))


if __name__ == "__main__":
    sys.exit(run_command("gpu_rows", main))
