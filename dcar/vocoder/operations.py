"""The vocoder on one utterance between its matrix products and Fourier transforms: in PyTorch, and
in C for a CPU (dcar/decoding/cpu/vocoder.c), where each operation passes over the memory once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dcar.decoding.cpu.native import LANES, kernels
from dcar.vocoder.acoustic import VocoderConfig
from dcar.vocoder.renderer import pulse_train


@dataclass(frozen=True)
class Convolution:
    """A depth-wise convolution without padding, and the layer norm after it."""

    taps: Tensor  # [count, C]
    bias: Tensor  # [C]
    dilation: int
    epsilon: float
    dtype: torch.dtype  # of the result


class Operations:
    """The operations in PyTorch."""

    def convolve(self, x: Tensor, conv: Convolution, weight: Tensor, shift: Tensor) -> Tensor:
        """Return the normalised convolution [n, C] of x [n + (count - 1) dilation, C]; weight and
        shift [C] are those of the norm."""
        n = len(x) - (len(conv.taps) - 1) * conv.dilation
        h = torch.addcmul(conv.bias, x[:n], conv.taps[0])
        # takes half the time of torch's depth-wise convolution
        for i, tap in enumerate(conv.taps[1:], 1):
            h.addcmul_(x[i * conv.dilation : i * conv.dilation + n], tap)
        return F.layer_norm(h, weight.shape, weight, shift, conv.epsilon).to(conv.dtype)

    def add_(self, x: Tensor, update: Tensor) -> None:
        """Add update [n, C] to float32 rows x [n, C]."""
        x += update

    def pulses(
        self, f0: Tensor, place: Tensor, part: slice, rate: int, cycles: float, out: Tensor
    ) -> float:
        """Write samples of a pulse train to out [n], and return the phase after them in cycles;
        see `Renderer.cycles`.

        f0 [F]: of frames, at their centres; place [hop]: of the samples between two centres, 0..1;
        part: samples after the first centre, n; cycles: phase before them.
        """
        hop = len(place)
        line = torch.lerp(f0[:-1, None], f0[1:, None], place).flatten()[part]
        phase = (line.double() / rate).cumsum(0) + cycles
        harmonics = (0.46 * rate / f0).floor().repeat_interleave(hop)[hop // 2 :][part]
        out.copy_(pulse_train(phase, harmonics))
        return float(phase[-1]) % 1.0

    def filtered(self, pulses: Tensor, noise: Tensor, envelope: Tensor, head: Tensor) -> Tensor:
        """Return the sum of filtered spectra of pulses and noise, both [n, bins] complex; see
        `Renderer.forward`. Overwrites its arguments. envelope [n, bins]; head [n, 3 bins]."""
        pulse_gain, phase, noise_gain = head.float().chunk(3, dim=1)
        gain = (envelope + pulse_gain).clamp_(-20.0, 3.0).exp_()
        # torch.polar takes three times as long
        pulses *= torch.complex(gain * phase.cos(), gain * phase.sin())
        torch.view_as_real(noise).mul_((envelope + noise_gain).clamp_(-20.0, 3.0).exp_()[..., None])
        return pulses.add_(noise)

    def overlap_add(self, pieces: Tensor, window: Tensor, wave: Tensor) -> None:
        """Add pieces [n, n_fft], whose first samples are multiplied by window [size], to wave
        [n + size / hop - 1, hop]."""
        n, hop = len(pieces), wave.shape[1]
        windowed = (pieces[:, : len(window)] * window).view(n, -1, hop)
        for i in range(windowed.shape[1]):
            wave[i : i + n] += windowed[:, i]


class NativeOperations(Operations):
    """The operations in C, for float32 on a CPU; some results and updates may be bfloat16."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library

    def convolve(self, x: Tensor, conv: Convolution, weight: Tensor, shift: Tensor) -> Tensor:
        rows, x = len(x) - (len(conv.taps) - 1) * conv.dilation, x.contiguous()
        y = x.new_empty(rows, x.shape[1], dtype=conv.dtype)
        self._library.run_convolution(
            *(t.data_ptr() for t in (x, conv.taps, conv.bias, weight, shift, y)),
            *(rows, x.shape[1], len(conv.taps), conv.dilation, conv.epsilon),
            y.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return y

    def add_(self, x: Tensor, update: Tensor) -> None:
        self._library.run_addition(
            x.data_ptr(), update.data_ptr(), x.numel(), update.dtype == torch.bfloat16
        )

    def pulses(
        self, f0: Tensor, place: Tensor, part: slice, rate: int, cycles: float, out: Tensor
    ) -> float:
        return self._library.run_pulses(
            *(t.data_ptr() for t in (f0, place, out)),
            *(part.start, part.stop, len(place), rate, cycles),
        )

    def filtered(self, pulses: Tensor, noise: Tensor, envelope: Tensor, head: Tensor) -> Tensor:
        self._library.run_filter(
            *(t.data_ptr() for t in (pulses, noise, envelope, head)),
            *pulses.shape,
            head.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return pulses

    def overlap_add(self, pieces: Tensor, window: Tensor, wave: Tensor) -> None:
        self._library.run_overlap_add(
            *(t.data_ptr() for t in (pieces, window, wave)),
            *(*pieces.shape, len(window), wave.shape[1]),
        )


def operations(config: VocoderConfig) -> Operations:
    """Return the operations in C if there is a compiler, for supported widths, else those in
    PyTorch."""
    sizes = config.acoustic_size, config.renderer_size
    fits = config.n_fft >= 2 * LANES and not any(s % LANES for s in sizes)
    library = kernels() if fits else None
    return Operations() if library is None else NativeOperations(library)
