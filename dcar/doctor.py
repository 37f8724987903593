"""`dcar doctor`: is this installation able to run the main job? One line a check; exit status 1 if any fails."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from dcar.config import load_config
from dcar.errors import DCARError
from dcar.sources.packages import pip_extra

EXTRAS = {"nemo": ("nemo_toolkit", "recognisers of NeMo"),
          "demo": ("gradio", "dcar demo")}


def _versions() -> str:
    names = ("torch", "transformers", "trl", "accelerate", "jiwer", "datasets", "peft")
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def _extras() -> str:
    """Optional packages: what they are for, and how to get the absent ones."""
    said = []
    for extra, (package, purpose) in EXTRAS.items():
        try:
            said.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            said.append(f"no {package}, for {purpose}: {pip_extra(extra)}")
    return "; ".join(said)


def _device() -> str:
    import torch

    from dcar.tracking import machine

    gpus = torch.cuda.device_count()
    return f"{machine()}; {gpus} CUDA device{'s' if gpus != 1 else ''}"


def _space() -> str:
    free = shutil.disk_usage(".").free / 1e9
    if free < 2:
        raise DCARError(f"only {free:.1f} GB free here; the quickstart needs 2 GB")
    return f"{free:.0f} GB free"


def _packaged() -> str:
    from dcar.sources.packages import moonshine_files, resemblyzer_weights, whisper_base_dir

    whisper_base_dir(), moonshine_files(), resemblyzer_weights()  # all verify every digest
    return "whisper-base, moonshine and resemblyzer are there, digests verified"


def _shipped() -> str:
    from dcar.model.car import CARDecoder
    from dcar.prompts.load import check_together, made_by
    from dcar.recognition.load import load_token_recognizer
    from dcar.sources.shipped import shipped
    from dcar.text.phonemes import PHONEME_VERSION
    from dcar.tokens.load import load_tokenizer
    from dcar.vocoder.model import TokenVocoder
    from heads.policy import ChunkPolicy

    decoder = CARDecoder.from_pretrained(shipped("decoder"))
    made = made_by(load_tokenizer("starter"), PHONEME_VERSION)
    check_together(decoder, made, "the shipped tokenizer", TokenVocoder.from_pretrained(shipped("vocoder")),
                   [ChunkPolicy.from_pretrained(shipped(name)) for name in ("policy", "policy-t0.4")])
    CARDecoder.from_pretrained(shipped("far"))
    load_token_recognizer("starter").check_reads(made, "the shipped tokenizer")
    return "decoders, policies, tokenizer, vocoder and token recogniser load and belong together"


def _kernels() -> str:
    import torch

    from dcar.decoding.fast.cpu.native import Kernels, NativeError, switched_off

    if switched_off():
        return "switched off by DCAR_NATIVE, decoding on the CPU is slower than it could be"
    try:
        made = {str(dtype).removeprefix("torch."): Kernels(dtype) for dtype in (torch.float32, torch.bfloat16)}
    except NativeError as error:
        return f"none, decoding on the CPU is slower than it could be: {error}"
    return "compiled for " + ", ".join(name + " (matrix unit)" * own.matrix_unit for name, own in made.items())


CHECKS: dict[str, Callable[[], str]] = {
    "packages": _versions, "extras": _extras, "device": _device, "CPU kernels": _kernels, "disk": _space,
    "packaged models": _packaged, "shipped models": _shipped,
}


@dataclass
class DoctorConfig:
    """Whether this installation is able to run the main job: one line a check; it has no settings."""


def main(arguments: list[str] | None = None) -> None:
    load_config(DoctorConfig, arguments)
    failed = 0
    for name, check in CHECKS.items():
        try:
            print(f"ok    {name}: {check()}")
        except (DCARError, metadata.PackageNotFoundError, ImportError, OSError) as error:
            failed += 1
            print(f"FAIL  {name}: {type(error).__name__}: {error}")
    if failed:
        sys.exit(1)
