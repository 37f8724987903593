"""Synthesis of one utterance, whole or piece by piece as its tokens arrive; nothing is computed
twice.

The mathematics is that of `VocoderNetwork.forward`, which remains the reference; sums may be
rounded in another order. The vocoder is a chain of convolutions, so each keeps the few rows of
input that its next outputs need. Rows are [frames, channels] throughout, which avoids transposing
them.

On a CPU that multiplies bfloat16, the matrix products of the blocks, three quarters of the time,
are computed in it; sums, norms, convolutions and signals stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcar.vocoder.acoustic import MEL_MEAN, MEL_SPREAD, ConvNeXtBlock, absolute_pitch
from dcar.vocoder.network import VocoderNetwork
from dcar.vocoder.renderer import Pitch, pitch_features, pulse_train
from heads.checkpoint import weights_signature

Affine = Callable[[Tensor], Tensor]


def product_type(device: torch.device) -> torch.dtype:
    """Return the data type of the matrix products: bfloat16 if the device is a CPU with
    instructions for it, else float32."""
    fast = (
        device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.cpu._is_avx512_bf16_supported()
    )
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


class _Block:
    """`ConvNeXtBlock` without padding: x [n + 2 pad, C] -> [n, C]."""

    def __init__(self, block: nn.Module, dtype: torch.dtype):
        assert isinstance(block, ConvNeXtBlock)
        conv, scale = block.conv, block.residual_scale.detach()
        self.size = conv.in_channels
        self.pad, self.dilation = int(conv.padding[0]), conv.dilation[0]
        self.taps, self.bias = conv.weight.detach()[:, 0].T.contiguous(), conv.get_parameter("bias")
        self.norm, self.modulation = block.norm, block.modulation
        self.up = _affine(block.up.weight, block.up.bias, dtype, "relu")
        self.down = _affine(block.down.weight * scale[:, None], block.down.bias * scale, dtype)

    def norm_for(self, condition: Tensor | None) -> Affine:
        """Return the norm for a voice: condition [1, condition_size]."""
        weight, bias = self.norm.weight, self.norm.bias
        if self.modulation is not None:
            scale, bias = self.modulation(condition)[0].chunk(2)
            weight = 1 + scale
        return lambda x: F.layer_norm(x, (self.size,), weight, bias, self.norm.eps)

    def __call__(self, x: Tensor, norm: Affine) -> Tensor:
        n = len(x) - 2 * self.pad
        h = torch.addcmul(self.bias, x[:n], self.taps[0])
        # takes half the time of torch's depth-wise convolution
        for i, tap in enumerate(self.taps[1:], 1):
            h.addcmul_(x[i * self.dilation : i * self.dilation + n], tap)
        return x[self.pad : self.pad + n] + self.down(self.up(norm(h)))


class _Weights:
    """Weights of a vocoder, prepared for the matrix products."""

    def __init__(self, vocoder: VocoderNetwork):
        renderer = vocoder.renderer
        dtype = product_type(renderer.window.device)
        self.acoustic = [_Block(block, dtype) for block in vocoder.acoustic.blocks]
        self.renderer = [_Block(block, dtype) for block in renderer.blocks]
        self.head = _affine(renderer.head.weight, renderer.head.bias, dtype)


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

    def __init__(self, blocks: Sequence[_Block], like: Tensor, condition: Tensor | None = None):
        self.blocks = [(block, block.norm_for(condition)) for block in blocks]
        self.held = [like.new_zeros(block.pad, block.size) for block in blocks]

    def __call__(self, x: Tensor, last: bool) -> Tensor:
        for i, (block, norm) in enumerate(self.blocks):
            padding = block.pad if last else 0
            x = torch.cat((self.held[i], x, x.new_zeros(padding, block.size)))
            self.held[i] = x[max(0, len(x) - 2 * block.pad) :]
            if len(x) <= 2 * block.pad:
                return x[:0]
            x = block(x, norm)
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
        """Start an utterance in the voice of speaker [F], its voice features. Raises DataError
        if these are not valid."""
        self.vocoder = vocoder.eval() if vocoder.training else vocoder
        c = vocoder.config
        acoustic, renderer = vocoder.acoustic, vocoder.renderer
        like = renderer.window
        self._speaker = torch.as_tensor(speaker, dtype=torch.float32, device=like.device)[None]
        vocoder.check_speaker(self._speaker, 1)
        weights = _weights(vocoder)
        self._acoustic = _Convolutions(weights.acoustic, like, acoustic.condition(self._speaker))
        self._renderer, self._head = _Convolutions(weights.renderer, like), weights.head
        self._equalizer = vocoder.equalizer(acoustic, self._speaker)
        side = (c.n_fft - c.window) // 2  # the window is zero there
        self._window = like[side : side + c.window]
        # places of a hop's samples between the centres of two frames, 0..1
        self._place = (torch.arange(c.hop, device=like.device) + (1 - c.hop % 2) / 2) / c.hop
        # number of a window's samples before its frame
        self._before = (c.n_fft - c.hop) // 2 - side
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
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=self._speaker.device)
        v.check_ids(ids)
        x = self._acoustic(v.acoustic.embedding(ids), last)
        if not len(x):
            return np.zeros(0, np.float32)
        out = v.acoustic.output(v.acoustic.norm(x)).view(1, -1, bands + 2)
        log_mel = out[0, :, :bands] * MEL_SPREAD + MEL_MEAN + self._equalizer
        pitch = Pitch(absolute_pitch(out[..., -2], self._speaker), (out[..., -1] > 0).float())
        self._excite(pitch.log_f0[0].exp(), last)
        self._log_mel = torch.cat((self._log_mel, log_mel))
        level = (log_mel - MEL_MEAN) / MEL_SPREAD
        new = self._renderer(
            v.renderer.input(torch.cat((level, pitch_features(pitch)[0]), dim=1)), last
        )
        self._rows = torch.cat((self._rows, new))
        n = min(len(self._rows), max(0, (self._signals.shape[1] - config.window) // config.hop + 1))
        if not n:
            return np.zeros(0, np.float32)
        now, self._rows = self._rows[:n], self._rows[n:]
        return self._overlap_add(self._spectra(now), last).clamp(-1.0, 1.0).cpu().numpy()

    def _excite(self, f0: Tensor, last: bool) -> None:
        """Append pulses and noise up to the centre of the newest frame, or to its end with
        `last`; see `Renderer.pulses`."""
        c, renderer = self.vocoder.config, self.vocoder.renderer
        half = c.hop // 2
        start = 0 if self._f0 is not None else c.hop - half
        before = f0[:1] if self._f0 is None else self._f0
        after = f0[-1:] if last else f0[:0]
        f0 = torch.cat((before, f0, after))
        self._f0 = f0[-1:]
        line = torch.lerp(f0[:-1, None], f0[1:, None], self._place).flatten()
        kept = slice(start, len(line) - half if last else len(line))
        cycles = (line[kept].double() / c.sample_rate).cumsum(0) + self._cycles
        harmonics = (0.46 * c.sample_rate / f0).floor().repeat_interleave(c.hop)
        harmonics = harmonics[half : half + len(line)][kept]
        if not len(cycles):
            return
        self._cycles = float(cycles[-1]) % 1.0
        at, n = self._made % len(renderer.noise), len(cycles)
        noise = renderer.noise.repeat(-(-(at + n) // len(renderer.noise)))[at : at + n]
        self._made += n
        padding = c.window if last else 0
        new = F.pad(torch.stack((pulse_train(cycles, harmonics), noise)), (0, padding))
        self._signals = torch.cat((self._signals, new), dim=1)

    def _spectra(self, x: Tensor) -> Tensor:
        """Return the spectra [n, bins] of the next frames from the renderer's rows [n, C]; see
        `Renderer.forward`."""
        c, renderer, n = self.vocoder.config, self.vocoder.renderer, len(x)
        envelope = self._log_mel[:n] @ renderer.interpolation
        pulse_gain, phase, noise_gain = self._head(renderer.norm(x)).float().chunk(3, dim=1)
        # The offset of a window within the transform does not matter: the inverse transform
        # restores it.
        missing = (0, c.n_fft - c.window)
        windows = F.pad(self._signals, missing).unfold(1, c.n_fft, c.hop)[:, :n]
        pulses, noise = torch.fft.rfft(windows * F.pad(self._window, missing))
        self._signals, self._log_mel = self._signals[:, n * c.hop :], self._log_mel[n:]
        gain = (envelope + pulse_gain).clamp_(-20.0, 3.0).exp_()
        # torch.polar takes three times as long
        pulses *= torch.complex(gain * phase.cos(), gain * phase.sin())
        torch.view_as_real(noise).mul_((envelope + noise_gain).clamp_(-20.0, 3.0).exp_()[..., None])
        return pulses.add_(noise)

    def _overlap_add(self, spectra: Tensor, last: bool) -> Tensor:
        """Return the samples to which no later frame adds; see `same_istft`."""
        c, n = self.vocoder.config, len(spectra)
        scaled = self._window * (c.hop / self._window.square().sum())
        pieces = (torch.fft.irfft(spectra, c.n_fft)[:, : c.window] * scaled).view(n, -1, c.hop)
        wave = torch.cat((self._overlap, pieces.new_zeros(n, c.hop)))
        for i in range(pieces.shape[1]):
            wave[i : i + n] += pieces[:, i]
        self._overlap = wave[n:]
        skip = min(self._skip, n * c.hop)
        self._skip -= skip
        end = n * c.hop + self._before if last else n * c.hop
        return wave.flatten()[skip:end]
