"""Run the whole pipeline on the embedded corpus, on two CPU cores: corpus -> distilled corpus ->
CAR and FAR -> chunk scorer -> DCPO on joined sentences -> exported policy -> comparison -> report,
all under `runs/quickstart`.

    ./launch/quickstart.sh [out=…] [start=scratch] [policy_steps=…] [utterances=…]

Stage one continues the training of the shipped decoders, with their last recipe and a low learning
rate, for a few steps, because a decoder that speaks clearly takes hours on two cores.
`start=scratch` trains both from random weights, on the recordings.

Every step is a command that a user would type (it is printed), and resumes when the quickstart is
started again. A finished step is recognised by its command and the content of its inputs, and is
not run again. If a training was started with other settings or inputs, its folder is renamed
(`dcpo.1`, …), because its checkpoints could not be used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dcar.config import check, load_config, save_config, setting
from dcar.errors import DCARError
from dcar.process import claimed, run_command
from dcar.sources.shipped import shipped
from dcar.tracking import provenance, write_json

RECIPES = Path(__file__).parent / "recipes"
SEVEN_HEADS = [
    "far",
    "car-1",
    "car-3",
    "car-5",
    "car-7",
    "random-4-5-6-7",
    "dcar@n4",
    "sd",
    "ssd-0.4",
    "vadusa-2",
    "mtp-viterbi-5",
]
"""Methods of the comparison from scratch; those of compare_starter.yaml are for sixteen heads."""


@dataclass
class QuickstartConfig:
    """Settings of the quickstart; everything else is in launch/recipes/*_starter.yaml."""

    out: str = setting("runs/quickstart", "Folder to write.", place="folder")
    start: str = setting(
        "starter",
        "Initial weights of stage one: the shipped decoders, or random (scratch).",
        choices=("starter", "scratch"),
    )
    train_steps: int = setting(
        0,
        "Steps of stage one, for CAR and FAR each; 0 = 30 from the starter, 300 from scratch.",
        minimum=0,
    )
    chunk_scorer_steps: int = setting(
        0,
        "Training steps of the chunk scorer; 0 = 60 from the starter, 150 from scratch.",
        minimum=0,
    )
    policy_steps: int = setting(12, "Updates of DCPO, of about 512 rollouts each.", minimum=1)
    utterances: int = setting(
        96,
        "Utterances of the comparison, from speakers that are not in the training data.",
        minimum=1,
    )
    processes: int = setting(2, "Number of processes of DCPO and of the comparison.", minimum=1)

    def __post_init__(self):
        check(self)
        gentle = self.start == "starter"
        self.train_steps = self.train_steps or (30 if gentle else 300)
        self.chunk_scorer_steps = self.chunk_scorer_steps or (60 if gentle else 150)


@dataclass
class Step:
    """Command of the pipeline: its inputs (their content decides whether it must run again) and
    its outputs."""

    name: str
    command: list[str]
    outputs: list[Path]
    inputs: list[Path] = field(default_factory=list)
    # folder of checkpoints, which are valid for one command and one content of the inputs
    folder: Path | None = None

    def fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(self.command[1:]).encode())
        for path in self.inputs:
            digest.update(content_digest(path).encode())
        return digest.hexdigest()


def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of the weights, tables and configurations in a directory."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    kinds = {".safetensors", ".json", ".yaml", ".arrow", ".parquet"}
    files = sorted(
        p
        for p in path.rglob("*")
        if p.suffix in kinds and "checkpoint-" not in str(p) and p.name != "provenance.json"
    )
    return hashlib.sha256(
        "".join(f"{p.relative_to(path)} {content_digest(p)}" for p in files).encode()
    ).hexdigest()


def computes_bfloat16() -> bool:
    """Return True if this processor has instructions for bfloat16 (AVX-512 BF16 or AMX); every
    processor other than x86-64 is assumed to."""
    import torch

    found = torch.cpu.get_capabilities()
    return found["architecture"] != "x86_64" or bool(
        found.get("avx512_bf16") or found.get("amx_bf16")
    )


def launched(module: str, processes: int) -> list[str]:
    """Return the command that runs a module in several processes."""
    if processes == 1:
        return [sys.executable, "-m", module]
    # `accelerate launch --cpu` would silently run one process (docs/scaling.md)
    return [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        str(processes),
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "-m",
        module,
    ]


def pipeline(config: QuickstartConfig) -> list[list[Step]]:
    """Return the steps in order; the steps of an inner list, which may be empty, run side by
    side."""
    out = Path(config.out)
    data, car, far = shipped("prepared"), out / "car", out / "far"
    distilled, chunk_scorer, verifiers = out / "distilled", out / "chunk_scorer", out / "verifiers"
    dcpo, policy, from_starter = out / "dcpo", out / "policy", config.start == "starter"
    spoken = distilled if from_starter else data  # training data of decoders and chunk scorer
    # texts of the policy: joined sentences, unless stage one starts from scratch
    texts = out / "texts" if from_starter else data
    python = sys.executable

    def train(
        name: str,
        module: str,
        config_of: str,
        folder: Path,
        steps: int,
        initial: str,
        gently: list[str],
        *read: Path,
    ) -> Step:
        """Return a training step. `gently`: settings for continuing from shipped weights, which
        keep what the end of their training gained."""
        recipe = RECIPES / config_of.partition(":")[0]
        command = [
            python,
            "-m",
            module,
            "--config",
            str(RECIPES / config_of),
            *(f"decoder={path}" for path in read),
            f"data={spoken}",
            f"out={folder}",
            f"max_steps={steps}",
            f"eval_steps={steps}",
        ]
        if not computes_bfloat16():
            # without bfloat16 instructions, a step takes ten times as long
            command.append("bf16=false")
        return Step(
            name,
            [*command, *(gently if from_starter else [])],
            [folder / "model.safetensors"],
            [*read, spoken, recipe, *([shipped(initial)] if from_starter else [])],
            folder,
        )

    def stage_one(name: str, folder: Path, initial: str, variant: str) -> Step:
        return train(
            name,
            "dcar.train",
            f"car_starter.yaml{variant}",
            folder,
            config.train_steps,
            initial,
            [f"init_from={shipped(initial)}", "learning_rate=0.0002", "warmup_steps=10"],
        )

    join = Step(
        "texts",
        [
            python,
            "-m",
            "dcar.cli",
            "prepare",
            "mode=join",
            f"data=[{data}]",
            "max_seconds=12",
            "seed=1",
            f"out={texts}",
        ],
        [texts / "prepared.json"],
        [data],
    )
    distil = Step(
        "distil",
        [
            python,
            "-m",
            "launch.distil",
            "--config",
            str(RECIPES / "distil_starter.yaml"),
            f"data={data}",
            f"decoder={shipped('decoder')}",
            "methods=[car-5@t0]",
            f"limit={16 * config.train_steps}",
            f"out={distilled}",
        ],
        [distilled / "prepared.json"],
        [data, shipped("decoder"), RECIPES / "distil_starter.yaml"],
    )
    return [
        [distil, join] if from_starter else [],
        [
            stage_one("car", car, "decoder", ":distilled" if from_starter else ""),
            stage_one("far", far, "far", ":far_distilled" if from_starter else ":far"),
        ],
        [
            train(
                "chunk_scorer",
                "dcar.train.chunk_scorer",
                "chunk_scorer_starter.yaml",
                chunk_scorer,
                config.chunk_scorer_steps,
                "chunk_scorer",
                ["init_from=starter", "learning_rate=0.0005", "warmup_steps=10"],
                car,
            ),
            Step(
                "verifiers",
                [
                    python,
                    "-m",
                    "eval.analysis.fit_verifiers",
                    "--config",
                    str(RECIPES / "verifiers_starter.yaml"),
                    f"decoder={car}",
                    f"data={data}",
                    "sampling.temperature=1.0",
                    "sampling.top_k=0",
                    f"out={verifiers}",
                ],
                [verifiers / "statistics.json"],
                [car, RECIPES / "verifiers_starter.yaml"],
            ),
        ],
        [
            Step(
                "dcpo",
                [
                    *launched("rl.train", config.processes),
                    "--config",
                    str(RECIPES / "dcpo_starter.yaml"),
                    f"decoder={car}",
                    f"data={texts}",
                    f"chunk_scorer={chunk_scorer}",
                    f"out={dcpo}",
                    f"max_steps={config.policy_steps}",
                    f"gradient_accumulation_steps={max(1, 8 // config.processes)}",
                    *([] if from_starter else ["policy_sizes=[4,5,6,7]", "tokens_per_pass=5.5"]),
                ],
                [dcpo / "policy" / "model.safetensors"],
                [car, texts, chunk_scorer, RECIPES / "dcpo_starter.yaml"],
                dcpo,
            )
        ],
        [
            Step(
                "export",
                [python, "-m", "rl.export", f"run={dcpo}", f"decoder={car}", f"out={policy}"],
                [policy / "model.safetensors"],
                [car, dcpo / "policy"],
            )
        ],
        [
            Step(
                "compare",
                [
                    *launched("eval.compare", config.processes),
                    "--config",
                    str(RECIPES / "compare_starter.yaml"),
                    f"data={data}",
                    f"decoder={car}",
                    f"far_decoder={far}",
                    f"policies=[{policy}]",
                    f"statistics={verifiers}",
                    f"out={out}",
                    f"limit={config.utterances}",
                    f"training_log={dcpo / 'log.jsonl'}",
                    *([] if from_starter else [f"methods=[{','.join(SEVEN_HEADS)}]"]),
                ],
                [out / "compare.json", out / "report.html"],
                [car, far, policy, verifiers, RECIPES / "compare_starter.yaml"],
            )
        ],
    ]


def run_side_by_side(steps: Sequence[Step], folder: Path) -> None:
    """Run steps that do not depend on each other. The first one's output is shown, that of the
    others is written to files. Raises DCARError if a step fails."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONUNBUFFERED": "1",
    }
    running: list[tuple[Step, subprocess.Popen]] = []
    try:
        for i, step in enumerate(steps):
            log = None if i == 0 else (folder / f"{step.name}.log").open("w")
            shown = " ".join(["python", *step.command[1:]])
            print(
                f"\n== {step.name}: {shown}" + (f"  (log: {log.name})" if log else ""), flush=True
            )
            running.append(
                (step, subprocess.Popen(step.command, env=environment, stdout=log, stderr=log))
            )
        for step, process in running:
            if process.wait():
                where = "" if step is steps[0] else f"; its output is in {folder / step.name}.log"
                raise DCARError(
                    f"step '{step.name}' failed with status {process.returncode}{where}. What was "
                    "finished is kept; run the same command again to continue from there"
                )
    finally:
        for _, process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()


def set_aside(folder: Path) -> None:
    """Rename a folder to the first free of folder.1, folder.2, …"""
    number = 1
    while (free := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    print(f"== {folder} was made with other settings or inputs; it is now {free}")
    folder.rename(free)


def run(config: QuickstartConfig) -> None:
    out = Path(config.out)
    records = out / "steps"
    records.mkdir(parents=True, exist_ok=True)
    save_config(config, out / "quickstart.yaml")
    started = time.time()
    for group in pipeline(config):
        todo, begun_with = [], {}
        for step in group:
            record, begun = records / f"{step.name}.json", records / f"{step.name}.begun"
            done = json.loads(record.read_text()) if record.exists() else {}
            now = step.fingerprint()
            if done.get("fingerprint") == now and all(p.exists() for p in step.outputs):
                print(f"== {step.name}: already done ({done['seconds']:.0f} s)")
                continue
            before = begun.read_text() if begun.exists() else done.get("fingerprint", now)
            if before != now and step.folder is not None and step.folder.exists():
                set_aside(step.folder)
            begun.write_text(now)
            begun_with[step.name] = now
            record.unlink(missing_ok=True)  # it describes outputs that are about to be replaced
            todo.append(step)
        if not todo:
            continue
        start = time.time()
        run_side_by_side(todo, out)
        for step in todo:
            if missing := [str(p) for p in step.outputs if not p.exists()]:
                raise DCARError(f"step '{step.name}' ended without writing {', '.join(missing)}")
            seconds = time.time() - start
            write_json(
                records / f"{step.name}.json",
                {
                    "fingerprint": begun_with[step.name],
                    "command": step.command[1:],
                    "seconds": seconds,
                },
            )
    write_json(out / "provenance.json", provenance(config=vars(config)))
    print(f"\n{(time.time() - started) / 60:.1f} minutes. Open the report: {out / 'report.html'}")
    print(f"The policy: {out / 'policy'}. Print the table again: dcar report compare={out}")


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = load_config(QuickstartConfig, arguments)
    with claimed(Path(config.out) / "steps"):  # not `out`: the last step claims that itself
        run(config)


if __name__ == "__main__":
    sys.exit(run_command("quickstart", main))
