"""Decoding steps on the CPU, in C: matrix products of few rows, and stacks of Transformer layers for few positions.

Matrix libraries are optimised for many rows: with five rows they take up to twice the time of one row, although they
read the same weights, and chunk-wise decoding needs that to be cheap. And a step of a small model consists of hundreds
of operators whose calls take longer than their arithmetic; a stack is one call. `layers.c` (which includes the other
files) is compiled with the system's compiler at the first use (some seconds) and cached in the user's cache folder.
Without a compiler, or with DCAR_NATIVE=off, PyTorch computes the same more slowly.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcar.decoding.columns import Columns, RotaryCache
from dcar.home import cache_folder
from heads.layers import TransformerLayer

logger = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("layers.c", "few_rows.c", "panels.c", "heads.c",
                                                              "distributions.c", "chunk_scorer.c"))
"""The first one is compiled and includes the others."""

# Tuned for some processors (AMD's Zen), gcc fuses multiplications and additions in one loop and not in its twin for
# another number of rows; then a row's result would depend on how many others there are.
TUNE = ("-mtune=haswell",) if platform.machine() in ("x86_64", "AMD64") else ()
FLAGS = ("-O2", "-march=native", *TUNE, "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
TYPES = {torch.float32: (), torch.bfloat16: ("-DBF16",)}

LARGE = 1 << 19
"""float32 weights of fewer elements are packed in panels of PANEL columns, which are faster from a CPU cache; larger
ones are limited by the memory bandwidth."""

PANEL = 32


POINTER, LONG = ctypes.c_void_p, ctypes.c_long


def members(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Members of a C structure, of one type."""
    return [(name, kind) for name in names.split()]


class LinearPart(ctypes.Structure):
    """A linear layer, as layers.c has it."""

    _fields_ = [*members(POINTER, "weight bias"), *members(LONG, "out size panels")]


class _Layer(ctypes.Structure):
    _fields_ = [*members(POINTER, "attention_norm attention_bias ffn_norm ffn_bias"),
                *members(LinearPart, "qkv out up down")]


class _Pass(ctypes.Structure):
    """The arguments of run_layers, as layers.c has them."""

    _fields_ = [*members(POINTER, "first_norm first_bias"), ("first", LinearPart), ("layers", ctypes.POINTER(_Layer)),
                *members(POINTER, "last_norm last_bias"), ("last", LinearPart),
                *members(LONG, "count heads"), ("epsilon", ctypes.c_float), *members(POINTER, "keys values"),
                *members(LONG, "layer_stride row_stride column_stride head_stride"),
                *members(POINTER, "cos sin"), *members(LONG, "angle_stride positions"),
                *members(POINTER, "x result angle index"), ("row_columns", LONG),
                *members(POINTER, "hole_from hole_to mask"), ("mask_columns", LONG),
                ("kept", POINTER), *members(LONG, "kept_count threads")]


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {  # what each returns and takes
    "multiply": (None, [*[POINTER] * 4, *[LONG] * 3, ctypes.c_int]),
    "multiply_panels": (None, [*[POINTER] * 4, *[LONG] * 3, ctypes.c_int]),
    "run_layers": (ctypes.c_int, [ctypes.POINTER(_Pass)]),
    "run_heads": (ctypes.c_int, [*[POINTER] * 3, *[LONG] * 3]),
    "run_shared_heads": (ctypes.c_int, [*[POINTER] * 3, *[LONG] * 3]),
    "run_distributions": (LONG, [*[POINTER] * 6, *[LONG] * 4]),
    "run_decision": (LONG, [*[POINTER] * 13, *[LONG] * 4, ctypes.c_float]),
    "run_chunk_scorer": (ctypes.c_int, [*[POINTER] * 5, *[LONG] * 6]),  # in float32 only
    "matrix_unit": (ctypes.c_int, []),
}


class NativeError(Exception):
    """The kernels are not available; the message says why."""


