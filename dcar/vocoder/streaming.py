"""Synthesis of one utterance on a CPU, whole or piece by piece as its tokens arrive; nothing is
computed twice.

The mathematics is that of `VocoderNetwork.forward`, which remains the reference; sums may be
rounded in another order. The vocoder is a chain of convolutions, so each keeps the few rows of
input that its next outputs need. Rows are [frames, channels] throughout, which avoids transposing
them.

On a CPU that multiplies bfloat16, the matrix products of the blocks are computed in it; sums,
norms, convolutions and signals stay float32. What lies between matrix products and Fourier
transforms is in dcar/vocoder/operations.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcar.vocoder.acoustic import MEL_MEAN, MEL_SPREAD, ConvNeXtBlock, absolute_pitch
from dcar.vocoder.network import VocoderNetwork
from dcar.vocoder.operations import Convolution, Operations, operations
from dcar.vocoder.renderer import Pitch, pitch_features
from heads.checkpoint import weights_signature

FRAMES = 64
"""Number of frames whose spectra are computed together, so that they stay in the caches."""
ROWS = 32
"""Rows of bfloat16 products are a multiple of it, because oneDNN compiles and keeps a kernel for
every number of rows: an utterance of a new length would take 1.6 times as long."""

Affine = Callable[[Tensor], Tensor]


def product_type() -> torch.dtype:
    """Return the data type of the matrix products: bfloat16 if the CPU has instructions for it,
    else float32."""
    fast = torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def _affine(weight: Tensor, bias: Tensor, dtype: torch.dtype, then: str = "none") -> Affine:
    """Return the function x [N, in] -> [N, out], in float32 or, with weights packed once for
    oneDNN, in bfloat16. then: "none" or "relu"."""
    weight, bias = weight.detach().to(dtype), bias.detach().to(dtype)
    if dtype == torch.float32 and then == "relu":
        return lambda x: F.linear(x, weight, bias).relu_()
    if dtype == torch.float32:
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x.to(dtype), packed, bias, then, [], "")


def _in_blocks(x: Tensor) -> Tensor:
    """Return rows x [n, C] for a bfloat16 product, followed by zeros up to a multiple of `ROWS`."""
    return F.pad(x, (0, 0, 0, -len(x) % ROWS)) if x.dtype == torch.bfloat16 else x


class _Block:
    """`ConvNeXtBlock` without padding: x [n + 2 pad, C] -> [n, C], in the memory of x."""

    def __init__(self, block: nn.Module, operations: Operations, dtype: torch.dtype):
        assert isinstance(block, ConvNeXtBlock)
        conv, scale = block.conv, block.residual_scale.detach()
        self.size, self.pad, self.operations = conv.in_channels, int(conv.padding[0]), operations
        taps, bias = conv.weight.detach()[:, 0].T.contiguous(), conv.get_parameter("bias").detach()
        self.conv = Convolution(taps, bias, conv.dilation[0], block.norm.eps, dtype)
        self.norm = block.norm.weight, block.norm.bias  # none if it depends on a voice
        self.up = _affine(block.up.weight, block.up.bias, dtype, "relu")
        self.down = _affine(block.down.weight * scale[:, None], block.down.bias * scale, dtype)

    def __call__(self, x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        h = self.operations.convolve(x, self.conv, weight, shift)
        x = x[self.pad : self.pad + len(h)]
        self.operations.add_(x, self.down(self.up(_in_blocks(h)))[: len(h)])
        return x


class _Weights:
    """Weights of a vocoder, prepared for the matrix products, and its other operations."""

    def __init__(self, vocoder: VocoderNetwork):
        c, renderer, acoustic = vocoder.config, vocoder.renderer, vocoder.acoustic
        dtype = product_type()
        self.operations = operations(c)
        self.acoustic, self.renderer = (
            [_Block(block, self.operations, dtype) for block in network.blocks]
            for network in (acoustic, renderer)
        )
        self.head = _affine(renderer.head.weight, renderer.head.bias, dtype)
        self.dtype = dtype
        modulations = [cast(nn.Linear, block.modulation) for block in acoustic.blocks]
        self._modulation = torch.cat([layer.weight for layer in modulations]).detach()
        self._shift = torch.cat([layer.bias for layer in modulations]).detach()
        side = (c.n_fft - c.window) // 2  # the window is zero there
        self.window = renderer.window[side : side + c.window].clone()
        self.scaled_window = self.window * (c.hop / self.window.square().sum())
        # places of a hop's samples between the centres of two frames, 0..1
        self.place = (torch.arange(c.hop) + (1 - c.hop % 2) / 2) / c.hop

    def norms(self, condition: Tensor) -> Tensor:
        """Return weight and shift of the acoustic model's norms [blocks, 2, C] for a voice:
        condition [1, condition_size]."""
        norms = F.linear(condition, self._modulation, self._shift)[0]
        norms = norms.view(len(self.acoustic), 2, -1)
        norms[:, 0] += 1
        return norms


_ready: WeakKeyDictionary[VocoderNetwork, tuple[Hashable, _Weights]] = WeakKeyDictionary()


def _weights(vocoder: VocoderNetwork) -> _Weights:
    """Return the prepared weights; compute them once, and again when the vocoder has been
    trained or moved."""
    signature = weights_signature(vocoder)
    if vocoder not in _ready or _ready[vocoder][0] != signature:
        _ready[vocoder] = signature, _Weights(vocoder)
    return _ready[vocoder][1]


class _Convolutions:
    """Chain of blocks that receives its input piece by piece; the output lags by the chain's
    reach, until the last piece."""

    def __init__(self, blocks: Sequence[_Block], norms: Iterable[Sequence[Tensor]], like: Tensor):
        """norms: weight and shift [C] of each block's norm."""
        self.blocks = list(zip(blocks, norms, strict=True))
        self.held = [like.new_zeros(block.pad, block.size) for block in blocks]

    def __call__(self, x: Tensor, last: bool) -> Tensor:
        for i, (block, norm) in enumerate(self.blocks):
            padding = block.pad if last else 0
            x = torch.cat((self.held[i], x, x.new_zeros(padding, block.size)))
            self.held[i] = x[max(0, len(x) - 2 * block.pad) :].clone()
            if len(x) <= 2 * block.pad:
                return x[:0]
            x = block(x, *norm)
        return x


