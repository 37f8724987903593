"""First table of the DCAR paper (arXiv 2506.22023) from a LibriTTS folder: tokenizer, prepared
corpus, FAR and CAR, vocoder, guidance profile, DCPO with two ranges, comparison and report.

    ./launch/paper.sh /data/LibriTTS runs/paper
    ./launch/paper.sh /data/LibriTTS runs/paper recognizer=nemo:/models/reward.nemo

Every stage is a command with its recipe (`STAGES`). It is printed and can also be run by hand.
STAGE.SETTING=value changes a setting of one stage.

Run the same command again to resume: finished stages are skipped, and the first unfinished one
continues. A stage runs again if its settings have changed, its output is missing, or a stage before
it has run again.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from dcar.cli import resolve
from dcar.config import check, load_config, save_config, schema_of, setting
from dcar.config.schema import settings_of
from dcar.errors import ConfigError, DCARError, StoppedError
from dcar.process import INTERRUPTED, REQUEUE, claimed, run_command
from dcar.tracking import write_json
from launch.quickstart import launched

STAGES = """
tokenizer     1  dcar fit-tokenizer --config tokenizer_hubert path={data} encoder={encoder}
                 device={device} out={out}/tokenizer
prepared      n  dcar prepare --config prepare_paper path={data} tokenizer={out}/tokenizer
                 device={device} out={out}/prepared
testset       n  dcar prepare --config {testset} tokenizer={out}/tokenizer
                 device={device} out={out}/testset
far           n  dcar train --config car_paper:far data={out}/prepared {batch} out={out}/far
car           n  dcar train --config car_paper data={out}/prepared {batch} out={out}/car
pack          1  python -m dcar.vocoder.training.pack prepared={out}/prepared hours=60
                 out={out}/pack.safetensors
vocoder       1  dcar train-vocoder --config vocoder_paper data={out}/pack.safetensors
                 device={device} out={out}/vocoder
profile       1  dcar profile --config profile_paper {car} recognizer={recognizer}
                 device={device} out={out}/profile
dcpo_2_3      4  dcar train-policy --config dcpo_paper {car} recognizer={recognizer}
                 per_device_train_batch_size={rollouts_8} out={out}/dcpo_2_3
policy_2_3    1  dcar export run={out}/dcpo_2_3 decoder={out}/car out={out}/policy_2_3
dcpo_2_3_4    4  dcar train-policy --config dcpo_paper:2-3-4 {car} recognizer={recognizer}
                 per_device_train_batch_size={rollouts_12} out={out}/dcpo_2_3_4
policy_2_3_4  1  dcar export run={out}/dcpo_2_3_4 decoder={out}/car out={out}/policy_2_3_4
compare       n  dcar compare --config compare_paper data={out}/testset decoder={out}/car
                 far_decoder={out}/far vocoder={out}/vocoder/export policies={policies} asr={asr}
                 scorers={scorers} training_log={out}/dcpo_2_3/log.jsonl out={out}/compare
"""
"""Name, largest number of processes (n: one for each GPU) and command of every stage, in order.
60 hours of speech for the vocoder take 10 GB on the device."""
UPDATE_TOKENS = 10_000
"""Speech tokens per update of stage one, about as many as the paper's 32 utterances."""
GROUPS = 4
"""Prompts per step of DCPO; the rollouts of a prompt stay in one process."""
OF_MACHINE = {"device", "max_tokens", "compile", "per_device_train_batch_size"}
"""Settings that depend on the machine. A finished stage stays finished if they change."""


