"""Counts of what a GPU would launch and of what the host would wait for."""

import collections

import torch
from fake_gpu import INDEXES, WAITS, tensors_of
from torch.utils._python_dispatch import TorchDispatchMode

NO_KERNELS = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty"}


class Kernels(TorchDispatchMode):
    """Counts kernels (views and empty tensors have none) by operation, and reads by the host. An
    operation on lists is one kernel, unless it pairs tensors of different shapes: then one a pair.
    """

    def __init__(self):
        super().__init__()
        self.ops: collections.Counter[str] = collections.Counter()
        self.reads: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        packet = func.overloadpacket
        masks = packet in INDEXES and any(t.dtype == torch.bool for t in tensors_of(args[1]))
        if packet in WAITS or masks or (name == "_to_copy" and "device" in (kwargs or {})):
            self.reads[name] += 1
        if not func.is_view and name not in NO_KERNELS:
            self.ops[name] += pairs(args) if "_foreach" in name else 1
        return func(*args, **(kwargs or {}))

    @property
    def kernels(self) -> int:
        return self.ops.total()


def pairs(args) -> int:
    """Return the kernels of an operation on these lists of tensors."""
    first, *others = [
        a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], torch.Tensor)
    ]
    mixed = any(x.shape != y.shape for more in others for x, y in zip(first, more, strict=True))
    return len(first) if mixed else 1
