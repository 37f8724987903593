"""Memory for keys and values that several engines of a decoder use in turn."""

import math
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor


class CacheStorage:
    """Memory for the keys and values of caches of one decoder that are never in use at the same
    time: each begins at its beginning.

    If a cache needs more than there is, the memory is replaced, and every one of `users` is asked
    to `release` its cache before.
    """

    def __init__(self) -> None:
        self.users: WeakSet[Any] = WeakSet()
        self._layers: list[Tensor] = []  # flat

    def tensors(
        self, device: torch.device, dtype: torch.dtype, layers: int, shape: tuple[int, ...]
    ) -> list[Tensor]:
        """Return a tensor of this shape for each layer."""
        size = math.prod(shape)
        if not self._layers or len(self._layers[0]) < size:
            self._layers = []
            for user in self.users:
                user.release()
            self._layers = [torch.zeros(size, device=device, dtype=dtype) for _ in range(layers)]
        return [layer[:size].view(shape) for layer in self._layers]
