"""Models by folder or by name on a hub, loaded without unpickling code. Errors name the command
that helps without network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dcar.errors import AssetError, CheckpointError

T = TypeVar("T")


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
        found = (
            f"{path}: holds a {type(loaded).__name__}, expected a dictionary of tensors ({what})"
        )
        raise CheckpointError(f"{found}; {fix}" if fix else found)
    return loaded
