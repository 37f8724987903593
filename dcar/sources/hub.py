"""Models by folder or by name on a hub, loaded without unpickling code, and identified by their
files. Errors name the command that helps without network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dcar.errors import AssetError, CheckpointError
from dcar.storage import digest_of, digest_once

T = TypeVar("T")

READ_BY_TRANSFORMERS = {".json", ".txt", ".model", ".safetensors", ".bin"}
"""Suffixes of the files of a model's folder that determine what the model returns."""


def from_hub(load: Callable[..., T], source: str | Path, what: str, **options: Any) -> T:
    """Call `load(source, **options)`, a `from_pretrained` of transformers, with errors that say
    what to do.

    Raises AssetError for a folder that does not exist or a hub name that cannot be downloaded, and
    CheckpointError for a folder that contains something else. transformers reads pickled weights
    with `weights_only`.
    """
    local = Path(source)
    looks_local = local.is_absolute() or str(source).startswith(".") or local.exists()
    if looks_local and not local.is_dir():
        raise AssetError(
            f"{source}: no such folder with {what}; check the path, or give a name on the hub"
        )
    try:
        return load(str(source), **options)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        cause = (
            str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        )
        if looks_local:
            raise CheckpointError(
                f"{source}: not {what} as save_pretrained writes it ({cause})"
            ) from error
        raise AssetError(
            f"{source}: {what} cannot be loaded from the hub ({cause}). Without network: run `hf "
            f"download {source} --local-dir FOLDER` on a machine that has one, copy FOLDER here "
            "and give it instead of the name"
        ) from error


def identified(name: str, source: str | Path) -> str:
    """Return `name@DIGEST`, so that a result stored under it is not taken for that of another
    model of the same name.

    DIGEST: eight hex digits of a file's SHA-256, of those of a folder's weights and settings, or
    of the commit that the hub's cache has of a model. The name alone if `source` is none of these.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in READ_BY_TRANSFORMERS)
        content = digest_of([(p.name, digest_once(p)["sha256"]) for p in files if p.is_file()])
    else:
        content = digest_once(path)["sha256"] if path.is_file() else _commit(str(source))
    return f"{name}@{content[:8]}" if content else name


def _commit(model: str) -> str:
    """Return the commit of a model in the hub's cache; "" if it is not there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True)).name
    except (OSError, ValueError):  # not in the cache, not a name on the hub
        return ""


def read_weights(path: Path, what: str, fix: str = "") -> dict[str, Any]:
    """Return the tensors of a `.pt`, `.bin`, `.pth`, `.ckpt` or `.safetensors` file, on the CPU;
    pickles are read with `weights_only`.

    Raises AssetError if the file is missing, and CheckpointError if it cannot be read as weights
    alone. fix: remedy, with which both messages end.
    """
    import zipfile

    import torch

    if not path.is_file():
        raise AssetError(f"{path}: {what} is missing; {fix or 'copy it there'}")
    try:
        if path.suffix.lower() == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        loaded = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:  # pickle and zipfile raise nearly anything where a file is damaged
        cause = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise CheckpointError(
            f"{path}: holds more than tensors, or is damaged ({cause}); only weights are loaded: "
            + (fix or "on a machine that trusts the file, save its state_dict with safetensors")
        ) from error
    if not isinstance(loaded, dict):
        weights = (
            f"{path}: holds a {type(loaded).__name__}, expected a dictionary of tensors ({what})"
        )
        raise CheckpointError(f"{weights}; {fix}" if fix else weights)
    return loaded
