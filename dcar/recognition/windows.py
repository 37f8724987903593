"""The network of the two recognisers trained here: residual layers over dilated windows of three frames, as in WaveNet
and Conv-TasNet, with CTC's symbols as output. Utterances of a batch do not influence each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from heads.checkpoint import Checkpoint


class WindowLayer(nn.Module):
    """x + W₂ gelu(W₁ [y(t − d), y(t), y(t + d)]) with y = LayerNorm(x), and 0 outside of the utterance."""

    def __init__(self, size: int, dilation: int):
        super().__init__()
        self.dilation = dilation
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(3 * size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """x [B, T, D]; real [B, T, 1], whether a position is inside its utterance."""
        d, steps = self.dilation, x.shape[1]
        y = functional.pad(self.norm(x) * real, (0, 0, d, d))
        window = torch.cat([y[:, shift : shift + steps] for shift in (0, d, 2 * d)], -1)
        return x + self.down(functional.gelu(self.up(window), approximate="tanh"))


class WindowCTC(Checkpoint):
    """Frames → log-probabilities of CTC's symbols; subclasses make the frames' vectors."""

    def __init__(self, size: int, dilations: Sequence[int], symbols: int):
        super().__init__()
        self.layers = nn.ModuleList(WindowLayer(size, d) for d in dilations)
        self.norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, symbols)

    def vectors(self, frames: Tensor) -> Tensor:
        """Vectors [B, T, size] of the frames [B, T, …] that this model reads."""
        raise NotImplementedError

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Log-probabilities [B, T, symbols] float32 (0: none) of frames [B, T, …]. What stands behind a row's
        length [B] is garbage."""
        return self.frames(frames, lengths)

    def frames(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """`forward`, in the type of the weights even where Accelerate wraps that in an autocast."""
        x = self.vectors(frames)
        real = (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[..., None]
        for layer in self.layers:
            x = layer(x, real)
        return self.output(self.norm(x)).float().log_softmax(-1)