def reach(vocoder: VocoderNetwork) -> int:
    """Return the number of tokens that must be known after a token before its sound is final."""
    c = vocoder.config
    half = (c.kernel_size - 1) // 2
    frames = half * sum(c.renderer_dilations) + c.window // c.hop // 2
    return half * sum(c.acoustic_dilations) + -(-frames // c.frames_per_token)


class StreamingVocoder:
    """Stream of one utterance: tokens in, pieces of waveform out."""

    @torch.inference_mode()
    def __init__(self, vocoder: VocoderNetwork, speaker: np.ndarray | Tensor):
        """Start an utterance; see `TokenVocoder.stream`."""
        self.vocoder = vocoder
        c = vocoder.config
        acoustic, renderer = vocoder.acoustic, vocoder.renderer
        like = renderer.window
        self._speaker = torch.as_tensor(speaker, dtype=torch.float32)[None]
        vocoder.check_speaker(self._speaker, 1)
        weights = _weights(vocoder)
        norms = weights.norms(acoustic.condition(self._speaker))
        self._acoustic = _Convolutions(weights.acoustic, norms, like)
        fixed = [block.norm for block in weights.renderer]
        self._renderer, self._weights = _Convolutions(weights.renderer, fixed, like), weights
        self._equalizer = vocoder.equalizer(acoustic, self._speaker) / MEL_SPREAD
        # number of a window's samples before its frame
        self._before = (c.n_fft - c.hop) // 2 - (c.n_fft - c.window) // 2
        self._f0: Tensor | None = None  # F0 of the newest frame
        self._cycles, self._made = 0.0, 0  # phase of the pulses, and number of samples, so far
        self._signals = like.new_zeros(2, self._before)  # pulses and noise for further windows
        # the renderer's rows, for windows that are not complete yet
        self._rows = like.new_zeros(0, c.renderer_size)
        self._log_mel = like.new_zeros(0, c.mel_bands)  # log-mel of the same frames
        self._overlap = like.new_zeros(c.window // c.hop - 1, c.hop)
        self._skip = self._before  # samples to drop before the first of the wave

    @torch.inference_mode()
    def push(self, tokens: Sequence[int], last: bool = False) -> np.ndarray:
        """Return the samples [n] that are final now, or all with `last`. Raises DataError for
        ids outside the vocabulary."""
        v, config = self.vocoder, self.vocoder.config
        bands = config.mel_bands
        ids = torch.as_tensor(tokens, dtype=torch.int64)
        v.check_ids(ids)
        x = self._acoustic(v.acoustic.embedding(ids), last)
        if not len(x):
            return np.zeros(0, np.float32)
        out = v.acoustic.output(v.acoustic.norm(x)).view(1, -1, bands + 2)
        level = out[0, :, :bands] + self._equalizer
        pitch = Pitch(absolute_pitch(out[..., -2], self._speaker), (out[..., -1] > 0).float())
        self._excite(pitch.log_f0[0].exp(), last)
        self._log_mel = torch.cat((self._log_mel, level * MEL_SPREAD + MEL_MEAN))
        new = self._renderer(
            v.renderer.input(torch.cat((level, pitch_features(pitch)[0]), dim=1)), last
        )
        self._rows = torch.cat((self._rows, new))
        n = min(len(self._rows), max(0, (self._signals.shape[1] - config.window) // config.hop + 1))
        if not n:
            return np.zeros(0, np.float32)
        now, self._rows = self._rows[:n], self._rows[n:]
        return self._render(now, last).clamp_(-1.0, 1.0).cpu().numpy()

    def _excite(self, f0: Tensor, last: bool) -> None:
        """Append pulses and noise up to the centre of the newest frame, or to its end with
        `last`; see `Renderer.cycles`."""
        c, renderer = self.vocoder.config, self.vocoder.renderer
        half = c.hop // 2
        start = 0 if self._f0 is not None else c.hop - half
        before = f0[:1] if self._f0 is None else self._f0
        after = f0[-1:] if last else f0[:0]
        f0 = torch.cat((before, f0, after))
        self._f0 = f0[-1:]
        part = slice(start, (len(f0) - 1) * c.hop - (half if last else 0))
        n, padding = part.stop - part.start, c.window if last else 0
        if n <= 0:
            return
        weights, held = self._weights, self._signals.shape[1]
        signals = self._signals.new_empty(2, held + n + padding)
        signals[:, :held] = self._signals
        signals[:, held + n :] = 0
        new = signals[:, held : held + n]
        self._cycles = weights.operations.pulses(
            f0, weights.place, part, c.sample_rate, self._cycles, new[0]
        )
        at = self._made % len(renderer.noise)
        times = -(-(at + n) // len(renderer.noise))
        noise = renderer.noise if times == 1 else renderer.noise.repeat(times)
        new[1] = noise[at : at + n]
        self._made += n
        self._signals = signals

    def _render(self, x: Tensor, last: bool) -> Tensor:
        """Return the samples to which no later frame adds, from the renderer's rows [n, C] of the
        next frames; see `Renderer.forward` and `same_istft`."""
        c, weights, n = self.vocoder.config, self._weights, len(x)
        envelope = self._log_mel[:n] @ self.vocoder.renderer.interpolation
        head = weights.head(_in_blocks(self.vocoder.renderer.norm(x).to(weights.dtype)))
        signals = self._signals.unfold(1, c.window, c.hop)[:, :n]
        self._signals, self._log_mel = self._signals[:, n * c.hop :], self._log_mel[n:]
        wave = torch.cat((self._overlap, self._overlap.new_zeros(n, c.hop)))
        # The offset of a window within the transform does not matter: the inverse transform
        # restores it.
        windows = x.new_zeros(2, min(n, FRAMES), c.n_fft)
        for start in range(0, n, FRAMES):
            part = slice(start, min(start + FRAMES, n))
            new = windows[:, : part.stop - start]
            torch.mul(signals[:, part], weights.window, out=new[..., : c.window])
            pulses, noise = torch.fft.rfft(new)
            spectra = weights.operations.filtered(pulses, noise, envelope[part], head[part])
            pieces = torch.fft.irfft(spectra, c.n_fft)
            weights.operations.overlap_add(pieces, weights.scaled_window, wave[start:])
        self._overlap = wave[n:].clone()
        skip = min(self._skip, n * c.hop)
        self._skip -= skip
        end = n * c.hop + self._before if last else n * c.hop
        return wave.flatten()[skip:end]
