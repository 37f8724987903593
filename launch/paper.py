"""First table of the DCAR paper (arXiv 2506.22023) from a LibriTTS folder: tokenizer, prepared
corpus, FAR and CAR, vocoder, guidance profile, DCPO with two ranges, comparison and report.

    ./launch/paper.sh /data/LibriTTS runs/paper
    ./launch/paper.sh /data/LibriTTS runs/paper reward_recognizer=nemo:/models/reward.nemo

Every stage is a command with its recipe (`pipeline`). It is printed and can also be run on its own.
STAGE.SETTING=value changes a setting of one stage.

Run the same command again to resume: finished stages are skipped, and the first unfinished one
continues. launch/pipeline.py says when a stage is finished.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dcar.cli import resolve
from dcar.config import check, load_config, save_config, setting
from dcar.config.schema import settings_of
from dcar.corpus.read import corpus_parts
from dcar.corpus.rows import canonical_split
from dcar.errors import ConfigError, DataError
from dcar.process import claimed, run_command
from launch.pipeline import Job, run_pipeline, words

UPDATE_TOKENS = 10_000
"""Speech tokens per update of stage one, about as many as the paper's 32 utterances."""
GROUPS = 4
"""Prompts per step of DCPO; the rollouts of a prompt stay in one process."""
PACKED_HOURS = 60
"""Hours of speech from which the vocoder learns; they take 10 GB on the device."""


@dataclass
class PaperConfig:
    """Settings of the paper's recipe; STAGE.SETTING=value changes a setting of one stage."""

    data: str = setting(meaning="LibriTTS folder (train-clean-100, …, test-clean).", place="folder")
    out: str = setting(meaning="Folder to write.", place="folder")
    testset_b: str = setting(
        "", "List of the UniCATS test set B; empty = 500 utterances of test-clean.", place="file"
    )
    encoder: str = setting("hubert:facebook/hubert-large-ll60k", "Encoder of the tokenizer.")
    reward_recognizer: str = setting(
        "nemo:stt_en_fastconformer_transducer_large",
        "Recogniser of the guidance profile and the rewards.",
    )
    recognizer: str = setting("whisper:openai/whisper-large-v3", "Recogniser of the comparison.")
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


def pipeline(config: PaperConfig, overrides: dict[str, list[str]], processes: int) -> list[Job]:
    """Return the stages in order, each with the name of its folder.

    overrides: key=value by stage. processes: number for a stage that divides its work.
    """
    out = Path(config.out)
    shared = max(p for p in (1, 2, GROUPS) if p <= processes)
    testset = ["prepare_paper", f"path={config.data}", "splits=[test]", "subsets=[test-clean]"]
    if config.testset_b:
        path, root = f"path={config.testset_b}", f"audio_root={config.data}"
        testset = ["prepare_paper:testset_b", path, root]
    values = {
        **vars(config),
        "testset": testset,
        "batch": [
            "gradient_accumulation_steps=1",
            f"per_device_train_batch_tokens={UPDATE_TOKENS // processes}",
            f"torch_compile={str(config.device == 'cuda').lower()}",
        ],
        "car": [f"decoder={out}/car", f"data={out}/prepared", f"vocoder={out}/vocoder/export"],
        "policies": json.dumps([f"2-3={out}/policy_2_3", f"2-3-4={out}/policy_2_3_4"]),
        "scorers": json.dumps(["resemblyzer", f"utmos:{config.utmos}"]),
    }
    jobs: list[Job] = []

    def stage(name: str, processes: int, inputs: str, command: str, suffix: str = "") -> None:
        """Add the stage that writes <out>/<name><suffix>. inputs: names in <out>."""
        output = out / f"{name}{suffix}"
        arguments = [*words(command, values), f"out={output}", *overrides.get(name, [])]
        jobs.append(Job(name, arguments, output, [out / i for i in inputs.split()], processes))

    stage(
        "tokenizer",
        1,
        "",
        "dcar fit-tokenizer --config tokenizer_hubert path={data} encoder={encoder} "
        "device={device}",
    )
    prepare = "tokenizer={out}/tokenizer device={device}"
    stage(
        "prepared",
        processes,
        "tokenizer",
        f"dcar prepare --config prepare_paper path={{data}} {prepare}",
    )
    stage("testset", processes, "tokenizer", f"dcar prepare --config {{testset}} {prepare}")
    train = "data={out}/prepared {batch}"
    stage("far", processes, "prepared", f"dcar train --config car_paper:far {train}")
    stage("car", processes, "prepared", f"dcar train --config car_paper {train}")
    stage(
        "pack",
        1,
        "prepared",
        f"python -m dcar.vocoder.training.pack prepared={{out}}/prepared hours={PACKED_HOURS}",
        suffix=".safetensors",
    )
    stage(
        "vocoder",
        1,
        "pack.safetensors",
        "dcar train-vocoder --config vocoder_paper data={out}/pack.safetensors device={device}",
    )
    models = "car prepared vocoder/export"
    stage(
        "profile",
        processes,
        models,
        "dcar profile --config profile_paper {car} recognizer={reward_recognizer} device={device}",
    )
    for sizes, variant, members in (("2_3", "", 8), ("2_3_4", ":2-3-4", 12)):
        stage(
            f"dcpo_{sizes}",
            shared,
            models,
            f"dcar train-policy --config dcpo_paper{variant} {{car}} "
            f"recognizer={{reward_recognizer}} "
            f"per_device_train_batch_size={GROUPS // shared * members}",
        )
        stage(
            f"policy_{sizes}",
            1,
            f"car dcpo_{sizes}",
            f"dcar export run={{out}}/dcpo_{sizes} decoder={{out}}/car",
        )
    stage(
        "compare",
        processes,
        "testset far car vocoder/export policy_2_3 policy_2_3_4",
        "dcar compare --config compare_paper data={out}/testset decoder={out}/car "
        "far_decoder={out}/far vocoder={out}/vocoder/export policies={policies} "
        "recognizer={recognizer} "
        "scorers={scorers} training_logs=[{out}/dcpo_2_3/log.jsonl]",
    )
    return jobs


