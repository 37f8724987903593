"""The coherence of drawn chunks in a decoding step.

The mathematics is that of heads/coherence.py, which stays the reference.
"""

from __future__ import annotations

from torch import Tensor

from dcar.decoding.fast.cpu.coherence import native_coherence
from dcar.decoding.fast.cpu.native import kernels
from heads.coherence import Coherence


class FusedCoherence:
    """A coherence for a few chunks on the CPU: hidden [B, D], tokens [B, n], candidates [B, n, 3] -> [B, n], float32.

    It reads the present weights and copies some, so it is made anew where they change. Elsewhere than on the CPU, and
    where the kernels do not take it (other types than float32, odd widths), it is the module itself.
    """

    def __init__(self, coherence: Coherence):
        weight = coherence.inner.weight
        found = kernels(weight.dtype) if weight.device.type == "cpu" else None
        self.own = None if found is None else native_coherence(found, coherence)
        self.source = coherence

    def __call__(self, hidden: Tensor, tokens: Tensor, candidates: Tensor) -> Tensor:
        """As `Coherence.forward`."""
        return (self.source if self.own is None else self.own)(hidden, tokens, candidates)
