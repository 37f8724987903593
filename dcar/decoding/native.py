"""Products of few rows with large weights on the CPU, in C: the weights are read once, at the rate of the memory.

Matrix libraries are made for many rows. Five rows through a large weight cost them up to twice what one row costs,
where the bytes that are read are the same; chunk-wise decoding lives on that difference. `few_rows.c` is compiled with
the machine's own compiler when it is first needed (a second or two) and kept in the cache folder of the user.
Without a compiler, or with DCAR_NATIVE=off, PyTorch's kernels do the same, more slowly.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("few_rows.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
TYPES = {torch.float32: (), torch.bfloat16: ("-DBF16",)}
ALONE = 1 << 17
"""Products of fewer multiplications than this stay on one thread."""

STACKED_ROWS = 8
"""With more rows PyTorch multiplies stacked weights faster."""


class NativeError(Exception):
    """The kernels cannot be had here; the message says why."""


class Kernels:
    """The compiled products of one number type."""

    def __init__(self, dtype: torch.dtype, flags: Sequence[str] = ()):
        """NativeError where there is no C compiler, or it fails."""
        path = _compiled((*FLAGS, *TYPES[dtype], *flags))
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeError(f"{path} cannot be loaded ({error}); remove it to have it compiled again") from error
        self._multiply, self._in_out = library.multiply, library.multiply_in_out
        for function, sizes in ((self._multiply, 3), (self._in_out, 4)):
            function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * sizes + [ctypes.c_int]
            function.restype = None
        self.matrix_unit = bool(library.matrix_unit())
        # With more rows PyTorch is faster (docs/performance.md).
        self.rows = 96 if self.matrix_unit else 32 if dtype == torch.float32 else 8

    def linear(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        """The product with a contiguous weight [out, in], which is used where it is."""
        return NativeLinear(self._multiply, weight, bias)

    def stacked(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [G, N, in] times weight [G, in, out] plus bias [G, 1, out], all contiguous: [G, N, out]."""
        groups, size, out = weight.shape
        _check(x, weight, size)
        y = x.new_empty(groups, x.shape[1], out)
        self._in_out(x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), groups,
                     x.shape[1], out, size, _threads(x.shape[1] * weight.numel()))
        return y


class NativeLinear:
    """x [N, in] -> [N, out]; it holds the weight and the bias, whose memory it reads."""

    def __init__(self, multiply: Callable[..., None], weight: Tensor, bias: Tensor | None):
        self.weight, self.bias, self._multiply = weight, bias, multiply
        self._addresses = weight.data_ptr(), None if bias is None else bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        rows, (out, size), (weight, bias) = len(x), self.weight.shape, self._addresses
        _check(x, self.weight, size)
        x, y = x.contiguous(), x.new_empty(rows, out)
        self._multiply(x.data_ptr(), weight, bias, y.data_ptr(), rows, out, size, _threads(rows * out * size))
        return y


@functools.cache
def kernels(dtype: torch.dtype) -> Kernels | None:
    """The kernels for tensors of this type on the CPU; None, with a line in the log, where they cannot be had."""
    if dtype not in TYPES or os.environ.get("DCAR_NATIVE", "").lower() in ("off", "0", "false"):
        return None
    try:
        return Kernels(dtype)
    except NativeError as error:
        logger.warning("decoding on the CPU is slower than it could be: %s", error)
        return None


def _check(x: Tensor, weight: Tensor, size: int) -> None:
    if x.dtype != weight.dtype or x.shape[-1] != size:
        raise TypeError(f"rows {tuple(x.shape)} of {x.dtype} cannot be multiplied by a weight {tuple(weight.shape)} of "
                        f"{weight.dtype}")


def _threads(multiplications: int) -> int:
    return 1 if multiplications < ALONE else torch.get_num_threads()


def _compiled(flags: Sequence[str]) -> Path:
    """The shared library of SOURCE for this processor and compiler, built if it is not in the cache."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise NativeError("there is no C compiler (cc or gcc, or what CC names); install one")
    identity = (SOURCE.read_text(), *flags, compiler, _processor())
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dcar"
    library = folder / f"few_rows-{digest}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as build:  # processes that start together each build their own
            made = Path(build) / library.name
            done = subprocess.run([compiler, *flags, str(SOURCE), "-o", str(made)], capture_output=True, text=True)
            if done.returncode:
                raise NativeError(f"{compiler} could not compile {SOURCE.name}: {done.stderr.strip()[:500]}")
            made.replace(library)
    except OSError as error:
        raise NativeError(f"no place for compiled kernels in {folder} ({error}); set XDG_CACHE_HOME") from error
    return library


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