@dataclass
class PaperConfig:
    """Settings of the paper's recipe; STAGE.SETTING=value changes a setting of one stage."""

    data: str = setting(meaning="LibriTTS folder (train-clean-100, …, test-clean).", place="folder")
    out: str = setting(meaning="Folder to write.", place="folder")
    testset_b: str = setting(
        "", "List of the UniCATS test set B; empty = 500 utterances of test-clean.", place="file"
    )
    encoder: str = setting("hubert:facebook/hubert-large-ll60k", "Encoder of the tokenizer.")
    recognizer: str = setting(
        "nemo:stt_en_fastconformer_transducer_large",
        "Recogniser of the guidance profile and the rewards.",
    )
    asr: str = setting("whisper:openai/whisper-large-v3", "Recogniser of the comparison.")
    utmos: str = setting(
        "pretrained_models/SpeechMOS#pretrained_models/utmos22_strong_step7459_v1.pt",
        "UTMOS scorer: a clone of SpeechMOS and its weights, CLONE#WEIGHTS.pt.",
    )
    device: str = setting("cuda", "Device of every stage.", choices=("cuda", "cpu"))
    processes: int = setting(
        0, "Processes of the stages that divide their work; 0 = one for each GPU.", minimum=0
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Stage:
    """Command of the recipe, with its name and number of processes."""

    name: str
    processes: int
    command: list[str]

    @property
    def output(self) -> Path:
        """Folder or file that the command writes."""
        return Path(next(w for w in self.command if w.startswith("out=")).removeprefix("out="))

    @property
    def program(self) -> list[str]:
        """Program and arguments that run the command with this Python, in as many processes as
        it has."""
        is_dcar = self.command[0] == "dcar"
        module, arguments = ("dcar.cli", 1) if is_dcar else (self.command[2], 3)
        return [*launched(module, self.processes), *self.command[arguments:]]

    @property
    def known_settings(self) -> set[str]:
        """Keys of the settings that the command accepts."""
        is_dcar = self.command[0] == "dcar"
        module = resolve(self.command[1:])[1] if is_dcar else self.command[2]
        return set(settings_of(schema_of(importlib.import_module(module).main)))

    @property
    def identity(self) -> list[str]:
        """Command without the settings that depend on the machine."""
        return [word for word in self.command if word.partition("=")[0] not in OF_MACHINE]


def pipeline(config: PaperConfig, overrides: dict[str, list[str]], processes: int) -> list[Stage]:
    """Return the stages in order.

    overrides: key=value by stage. processes: number for a stage that divides its work.
    """
    out = config.out
    shared = max(p for p in (1, 2, GROUPS) if p <= processes)
    most = {"1": 1, "4": shared, "n": processes}
    testset = ["prepare_paper", f"path={config.data}", "splits=[test]", "subsets=[test-clean]"]
    if config.testset_b:
        testset = [
            "prepare_paper:testset_b",
            f"path={config.testset_b}",
            f"audio_root={config.data}",
        ]
    groups: dict[str, list[str]] = {
        "{testset}": testset,
        "{batch}": [
            "gradient_accumulation=1",
            f"max_tokens={UPDATE_TOKENS // processes}",
            f"compile={str(config.device == 'cuda').lower()}",
        ],
        "{car}": [f"decoder={out}/car", f"data={out}/prepared", f"vocoder={out}/vocoder/export"],
    }
    values = {
        **{f.name: getattr(config, f.name) for f in fields(config)},
        "rollouts_8": GROUPS // shared * 8,
        "rollouts_12": GROUPS // shared * 12,
        "policies": json.dumps([f"2-3={out}/policy_2_3", f"2-3-4={out}/policy_2_3_4"]),
        "scorers": json.dumps([f"utmos:{config.utmos}"]),
    }
    stages = []
    for line in STAGES.replace("\n  ", "").strip().splitlines():
        name, count, *words = line.split()
        several = [groups[word] if word in groups else [word.format(**values)] for word in words]
        command = [*itertools.chain(*several), *overrides.get(name, [])]
        stages.append(Stage(name, most[count], command))
    return stages


def of_stages(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Split arguments into those of the recipe itself, and key=value of its stages by stage."""
    names = {line.split()[0] for line in STAGES.splitlines() if line[:1].strip()}
    own: list[str] = []
    overrides: dict[str, list[str]] = {}
    for word in arguments:
        name, _, rest = word.partition(".")
        if name in names:
            overrides.setdefault(name, []).append(rest)
        else:
            own.append(word)
    return own, overrides


def check_overrides(stages: Sequence[Stage], overrides: dict[str, list[str]]) -> None:
    """Raise ConfigError for a setting that its stage does not have, before other stages run for
    hours."""
    for stage in stages:
        for word in overrides.get(stage.name, []):
            if (key := word.partition("=")[0]) not in stage.known_settings:
                shown = stage.command[: 3 if stage.command[0] == "python" else 2]
                raise ConfigError(
                    f"{stage.name}.{key}: stage {stage.name} has no setting '{key}'; run "
                    f"`{' '.join(shown)} --help` to list its settings"
                )


def processes_of(config: PaperConfig) -> int:
    """Return the number of processes of a stage that divides its work. Raises ConfigError if
    there is no GPU and device=cuda."""
    if config.device == "cpu":
        return config.processes or 1
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        raise ConfigError(
            "device=cuda: PyTorch finds no GPU; run `dcar doctor` for details, or set device=cpu"
        )
    return config.processes or gpus


def run(config: PaperConfig, overrides: dict[str, list[str]]) -> None:
    """Run the stages that are not finished. Raises DCARError if one fails, StoppedError if it is
    stopped."""
    stages = pipeline(config, overrides, processes_of(config))
    check_overrides(stages, overrides)
    records = Path(config.out) / "stages"
    records.mkdir(parents=True, exist_ok=True)
    save_config(config, records / "paper.yaml")
    environment = dict(os.environ)
    if config.device == "cpu":
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    before = ""  # time at which the previous stage was finished
    for number, stage in enumerate(stages, start=1):
        record = records / f"{stage.name}.json"
        title = f"== {number}/{len(stages)} {stage.name}"
        wanted = {"command": stage.identity, "after": before}
        done = read_record(record)
        if done and wanted.items() <= done.items() and stage.output.exists():
            print(f"{title}: finished {done['finished']}, in {stage.output}", flush=True)
        else:
            record.unlink(missing_ok=True)
            print(f"\n{title} -> {stage.output}\n{shlex.join(stage.command)}", flush=True)
            begun = time.time()
            run_stage(stage, environment)
            finished = datetime.now().isoformat(sep=" ", timespec="milliseconds")
            done = {**wanted, "finished": finished, "seconds": round(time.time() - begun)}
            write_json(record, done)
        before = done["finished"]
    print(f"\nThe table and the report: {stages[-1].output}/compare.txt, report.html")


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of a finished stage; empty if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def run_stage(stage: Stage, environment: dict[str, str]) -> None:
    """Run the command of a stage. Raises DCARError if it fails, StoppedError if it is stopped."""
    process = subprocess.Popen(stage.program, env=environment)
    stopped: list[int] = []

    def stop(number: int, frame: Any) -> None:
        stopped.append(number)
        if number != signal.SIGINT:  # Ctrl-C in a terminal reaches the stage, too
            process.terminate()

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    handlers = {number: signal.signal(number, stop) for number in signals}
    try:
        status = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if not status:
        return
    again = "repeat the command of the recipe to continue with this stage"
    if stopped or status in (REQUEUE, INTERRUPTED):
        interrupted = signal.SIGINT in stopped or status == INTERRUPTED
        raise StoppedError(
            f"stage {stage.name} was stopped; {again}", INTERRUPTED if interrupted else REQUEUE
        )
    raise DCARError(
        f"stage {stage.name} failed with status {status}; see its output above, then {again}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipe, given `data=… out=… [key=value …] [STAGE.key=value …]`."""
    own, overrides = of_stages(sys.argv[1:] if arguments is None else arguments)
    config = load_config(PaperConfig, own)
    with claimed(Path(config.out) / "stages"):  # the stages write to folders next to it
        run(config, overrides)


if __name__ == "__main__":
    sys.exit(run_command("paper", main))