class Kernels:
    """The compiled kernels of one dtype."""

    def __init__(self, dtype: torch.dtype, flags: Sequence[str] = ()):
        """NativeError where there is no C compiler, or it fails."""
        path = _compiled((*FLAGS, *TYPES[dtype], *flags))
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeError(f"{path} cannot be loaded ({error}); remove it to have it compiled again") from error
        for name, (result, arguments) in SIGNATURES.items():
            if (function := getattr(library, name, None)) is not None:
                function.restype, function.argtypes = result, arguments
        self.library, self.dtype, self.matrix_unit = library, dtype, bool(library.matrix_unit())
        # With more rows PyTorch is faster (docs/decode.md); not in bfloat16 on a processor that cannot multiply it.
        slow = dtype == torch.bfloat16 and "bf16" not in _processor()
        self.rows = 96 if self.matrix_unit or slow else 32 if dtype == torch.float32 else 8

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        """The product with a contiguous weight [out, in], which is used where it is, or copied if it is a small one."""
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        small = self.dtype == torch.float32 and weight.numel() < LARGE
        return NativeLinear(self.library.multiply_panels if small else self.library.multiply, weight, bias, small)

    def stack(self, layers: Sequence[TransformerLayer], last: Sequence[nn.Module],
              first: Sequence[nn.Module] = ()) -> NativeStack | None:
        """These layers, the `last` norm and an optional linear layer after them, and likewise a `first` norm and linear
        layer before them. None if one is not as heads/layers.py makes it (quantised, say) or not contiguous."""
        norms = [norm for layer in layers for norm in (layer.attention_norm, layer.ffn_norm)] + [last[0], *first[:1]]
        linear: list[nn.Module] = [part for layer in layers for part in (layer.qkv, layer.out, layer.up, layer.down)]
        linear += [part for part in (*last[1:], *first[1:]) if not isinstance(part, nn.Identity)]
        plain = [type(part) is nn.LayerNorm and part.eps == norms[0].eps for part in norms]
        plain += [type(part) is nn.Linear for part in linear]
        weights = [p for part in (*norms, *linear) for p in part.parameters()]
        if not all(plain) or len(weights) < 2 * len(plain) or not all(self.reads(w) for w in weights):
            return None
        return NativeStack(self, layers, last, first)

    def reads(self, weight: Tensor) -> bool:
        """Whether the kernels can read a weight: its dtype, device and layout."""
        return weight.dtype == self.dtype and weight.device.type == "cpu" and weight.is_contiguous()


class NativeLinear:
    """x [N, in] -> [N, out]; it reads the memory of the weight (or of a copy in panels) and of the bias."""

    def __init__(self, multiply: Callable[..., None], weight: Tensor, bias: Tensor | None, panels: bool = False):
        out, size = self.shape = weight.shape
        if panels:  # [out / PANEL, in, PANEL]
            weight = F.pad(weight, (0, 0, 0, -out % PANEL)).view(-1, PANEL, size).transpose(1, 2).contiguous()
        self.weight, self.bias, self.panels, self._multiply = weight, bias, panels, multiply
        self._addresses = weight.data_ptr(), address(bias)

    def part(self) -> LinearPart:
        """The same for layers.c."""
        return LinearPart(*self._addresses, *self.shape, int(self.panels))

    def __call__(self, x: Tensor) -> Tensor:
        rows, (out, size), (weight, bias) = len(x), self.shape, self._addresses
        check_rows(x, self.weight, size)
        x, y = x.contiguous(), x.new_empty(rows, out)
        self._multiply(x.data_ptr(), weight, bias, y.data_ptr(), rows, out, size, torch.get_num_threads())
        return y


class NativeStack:
    """Transformer layers with the norms and linear layers around them, for few new positions; it reads the memory of
    the weights (small float32 ones are copied)."""

    def __init__(self, native: Kernels, layers: Sequence[TransformerLayer], last: Sequence[nn.Module],
                 first: Sequence[nn.Module]):
        """Layers that `Kernels.stack` accepts."""
        self._run, self._held, self.dtype = native.library.run_layers, list[object](), native.dtype
        products: list[NativeLinear] = []

        def norm(part: nn.Module) -> tuple[int, int]:
            self._held.append(pair := [p.detach() for p in part.parameters()])
            return pair[0].data_ptr(), pair[1].data_ptr()

        def linear(parts: Sequence[nn.Module]) -> LinearPart:
            if not parts or isinstance(parts[0], nn.Identity):
                return LinearPart()
            products.append(native.linear(*parts[0].parameters()))
            return products[-1].part()

        made = [_Layer(*norm(layer.attention_norm), *norm(layer.ffn_norm),
                       *(linear([part]) for part in (layer.qkv, layer.out, layer.up, layer.down))) for layer in layers]
        self._pass = p = _Pass(layers=(_Layer * len(made))(*made), count=len(made), heads=layers[0].num_heads,
                               epsilon=layers[0].attention_norm.eps, last=linear(last[1:]), first=linear(first[1:]))
        p.last_norm, p.last_bias = norm(last[0])
        if first:
            p.first_norm, p.first_bias = norm(first[0])
        self._held += products
        small = all(product.panels for product in products)
        self.rows = 1 << 30 if small else native.rows
        # Text and prompt are two passes, which read large weights twice: slower than PyTorch in float32.
        self.prompt_rows = self.rows if small or native.dtype == torch.bfloat16 else 0
        width = layers[0].out.out_features
        self.size, self.out = p.first.size or width, p.last.out or width
        self._apart = bool(first) or len(last) > 1  # the result is not written over x
        self._memory: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, rotary: RotaryCache, positions: Tensor, columns: Columns) -> Tensor:
        """As `Stack.read`."""
        p = self._pass
        if x.dtype != self.dtype or x.shape[1] != self.size:
            raise TypeError(f"rows {tuple(x.shape)} of {x.dtype} cannot be read by layers for {self.size} in "
                            f"{self.dtype}")
        if self._memory is None or columns.kv is not self._memory[0] or rotary.cos is not self._memory[1]:
            self._set_memory(columns.kv, rotary)
        x, kept = x.contiguous(), columns.ends
        if columns.writes_only:  # one query in the last layer, as there must be one
            kept = torch.zeros(1, dtype=torch.long)
        y = x.new_empty(len(x) if kept is None else len(kept), self.out) if self._apart or kept is not None else x
        p.positions, p.x, p.result, p.threads = len(x), x.data_ptr(), y.data_ptr(), torch.get_num_threads()
        read = [None if t is None else t.contiguous()  # kept alive until the end of the call
                for t in (positions, columns.index, columns.padding_from, columns.padding_to, columns.tree, kept)]
        p.angle, p.index, p.hole_from, p.hole_to, p.mask, p.kept = map(address, read)  # as layers.c calls them
        p.mask_columns = 0 if columns.tree is None else columns.last
        p.kept_count = 0 if kept is None else len(kept)
        if self._run(p):
            raise RuntimeError(f"could not allocate memory for {len(x)} positions through {p.count} layers")
        return y

    def _set_memory(self, kv: Tensor, rotary: RotaryCache) -> None:
        """Set the addresses of the cache and of the rotary table, which seldom change."""
        if kv.dtype != self.dtype or rotary.cos.dtype != self.dtype or kv.stride(5) != 1:
            raise TypeError(f"keys and values must be {self.dtype} as the rotations, heads contiguous")
        p, size = self._pass, kv.itemsize
        p.keys, p.values, p.row_columns = kv.data_ptr(), kv.data_ptr() + kv.stride(3) * size, kv.shape[2]
        p.layer_stride, p.row_stride, p.column_stride, p.head_stride = (kv.stride(i) for i in (0, 1, 2, 4))
        p.angle_stride = rotary.cos.stride(0)
        p.cos, p.sin = (t.data_ptr() - rotary.first * p.angle_stride * size for t in (rotary.cos, rotary.sin))
        self._memory = kv, rotary.cos, rotary.sin  # keeps them alive


