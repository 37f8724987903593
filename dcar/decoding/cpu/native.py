"""Compile and load the C code of this folder, and pass weights to it.

kernels.c is compiled with the system's compiler at the first use (some seconds) and cached in the
user's cache folder. Without a compiler, or with DCAR_NATIVE=off, PyTorch computes the same more
slowly.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcar.home import cache_folder

logger = logging.getLogger(__name__)

SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in (
        "kernels.c",
        "vectors.h",
        "linear.c",
        "layers.c",
        "heads.c",
        "chunk_scorer.c",
        "distributions.c",
        "vocoder.c",
    )
)
"""Source files; the first one is compiled and includes the others."""

# Tuned for some processors (AMD's Zen), gcc fuses multiplications and additions in one loop and not
# in its twin for another number of rows; then a row's result would depend on how many others there
# are.
TUNE = ("-mtune=haswell",) if platform.machine() in ("x86_64", "AMD64") else ()
FLAGS = ("-O2", "-march=native", *TUNE, "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")

LANES = 16
"""Widths that are a multiple of it fill the vectors of every processor; the C code supports no
others."""
PANEL = 32
"""Number of output columns that are stored together; see linear.c."""

POINTER, LONG = ctypes.c_void_p, ctypes.c_long
FLOAT, DOUBLE = ctypes.c_float, ctypes.c_double


def members(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return members of a C structure that have one type."""
    return [(name, kind) for name in names.split()]


class Linear(ctypes.Structure):
    """Linear layer, as in linear.c."""

    _fields_ = [*members(POINTER, "weight bias"), *members(LONG, "out size")]


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {  # what each function returns and takes
    "run_layers": (ctypes.c_int, [POINTER]),
    "run_heads": (ctypes.c_int, [*[POINTER] * 3, *[LONG] * 3]),
    "run_distributions": (LONG, [*[POINTER] * 6, *[LONG] * 4]),
    "run_decision": (ctypes.c_int, [*[POINTER] * 9, *[LONG] * 4, FLOAT]),
    "run_convolution": (None, [*[POINTER] * 6, *[LONG] * 4, FLOAT, *[LONG] * 2]),
    "run_addition": (None, [*[POINTER] * 2, *[LONG] * 2]),
    "run_pulses": (DOUBLE, [*[POINTER] * 3, *[LONG] * 3, *[DOUBLE] * 2]),
    "run_filter": (None, [*[POINTER] * 4, *[LONG] * 4]),
    "run_overlap_add": (None, [*[POINTER] * 3, *[LONG] * 4]),
}


class NativeError(Exception):
    """Error: the C code is not available; the message says why."""


class Weights:
    """Weights for the C code, which are kept alive: linear layers as copies in panels, others
    where they are."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def address(self, weight: Tensor) -> int:
        self._held.append(weight := weight.detach().contiguous())
        return weight.data_ptr()

    def norm(self, norm: nn.Module) -> tuple[int, int]:
        weight, bias = norm.parameters()
        return self.address(weight), self.address(bias)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the product with a weight [out, in]."""
        out, size = weight.shape
        panels = (
            F.pad(weight.detach(), (0, 0, 0, -out % PANEL)).view(-1, PANEL, size).transpose(1, 2)
        )
        return Linear(self.address(panels), None if bias is None else self.address(bias), out, size)

    def linears(self, layers: Iterable[nn.Module]) -> Any:
        """Return an array of linear layers."""
        parts = [self.linear(*layer.parameters()) for layer in layers]
        return (Linear * len(parts))(*parts)


def reads(parts: Iterable[nn.Module], weights: Iterable[Tensor] = ()) -> bool:
    """Return whether parts are linear layers and layer norms as PyTorch makes them (not
    quantised, say), and all weights float32 on the CPU."""
    tensors = list(weights)
    for part in parts:
        if not (type(part) is nn.Linear or (type(part) is nn.LayerNorm and part.bias is not None)):
            return False
        tensors += part.parameters()
    return all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in tensors)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def check_memory(failed: int, what: str) -> None:
    if failed:
        raise RuntimeError(f"could not allocate memory for {what}")


def switched_off() -> bool:
    """Return whether DCAR_NATIVE is off."""
    return os.environ.get("DCAR_NATIVE", "").lower() in ("off", "0", "false")


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """Load the C code; None, with a warning, if it is not available."""
    if switched_off():
        return None
    try:
        return load()
    except NativeError as error:
        logger.warning("decoding on the CPU is slower than it could be: %s", error)
        return None


def load(flags: Sequence[str] = FLAGS) -> ctypes.CDLL:
    """Load the C code. Raises NativeError if there is no C compiler, or it fails."""
    path = _compiled(flags)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(
            f"{path} cannot be loaded ({error}); remove it to have it compiled again"
        ) from error
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _compiled(flags: Sequence[str]) -> Path:
    """Return the shared library of SOURCES for this processor and compiler, built if it is not in
    the cache.

    Its name ends in the digest of its content. A file that another user owns or may write, or whose
    digest differs, is rebuilt, not loaded; a folder of another user raises NativeError.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise NativeError("there is no C compiler (cc or gcc, or what CC names); install one")
    identity = (
        *(source.read_text(encoding="utf-8") for source in SOURCES),
        *flags,
        compiler,
        _processor(),
    )
    name = f"kernels-{_digest(chr(0).join(identity).encode())[:16]}-"
    folder = cache_folder("dcar")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise NativeError(
                f"{folder} belongs to another user, who could change the code that is run; set "
                "XDG_CACHE_HOME"
            )
        if folder.stat().st_mode & 0o022:  # as a lax umask made it
            folder.chmod(0o700)
        for library in sorted(folder.glob(f"{name}*.so")):
            if _is_ours(library):
                return library
            logger.warning("%s is damaged, or writable by others; it is compiled again", library)
            library.unlink(missing_ok=True)
        # processes that start together each build their own
        with tempfile.TemporaryDirectory(dir=folder) as build:
            made = Path(build) / "kernels.so"
            command = [compiler, *flags, str(SOURCES[0]), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise NativeError(
                    f"{compiler} could not compile {SOURCES[0].name}: {done.stderr.strip()[:500]}"
                )
            made.chmod(0o700)
            return made.replace(folder / f"{name}{_digest(made.read_bytes())}.so")
    except OSError as error:
        raise NativeError(
            f"{folder}: cannot write compiled kernels ({error}); set XDG_CACHE_HOME"
        ) from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _is_ours(library: Path) -> bool:
    """Return whether a library is a regular file of this user, writable by nobody else, with the
    digest in its name."""
    status = library.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        return False
    return library.stem.rpartition("-")[2] == _digest(library.read_bytes())


def _processor() -> str:
    """Return the facts that -march=native depends on: a home folder may be shared by unlike
    machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.machine()
    )
