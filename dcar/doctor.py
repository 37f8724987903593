"""`dcar doctor`: check whether this installation can run the main job. `dcar doctor FOLDER`: check
whether its files are as written.

It prints one line per check, and exits with status 1 if any fails. In a folder, the digests listed
in every manifest.json, provenance.json, prepared.json and compare.json below it are recomputed.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from dcar.config import load_config, setting
from dcar.errors import DataError, DCARError
from dcar.sources.packages import is_installed, missing_of, pip_extra
from dcar.storage import MANIFEST, faults

EXTRAS = {
    "judge": "recordings as voices, scores",
    "train": "training",
    "report": "comparisons",
    "nemo": "recognisers of NeMo",
}


def _versions() -> str:
    names = ("torch", "transformers", "trl", "accelerate", "jiwer", "datasets", "peft")
    return ", ".join(f"{name} {metadata.version(name)}" for name in names if is_installed(name))


def _extras() -> str:
    """Describe optional packages: their purpose, and how to install the absent ones."""
    return "; ".join(
        f"no {extra}, for {purpose}: {pip_extra(extra)}" if missing_of(extra) else extra
        for extra, purpose in EXTRAS.items()
    )


def _device() -> str:
    import torch

    from dcar.tracking import machine

    gpus = torch.cuda.device_count()
    unused = "" if gpus or torch.version.cuda is None else f"; {UNUSED_CUDA}"
    return f"{machine()}; {gpus} CUDA device{'s' if gpus != 1 else ''}{unused}"


UNUSED_CUDA = (
    "torch is a CUDA build, whose libraries take 3 to 4 GB, but no GPU is seen; if there is none, "
    "run: pip list --format=freeze | grep -oE '^(torch|triton|nvidia-[^=]+|cuda-[^=]+)=' | "
    'tr -d = | xargs pip uninstall -y && pip install "torch>=2.13,<2.14" --extra-index-url '
    "https://download.pytorch.org/whl/cpu"
)


def _space() -> str:
    free = shutil.disk_usage(".").free / 1e9
    if free < 2:
        raise DCARError(f"only {free:.1f} GB free here; the quickstart needs 2 GB")
    return f"{free:.0f} GB free"


def _packaged() -> str:
    if missing_of("judge"):
        return "not needed without the extra judge"
    from dcar.sources.packages import moonshine_files, resemblyzer_weights, whisper_base_dir

    for verified in (whisper_base_dir, moonshine_files, resemblyzer_weights):
        verified()  # compares every digest
    return "whisper-base, moonshine and resemblyzer are there, digests verified"


def _shipped() -> str:
    from dcar.model.car import CARDecoder
    from dcar.prompts.together import check_together, made_by
    from dcar.sources.shipped import shipped
    from dcar.text.units import units_for
    from dcar.tokens.load import load_tokenizer
    from dcar.vocoder.model import TokenVocoder
    from heads.policy import ChunkPolicy

    decoder = CARDecoder.from_pretrained(shipped("decoder"))
    origin = made_by(load_tokenizer("starter"), units_for())
    check_together(
        decoder, origin, "the shipped tokenizer", TokenVocoder.from_pretrained(shipped("vocoder"))
    )
    for name in ("policy-t1.0", "policy-t0.4"):
        ChunkPolicy.from_pretrained(shipped(name)).check_base(decoder.checksum())
    CARDecoder.from_pretrained(shipped("far"))
    loaded = "decoders, policies, tokenizer and vocoder"
    if not missing_of("judge"):
        from dcar.recognition.load import load_token_recognizer

        load_token_recognizer("starter").check_reads(origin, "the shipped tokenizer")
        loaded += ", and the token recogniser,"
    return f"{loaded} load and belong together"


def _kernels() -> str:
    from dcar.decoding.cpu.native import NativeError, load, switched_off

    if switched_off():
        return "switched off by DCAR_NATIVE, decoding on the CPU is slower than it could be"
    try:
        load()
    except NativeError as error:
        return f"none, decoding on the CPU is slower than it could be: {error}"
    return "compiled for float32"


def _gpu_parts() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no GPU"
    from dcar import first_use
    from dcar.decoding.readers import shapes_of
    from dcar.model.load import load_decoder
    from dcar.vocoder.load import load_vocoder

    decoder = shapes_of(load_decoder("starter"))
    cases = [
        ("decoding", "decoding, float32", decoder),
        ("decoding", "decoding, bfloat16", decoder | {"dtype": "bfloat16"}),
        ("vocoder", "vocoder", {"config": asdict(load_vocoder().config)}),
        ("optimizer", "optimiser", {}),
    ]
    used = {
        name: first_use.sound_parts(use, case, torch.device("cuda:0")) for use, name, case in cases
    }
    replaced = [
        f"{name}: operators in place of {', '.join(sorted(missing))}"
        for (use, name, _) in cases
        if (missing := first_use.ORDERS[use][0] - used[name])
    ]
    if replaced:
        raise DCARError("; ".join(replaced))
    return f"{', '.join(used)} compute what plain operators compute"


CHECKS: dict[str, Callable[[], str]] = {
    "packages": _versions,
    "extras": _extras,
    "device": _device,
    "CPU kernels": _kernels,
    "GPU parts": _gpu_parts,
    "disk": _space,
    "packaged models": _packaged,
    "shipped models": _shipped,
}


LISTS = (MANIFEST, "provenance.json", "prepared.json", "compare.json")


def verify(folder: str | Path) -> dict[Path, tuple[int, list[str]]]:
    """Check every list of digests under a folder. Return its number of files and their faults.
    Raises DataError if there is no list."""
    folder = Path(folder)
    verdicts: dict[Path, tuple[int, list[str]]] = {}
    for path in sorted(p for name in LISTS for p in folder.rglob(name)):
        try:
            listed = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            verdicts[path] = 0, [f"cannot be read ({error})"]
            continue
        if path.name == MANIFEST or "files" in listed:
            complete = {"complete": True} if path.name != MANIFEST else {}
            files = listed.get("files", {})
            verdicts[path] = len(files), faults(path.parent, {**listed, **complete})
    if not verdicts:
        raise DataError(
            f"{folder}: no list of digests ({', '.join(LISTS)}); give the folder of a run, of a "
            "prepared corpus or of a comparison written by this version"
        )
    return verdicts


@dataclass
class DoctorConfig:
    """Check whether this installation can run the main job, or whether the files of a folder are
    as they were written."""

    folder: str = setting(
        "",
        "Folder of a run, of a prepared corpus or of a comparison, whose digests are recomputed; "
        "empty = check the installation.",
        positional=True,
        place="folder",
    )


CONFIG = DoctorConfig


def main(arguments: list[str] | None = None) -> int:
    """Run `dcar doctor [FOLDER]`. Return status 1 if a check fails."""
    if folder := load_config(CONFIG, arguments).folder:
        verdicts = verify(folder)
        for path, (files, faults_of_list) in verdicts.items():
            print(
                "\n      ".join([f"BAD   {path}", *faults_of_list])
                if faults_of_list
                else f"ok    {path}: {files} files are as they were written"
            )
        return int(any(faults_of_list for _, faults_of_list in verdicts.values()))
    failed = False
    for name, check in CHECKS.items():
        try:
            print(f"ok    {name}: {check()}")
        except (DCARError, metadata.PackageNotFoundError, ImportError, OSError) as error:
            failed = True
            print(f"FAIL  {name}: {type(error).__name__}: {error}")
    return int(failed)