def switched_off() -> bool:
    """Whether DCAR_NATIVE is off."""
    return os.environ.get("DCAR_NATIVE", "").lower() in ("off", "0", "false")


@functools.cache
def kernels(dtype: torch.dtype) -> Kernels | None:
    """The CPU kernels for this dtype; None, with a warning, where they are not available."""
    if dtype not in TYPES or switched_off():
        return None
    try:
        return Kernels(dtype)
    except NativeError as error:
        logger.warning("decoding on the CPU is slower than it could be: %s", error)
        return None


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def check_rows(x: Tensor, weight: Tensor, size: int) -> None:
    if x.dtype != weight.dtype or x.shape[-1] != size:
        raise TypeError(f"rows {tuple(x.shape)} of {x.dtype} cannot be multiplied by a weight {tuple(weight.shape)} of "
                        f"{weight.dtype}")


def _compiled(flags: Sequence[str]) -> Path:
    """The shared library of SOURCES for this processor and compiler, built if it is not in the cache.

    Its name ends in the digest of its content. A file that another user owns or may write, or whose digest differs, is
    rebuilt, not loaded; a folder of another user is refused (NativeError).
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise NativeError("there is no C compiler (cc or gcc, or what CC names); install one")
    identity = (*(source.read_text(encoding="utf-8") for source in SOURCES), *flags, compiler, _processor())
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    folder = cache_folder("dcar")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise NativeError(f"{folder} belongs to somebody else, who could change what is run; set XDG_CACHE_HOME")
        if folder.stat().st_mode & 0o022:  # as a lax umask made it
            folder.chmod(0o700)
        for library in sorted(folder.glob(f"layers-{digest}-*.so")):
            if _is_ours(library):
                return library
            logger.warning("%s is damaged, or others may write it; the kernels are compiled again", library)
            library.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as build:  # processes that start together each build their own
            made = Path(build) / "layers.so"
            command = [compiler, *flags, str(SOURCES[0]), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise NativeError(f"{compiler} could not compile {SOURCES[0].name}: {done.stderr.strip()[:500]}")
            made.chmod(0o700)
            library = folder / f"layers-{digest}-{hashlib.sha256(made.read_bytes()).hexdigest()[:32]}.so"
            made.replace(library)
    except OSError as error:
        raise NativeError(f"no place for compiled kernels in {folder} ({error}); set XDG_CACHE_HOME") from error
    return library


def _is_ours(library: Path) -> bool:
    """Whether a compiled library is a regular file of this user, writable by nobody else, with the digest in its
    name."""
    found = library.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        return False
    return library.stem.rpartition("-")[2] == hashlib.sha256(library.read_bytes()).hexdigest()[:32]


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
