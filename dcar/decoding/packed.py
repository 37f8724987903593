"""One copy of the weights instead of two: the engine's layout takes the place of the checkpoint's, in the model.

An engine on the CPU multiplies by weights in a layout of its own (dcar/decoding/fused.py), beside the model's, which
prompts are read with: twice the memory. A process that only decodes calls `pack_weights` first; then model and engine
hold the same tensors, and the reference loop multiplies by them too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dcar.errors import ConfigError
from dcar.model import CARDecoder

PACK_FROM = 1 << 19
"""Weights of so many elements are packed for oneDNN on the CPU. Measured on one AVX-512 thread (ms, rows 1 / 3 / 7):
1024 × 4096 plain 1.2 / 2.2 / 3.3, packed 1.2 / 2.0 / 1.6; 192 × 768 plain .037 / .026 / .042, transposed .038 / .026 /
.028, packed .056 / .039 / .045. In bfloat16 (AMX) packed is never slower: 4096 × 1024 plain .75 / .97 / .98, packed
.41 / .45 / .93; 768 × 192 plain .040 / .048 / .051, packed .029 at all three."""

PLAIN_ROWS = 3
"""So few float32 rows are multiplied by the plain weight, where it is still there (4096 × 1024, 1 to 4 rows: plain
1.10 / 1.13 / 1.23 / 2.14 ms, packed 1.26 / 1.36 / 1.47 / 1.42)."""


def packs(weight: Tensor) -> bool:
    """Whether a weight is worth packing for oneDNN: on the CPU, if it is large, or of any size in bfloat16."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 and weight.numel() >= PACK_FROM


def packed_multiply(packed: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x [..., in] -> [..., out] with a weight from `torch.ops.mkldnn._reorder_linear_weight`."""
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


class PackedLinear(nn.Module):
    """A linear layer that holds its weight once, packed for oneDNN. For decoding: it has no gradient.

    `state_dict`, and so checksums and checkpoints, hold the plain weight as before.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
        self.multiply = packed_multiply(self.packed, self.bias)
        self.training = False

    @property
    def weight(self) -> Tensor:
        """The plain weight [out, in]: a copy."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    def train(self, mode: bool = True) -> PackedLinear:
        if mode:
            raise ConfigError("packed weights are for decoding and cannot be trained; load the model again")
        return super().train(mode)

    def __deepcopy__(self, memo: dict) -> PackedLinear:
        return self  # nothing here ever changes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        probe = torch.empty(0, dtype=self.packed.dtype)
        if (moved := fn(probe)).dtype != probe.dtype or moved.device != probe.device:
            raise ConfigError(f"packed weights stay in {probe.dtype} on the CPU and cannot go to {moved.dtype} on "
                              f"{moved.device}; load the model again, move it, then pack")
        return self

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)


def pack_weights(model: CARDecoder) -> None:
    """Store the Transformer layers' weights in the layout that decoding on the CPU uses, in place of their own.

    One weight is converted at a time, so the peak is that of the model and one weight. Weights that `packs` says become
    `PackedLinear`, other float32 ones are stored [in, out]; elsewhere than on the CPU nothing happens, for nothing is
    copied there. Tokens may differ where two draws lie within rounding.
    ConfigError for a model in training mode.
    """
    if model.training:
        raise ConfigError("weights are packed for decoding; call model.eval() first")
    for layer in model.layers:
        for name, linear in list(layer.named_children()):
            if not isinstance(linear, nn.Linear) or linear.weight.device.type != "cpu":
                continue
            if packs(linear.weight):
                setattr(layer, name, PackedLinear(linear))
            elif linear.weight.dtype == torch.float32:
                linear.weight.data = linear.weight.data.t().contiguous().t()
