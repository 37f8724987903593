"""The chunk scorer in a decoding step: on the CPU a GRU over at most K tokens in one call of C (coherence.c).

The mathematics is that of heads/coherence.py, which stays the reference. Where the kernels do not take its weights, the
module itself is asked.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from dcar.decoding.fast.cpu.native import Kernels, LinearPart, kernels
from heads.coherence import Coherence

LANES = 16
"""Widths that are a multiple of it fill the vectors of every processor."""


class _Coherence(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in ("token", "seen", "offset")),
                *((name, LinearPart) for name in ("context", "input", "hidden", "inner")),
                ("output", ctypes.c_void_p), ("output_bias", ctypes.c_float),
                *((name, ctypes.c_long) for name in ("ids", "features", "width"))]


class NativeCoherence:
    """`Coherence.forward` without the calls of some 250 operators; it holds the weights, copied where they are folded
    or lie in panels."""

    def __init__(self, own: Kernels, coherence: Coherence):
        """As `native_coherence` has checked it."""
        config = coherence.config
        with torch.no_grad():
            # What stands before SiLU is a sum over the parts, and that of a token is always the same.
            embedding, seen = coherence.token.weight.tensor_split((config.embedding_size,), 1)
            token = torch.addmm(coherence.token.bias, coherence.embedding.weight, embedding.T)
            state, start, inner = coherence.state, coherence.start, coherence.inner
            of_input, of_state, input_bias, state_bias = coherence.layer.all_weights[0]
            context = torch.cat((state.weight, start.weight)), torch.cat((state.bias, start.bias))
            products = [own.linear(weight.detach(), bias.detach()) for weight, bias in (
                context, (of_input, input_bias), (of_state, state_bias), (inner.weight, inner.bias))]
            tables = [token, seen.T.contiguous(), coherence.offset.detach()]
            output = coherence.output.weight.detach()
            self._held = *products, *tables, output
            self._part = _Coherence(*(t.data_ptr() for t in tables), *(p.part() for p in products), output.data_ptr(),
                                    float(coherence.output.bias), len(token), seen.shape[1], config.width)
        self._sizes, self._run = (config.num_heads, config.hidden_size, seen.shape[1]), own.run_coherence

    def __call__(self, hidden: Tensor, tokens: Tensor, candidates: Tensor) -> Tensor:
        """As `Coherence.forward`; float32. IndexError for a token that is no id."""
        rows, n = tokens.shape
        most, size, features = self._sizes
        if n > most or hidden.shape != (rows, size) or candidates.shape != (rows, n, features):
            raise ValueError(f"hidden states {tuple(hidden.shape)} and candidates {tuple(candidates.shape)} do not fit "
                             f"{rows} chunks of {n} tokens, of at most {most}")
        hidden, tokens, candidates = hidden.float().contiguous(), tokens.contiguous(), candidates.float().contiguous()
        added = hidden.new_empty(rows, n)
        failed = self._run(ctypes.addressof(self._part), hidden.data_ptr(), tokens.data_ptr(), candidates.data_ptr(),
                           added.data_ptr(), rows, n, torch.get_num_threads())
        if failed == 1:
            raise RuntimeError(f"could not allocate memory for the coherence of {rows} chunks")
        if failed:
            raise IndexError(f"a token outside the {self._part.ids} ids of this coherence")
        return added


def native_coherence(own: Kernels, coherence: Coherence) -> NativeCoherence | None:
    """This coherence; None where its weights are of another type or lie otherwise, its width does not fill vectors, or
    a layer is not as heads/coherence.py makes it."""
    linear = (coherence.token, coherence.state, coherence.start, coherence.inner, coherence.output)
    plain = type(coherence.layer) is nn.GRU and all(type(layer) is nn.Linear for layer in linear)
    if not plain or coherence.config.width % LANES:
        return None
    if not all(own.reads(weight) for weight in coherence.parameters()):
        return None
    return NativeCoherence(own, coherence)


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
