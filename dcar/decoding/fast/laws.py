"""Laws of the next tokens, and what is drawn from them, in few calls where the kernels for the CPU take them.

The mathematics is that of dcar/sampling.py and heads/candidates.py, which do it elsewhere: on a GPU, for samplings that
the kernels do not know, and where a row has no law, so that one place says so.
"""

from __future__ import annotations

from torch import Tensor

from dcar.decoding.fast.cpu import laws as native
from dcar.decoding.fast.cpu.native import Kernels, kernels
from dcar.sampling import SamplingConfig, sample_several, warp
from heads.candidates import candidate_features


def law_of(logits: Tensor, config: SamplingConfig, forbidden: Tensor | None, eos: int,
           history: Tensor | None = None) -> Tensor:
    """As `dcar.sampling.warp`."""
    own, law = kernels_of(logits, config), None
    if own is not None:
        law = native.laws(own, logits, config, forbidden, eos)
    return warp(logits, config, forbidden, eos, history) if law is None else law


def draws_of(logits: Tensor, u: Tensor, config: SamplingConfig, forbidden: Tensor | None,
             eos: int) -> tuple[Tensor, Tensor | None]:
    """Tokens [..., N] drawn from the warped laws of logits [..., V] at numbers u [..., N], as `sample_several` draws
    them; and these laws, where somebody should look whether they are any."""
    own, tokens = kernels_of(logits, config), None
    if own is not None:
        tokens = native.draws(own, logits, u, config, forbidden, eos)
    if tokens is not None:
        return tokens, None
    law = warp(logits, config, forbidden, eos)
    return sample_several(law, u), law


def features_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """As `heads.candidates.candidate_features`; in C of several draws, logits [B, n, V], tokens [B, N, n] ->
    [B, N, n, 3]."""
    own, seen = kernels_of(logits), None
    if own is not None and tokens.dim() == logits.dim() == 3:
        seen = native.features(own, logits, tokens)
    return candidate_features(logits, tokens) if seen is None else seen


def kernels_of(logits: Tensor, config: SamplingConfig | None = None) -> Kernels | None:
    """What computes with numbers of this type and place in C, of laws with this sampling, where it does."""
    if logits.device.type != "cpu" or config is not None and not native.takes(config, logits.shape[-1]):
        return None
    return kernels(logits.dtype)
