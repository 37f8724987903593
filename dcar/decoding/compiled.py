"""Operations of a decoding step compiled by Inductor: the default on a GPU.

The parts that are compiled are small and shared: a layer, which serves all layers of a model; the
tables of a pass; and what a method does between two passes. Compiling a part takes seconds, once
for each kind of shapes in a process, and CUDA graphs then capture its kernels.

A part that cannot be compiled (Triton is missing, say) is computed by operators, with a warning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcar.decoding.backend import Backend
from dcar.decoding.columns import Columns, RotaryCache, window
from dcar.decoding.stack import Stack, finish, queries_keys_values, rotate
from heads.layers import TransformerLayer

logger = logging.getLogger(__name__)

OPTIONS: dict[str, Any] = {"deterministic": True, "score_fusion_memory_threshold": 1}
"""Options of Inductor. The first lets no timing choose how sums are divided, so that tokens do not
depend on what else a GPU did when a kernel was compiled. The second is the number of bytes that two
kernels must share to be fused: a number of each row, of which there may be one, is 8 bytes."""
VARIANTS = 256
"""Maximum number of variants of a part in a process: kinds of models, methods, and one row, several
or many. torch's own limit of 8 would be reached by the third method."""


class CompiledPart:
    """Function of a step that is compiled when it is called. It must not change Python objects."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self._compiled: Callable[..., Any] | None = torch.compile(
            function, fullgraph=True, backend=by_inductor
        )

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None or torch.compiler.is_compiling():
            return self.function(*args)
        from torch._dynamo import config, exc  # an import of seconds

        limits = {"recompile_limit": VARIANTS, "accumulated_recompile_limit": VARIANTS}
        try:
            with config.patch(limits):
                return self._compiled(*args)
        except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
            # nothing has been computed yet
            self._compiled = None
            warn(str(error).strip().partition("\n")[0])
            return self.function(*args)


def by_inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """Compile a graph by Inductor, with products of a single row or column as sums.

    With `coordinate_descent_tuning` Inductor makes them sums by itself. But then it also compiles
    and times some ten variants of every kernel, one after another, when it first runs: minutes for
    five methods."""
    from torch._inductor import compile_fx, decomposition  # an import of seconds

    table, aten = decomposition.select_decomp_table(), torch.ops.aten
    sums = {
        op: functools.partial(function, table[op])
        for op, function in (
            (aten.mm.default, summed),
            (aten.bmm.default, summed),
            (aten.addmm.default, summed_with_bias),
        )
    }
    return compile_fx.compile_fx(
        graph, inputs, config_patches=OPTIONS, decompositions={**table, **sums}
    )


def summed(otherwise: Callable[..., Any], a: Tensor, b: Tensor, *others: Any) -> Any:
    """Multiply matrices a [..., M, K] and b [..., K, N] on a GPU by a sum if M or N is 1. Inductor
    fuses the norm before it and the activation after it into a sum, but not into a product."""
    return sum_of_products(a, b) if is_single(a, b) else otherwise(a, b, *others)


def summed_with_bias(
    otherwise: Callable[..., Any], bias: Tensor, a: Tensor, b: Tensor, *others: Any, **scales: Any
) -> Any:
    """Return bias + a b; see `summed`."""
    if others or scales or not is_single(a, b):
        return otherwise(bias, a, b, *others, **scales)
    return bias + sum_of_products(a, b)


def is_single(a: Tensor, b: Tensor) -> bool:
    """Return whether a product of matrices on a GPU has a single row or column."""
    return a.device.type != "cpu" and 1 in (a.shape[-2], b.shape[-1])


def sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices a [..., M, K] and b [..., K, N] by a sum, in float32 or wider."""
    wide = torch.promote_types(a.dtype, torch.float32)
    products = a.unsqueeze(-1).to(wide) * b.unsqueeze(-3).to(wide)
    return products.sum(-2).to(a.dtype)


@functools.cache
def warn(reason: str) -> None:
    """Warn, once for a reason, that parts of a step could not be compiled."""
    logger.warning(
        "decoding runs operators, which take about twice as long as compiled kernels, because "
        "parts of its step could not be compiled (%s); install the triton that belongs to your "
        "torch, or set compile=false",
        reason,
    )


class CompiledStack(Stack):
    """`Stack` whose layers are compiled once for all of them."""

    def __init__(
        self,
        layer: Callable[..., Any],
        layers: Sequence[TransformerLayer],
        last: Sequence[nn.Module],
        first: Sequence[nn.Module] = (),
    ):
        super().__init__(layers, last, first)
        self._layer = layer

    def read(self, x: Tensor, rotary: RotaryCache, positions: Tensor, columns: Columns) -> Tensor:
        # a policy's layer, which has ends, is compiled with what is around it
        if columns.real is not None or columns.ends is not None or columns.writes_only:
            return Stack.read(self, x, rotary, positions, columns)
        if (mask := columns.mask()) is None:  # on a CPU
            return Stack.read(self, x, rotary, positions, columns)
        x, (first, cos, sin) = self.before(x), rotary.rotations
        for layer, kv in zip(self.layers, columns.kv, strict=True):
            x = self._layer(layer, x, cos, sin, positions, kv, columns.index, mask, first)
        return self.after(x)


def masked_layer(
    layer: TransformerLayer,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    index: Tensor,
    mask: Tensor,
    first: int,
) -> Tensor:
    """Run one layer: x [N, D] -> [N, D]. Its keys and values are written to kv [rows × columns,
    2, H, D/H] at index [N].

    cos, sin: table [P, 3, 1, D/H] of the rotary positions from `first` on, read at positions [N];
    mask: additive [rows, 1, new, last].
    """
    angles = positions - first
    cos, sin = cos.index_select(0, angles), sin.index_select(0, angles)
    qkv = queries_keys_values(layer, x)
    # apart, or Inductor would store what is rotated and copy it to the cache
    kv.index_put_((index,), rotate(qkv[:, 1:], cos[:, 1:], sin[:, 1:]))
    queries = rotate(qkv[:, 0], cos[:, 0], sin[:, 0])
    rows, _, new, last = mask.shape
    queries = queries.unflatten(0, (rows, new)).transpose(1, 2)
    y = F.scaled_dot_product_attention(queries, *window(kv, rows, last), attn_mask=mask)
    return finish(layer, x, y.transpose(1, 2).flatten(2).flatten(0, 1))


class CompiledBackend(Backend):
    """Operations compiled by Inductor."""

    compiled = True

    def __init__(self) -> None:
        self._parts: dict[Callable[..., Any], CompiledPart] = {}

    def part(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if function not in self._parts:
            self._parts[function] = CompiledPart(function)
        return self._parts[function]

    def stack(
        self,
        layers: Sequence[TransformerLayer],
        last: Sequence[nn.Module],
        first: Sequence[nn.Module] = (),
    ) -> Stack:
        return CompiledStack(self.part(masked_layer), layers, last, first)