def of_stages(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Split arguments into those of the recipe itself, and key=value of its stages by stage."""
    own: list[str] = []
    overrides: dict[str, list[str]] = {}
    for word in arguments:
        name, dot, _key = word.partition("=")[0].partition(".")
        if dot:
            overrides.setdefault(name, []).append(word.removeprefix(f"{name}."))
        else:
            own.append(word)
    return own, overrides


def check_overrides(stages: Sequence[Job], overrides: dict[str, list[str]]) -> None:
    """Raise ConfigError for a stage that there is not, or a setting that its stage does not have,
    before other stages run for hours."""
    by_name = {stage.name: stage for stage in stages}
    for name, settings in overrides.items():
        if name not in by_name:
            raise ConfigError(f"{name}.{settings[0]}: the stages are {', '.join(by_name)}")
        command = by_name[name].command
        module, shown = command[2], command[:3]
        if command[0] == "dcar":
            module, shown = resolve(command[1:])[1], command[:2]
        known = settings_of(importlib.import_module(module).CONFIG)
        for key in (word.partition("=")[0] for word in settings):
            if key not in known:
                raise ConfigError(
                    f"{name}.{key}: stage {name} has no setting '{key}'; run "
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


def check_corpus(config: PaperConfig) -> None:
    """Raise DataError if the LibriTTS folder lacks a split or the test set, before stages run for
    hours."""
    splits = {canonical_split(part.name) for part in corpus_parts("libritts", config.data)}
    if absent := sorted({"train", "dev"} - splits):
        raise DataError(
            f"{config.data}: contains no subset of the split {' and '.join(absent)}; unpack "
            "train-clean-100 and dev-clean as well"
        )
    if config.testset_b:
        corpus_parts("unicats", config.testset_b, audio_root=config.data)
    else:
        corpus_parts("libritts", config.data, subsets=["test-clean"])


def run(config: PaperConfig, overrides: dict[str, list[str]]) -> None:
    """Run the stages that are not finished. Raises DCARError if one fails, StoppedError if it is
    stopped."""
    stages, out = pipeline(config, overrides, processes_of(config)), Path(config.out)
    check_overrides(stages, overrides)
    check_corpus(config)
    on_cpu = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    with claimed(out / "jobs", resumes=True):  # the stages write to folders next to it
        save_config(config, out / "paper.yaml")
        run_pipeline([[stage] for stage in stages], out, on_cpu if config.device == "cpu" else {})
    print(f"\nThe table and the report: {stages[-1].output}/compare.txt, report.html")


CONFIG = PaperConfig


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipe, given `data=… out=… [key=value …] [STAGE.key=value …]`."""
    own, overrides = of_stages(sys.argv[1:] if arguments is None else arguments)
    run(load_config(CONFIG, own), overrides)


if __name__ == "__main__":
    sys.exit(run_command("paper", main))
