"""Run the whole pipeline on the embedded corpus, on two CPU cores: corpus -> CAR and FAR -> DCPO on
joined sentences -> exported policy -> comparison -> report, all under `runs/quickstart`.

    ./launch/quickstart.sh [out=…] [start=scratch] [paper=true] [policy_steps=…] [limit=…] [seed=…]

Stage one continues the training of two shipped decoders on recordings, as the papers' are trained,
with their last recipe and a low learning rate, for a few steps, because a decoder that speaks
clearly takes hours on two cores. `start=scratch` trains both from random weights. `paper=true` adds
the paper's own policy: guidance profile -> DCPO by chase-then-exceed with word errors of an ASR as
reward -> export -> a row of the comparison. One row of the comparison is of the shipped decoder
after distillation, without a policy.

Every job is a command that a user would type; it is printed. The quickstart resumes when it is
started again: finished jobs are not run again (launch/pipeline.py says what decides). If a training
was begun with other settings or inputs, its folder is renamed (`dcpo.1`, …), because its
checkpoints could not be used.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dcar.config import check, load_config, save_config, setting
from dcar.config.commands import OutSettings
from dcar.config.recipes import recipe_file
from dcar.config.schema import seed_setting
from dcar.process import claimed, run_command
from dcar.sources.shipped import shipped
from dcar.tracking import provenance, write_json
from launch.pipeline import Job, run_pipeline, words

SEVEN_HEADS: list[Any] = [
    "far",
    "car-1",
    "car-3",
    "car-5",
    "car-7",
    "random-4-5-6-7",
    "dcar",
    {"method": "sd", "limit": 24},
    {"method": "ssd", "beta": 0.4, "limit": 24},
    {"method": "vadusa", "tau": 2, "limit": 24},
    {"method": "mtp-viterbi", "heads": 5, "limit": 24},
]
"""Methods of the comparison from scratch; those of the recipe are for sixteen heads."""
OUTPUTS = {
    "texts": "prepared.json",
    "car": "model.safetensors",
    "far": "model.safetensors",
    "verifiers": "statistics.json",
    "dcpo": "policy/model.safetensors",
    "policy": "model.safetensors",
    "profile": "profile.json",
    "dcpo_paper": "policy/model.safetensors",
    "policy_paper": "model.safetensors",
    "compare": "report.html",
}
"""Last file that each job writes to its folder, which has its name; the folder of the comparison
is that of the quickstart."""


@dataclass
class QuickstartConfig(OutSettings):
    """Settings of the quickstart; everything else is in launch/recipes/*_starter.yaml."""

    out: str = "runs/quickstart"
    start: str = setting(
        "recordings",
        "Initial weights of stage one: the shipped decoders trained on recordings, or random "
        "(scratch).",
        choices=("recordings", "scratch"),
    )
    paper: bool = setting(
        False,
        "Also train the paper's policy, which reads hidden states, with forced rollouts and the "
        "word errors of an ASR as reward.",
    )
    train_steps: int = setting(
        0,
        "Steps of stage one, for CAR and FAR each; 0 = 10 from shipped weights, 300 from scratch.",
        minimum=0,
    )
    policy_steps: int = setting(12, "Updates of DCPO, of about 256 rollouts each.", minimum=1)
    limit: int = setting(
        200,
        "Sentences of the comparison, from speakers that are not in the training data, and hard "
        "texts, at most; 0 = all.",
        minimum=0,
    )
    seed: int = seed_setting(0, "Seed of every job: trainings, rollouts, prompts, sampling.")
    processes: int = setting(2, "Number of processes of DCPO and of the comparison.", minimum=1)

    def __post_init__(self):
        check(self)
        self.train_steps = self.train_steps or (300 if self.start == "scratch" else 10)


def computes_bfloat16() -> bool:
    """Return True if this processor has instructions for bfloat16 (AVX-512 BF16 or AMX); every
    processor other than x86-64 is assumed to."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return capabilities["architecture"] != "x86_64" or bool(
        capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    )


def methods(config: QuickstartConfig) -> list[str]:
    """Return the setting of the methods of the comparison; none where the recipe has them all."""
    scratch = config.start == "scratch"
    if not scratch and not config.paper:
        return []
    if scratch:
        names = SEVEN_HEADS
    else:
        recipe = yaml.safe_load(recipe_file("compare_starter")[0].read_text())
        names = recipe["variants"]["recordings"]["methods"]
    if config.paper:
        at = names.index("dcar")
        names = [*names[:at], "dcar@ours", "dcar@paper", *names[at + 1 :]]
    listed = yaml.safe_dump(names, default_flow_style=True, sort_keys=False, width=10_000)
    return [f"methods={listed.strip()}"]


def pipeline(config: QuickstartConfig) -> list[list[Job]]:
    """Return the jobs in order; those of an inner list run side by side."""
    out, scratch = Path(config.out), config.start == "scratch"
    paths = {name: out / name for name in OUTPUTS} | {"compare": out, "data": shipped("prepared")}
    paths |= {f"shipped_{name}": shipped(f"{name}-undistilled") for name in ("decoder", "far")}

    def steps(number: int) -> list[str]:
        """Return the settings of a training of `number` steps."""
        # without instructions for bfloat16, a step takes ten times as long
        precision = [] if computes_bfloat16() else ["bf16=false"]
        return [
            f"max_steps={number}",
            f"eval_steps={number}",
            f"seed={config.seed}",
            *precision,
        ]

    def gently(weights: Path) -> list[str]:
        """Return settings for continuing from shipped weights, which keep what the end of their
        training gained."""
        return [] if scratch else [f"init_from={weights}", "learning_rate=0.0002", "warmup_steps=5"]

    values = {
        **vars(config),
        **paths,
        "steps_of_decoder": steps(config.train_steps),
        "from_decoder": gently(paths["shipped_decoder"]),
        "from_far": gently(paths["shipped_far"]),
        "car_variant": "" if scratch else ":more",
        "far_variant": ":far" if scratch else ":far_more",
        "accumulation": max(1, 4 // config.processes),  # half of the recipe's: as good here
        "seeds": [
            f"seeds=[{2 * config.seed},{2 * config.seed + 1}]",
            f"prompt_seeds=[{config.seed}]",
        ],
        "ranges": ["policy_sizes=[4,5,6,7]"] if scratch else [],
        "rollouts": 8 * max(1, 4 // config.processes),  # whole groups of eight
        "methods": methods(config),
        "compared": "" if scratch else ":recordings",
        "policies": f"ours={paths['policy']},paper={paths['policy_paper']}"
        if config.paper
        else paths["policy"],
        "logs": ",".join(
            f"{paths[name]}/log.jsonl" for name in ("dcpo", *["dcpo_paper"] * config.paper)
        ),
    }

    def job(name: str, inputs: str, command: str, trains: bool = False, processes: int = 1) -> Job:
        """Return a job. inputs: names of `paths`."""
        return Job(
            name,
            words(command, values),
            paths[name] / OUTPUTS[name],
            [paths[i] for i in inputs.split()],
            processes,
            paths[name] if trains else None,
        )

    join = job(
        "texts",
        "data",
        "dcar prepare mode=join data=[{data}] max_seconds=12 seed={seed} out={texts}",
    )
    policies = ["policy", *(["policy_paper"] if config.paper else [])]
    profile = job(
        "profile",
        "car data",
        "dcar profile --config profile_starter decoder={car} data={data} sizes=[2,3,4,5,6,7] "
        "temperature=1.0 top_k=0 seed={seed} out={profile}",
        processes=config.processes,
    )
    # the sampling of the comparison; a third of the recipe's rollouts, because every one is
    # synthesised and transcribed
    papers = [
        [profile],
        [
            job(
                "dcpo_paper",
                "car data profile",
                "dcar train-policy --config dcpo_starter_hidden decoder={car} data={data} "
                "guidance={profile}/profile.json per_device_train_batch_size={rollouts} "
                "temperature=1.0 top_k=0 limit=80 num_train_epochs=2 seed={seed} "
                "out={dcpo_paper}",
                trains=True,
                processes=config.processes,
            )
        ],
        [
            job(
                "policy_paper",
                "car dcpo_paper",
                "dcar export run={dcpo_paper} decoder={car} out={policy_paper}",
            )
        ],
    ]
    return [
        [join],
        [
            job(
                "car",
                "data shipped_decoder",
                "dcar train --config car_starter{car_variant} data={data} out={car} "
                "{steps_of_decoder} {from_decoder}",
                trains=True,
            ),
            job(
                "far",
                "data shipped_far",
                "dcar train --config car_starter{far_variant} data={data} out={far} "
                "{steps_of_decoder} {from_far}",
                trains=True,
            ),
        ],
        [
            job(
                "dcpo",
                "car texts",
                "dcar train-policy --config dcpo_starter decoder={car} data={texts} "
                "num_candidates=1 chunk_scorer= out={dcpo} max_steps={policy_steps} seed={seed} "
                "gradient_accumulation_steps={accumulation} {ranges}",
                trains=True,
                processes=config.processes,
            )
        ],
        [
            job("policy", "car dcpo", "dcar export run={dcpo} decoder={car} out={policy}"),
            job(
                "verifiers",
                "car",
                "dcar fit-verifiers --config verifiers_starter decoder={car} data={data} "
                "temperature=1.0 top_k=0 limit=16 out={verifiers}",
            ),
        ],
        *(papers if config.paper else []),
        [
            job(
                "compare",
                f"car far {' '.join(policies)} verifiers",
                "dcar compare --config compare_starter{compared} data={data} decoder={car} "
                "far_decoder={far} policies=[{policies}] statistics={verifiers} out={compare} "
                "limit={limit} training_logs=[{logs}] {seeds} {methods}",
                processes=config.processes,
            )
        ],
    ]


def run(config: QuickstartConfig) -> None:
    """Run the pipeline and print where the report is."""
    out, started = Path(config.out), time.time()
    # one thread for each process, because two of them share two cores; no GPU, as in the figures
    environment = {
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
    }
    with claimed(out / "jobs", resumes=True):  # not `out`: the last job claims that itself
        save_config(config, out / "quickstart.yaml")
        run_pipeline(pipeline(config), out, environment)
    write_json(out / "provenance.json", provenance(config=vars(config)))
    print(f"\n{(time.time() - started) / 60:.1f} minutes. Open the report: {out / 'report.html'}")
    print(f"The policy: {out / 'policy'}. Print the table again: dcar report compare={out}")


CONFIG = QuickstartConfig


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the quickstart, given `[key=value …]`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(load_config(CONFIG, arguments))


if __name__ == "__main__":
    sys.exit(run_command("quickstart", main))
