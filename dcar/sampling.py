"""Sampling of a token from logits: one warp and one source of randomness for every decoder.

`warp` turns logits into the distribution that is sampled from; every "lossless" claim in this
project is relative to it. `sample` draws from it at a given number. `uniform` computes that number
from an address (seed, utterance, stream, position, draw): batch size, order and the number of
processes never change a result, and two methods that draw the same token of the same utterance use
the same number.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcar.config import check, setting
from dcar.errors import ConfigError
from dcar.repetition import nucleus, repetition_aware
from dcar.ties import MaskOfLargest, largest

STREAMS = {
    "token": 1,
    "accept": 2,
    "residual": 3,
    "group": 4,
    "policy": 5,
    "tau": 6,
    "chunk": 7,
    "shuffle": 8,
}


@dataclass(frozen=True)
class SamplingConfig:
    """Settings of the draw of the next token, and limits of an utterance."""

    temperature: float = setting(
        1.0,
        "Temperature of the softmax: above 1 flattens the distribution, below 1 sharpens it; 0 = "
        "the most likely token.",
        minimum=0,
    )
    top_k: int = setting(0, "Number of most likely tokens to draw from; 0 = all.", minimum=0)
    top_p: float = setting(
        1.0,
        "Probability mass to draw from: the fewest tokens that hold it; 1 = all.",
        above=0,
        maximum=1,
    )
    min_tokens: int = setting(1, "Minimum number of speech tokens of an utterance.", minimum=0)
    max_tokens: int = setting(1500, "Maximum number of speech tokens of an utterance.", minimum=1)
    # as in VALL-E implementations: phonemes rarely last 0.3 s
    max_tokens_per_text_unit: float = setting(
        16.0, "Maximum number of speech tokens per phoneme (or other unit of text).", above=0
    )
    # Repetition-aware sampling (VALL-E 2; CosyVoice: 10, 0.1, with top_p 0.8 and top_k 25): a token
    # drawn from the nucleus that makes up repetition_share of the last repetition_window tokens is
    # drawn again from the whole distribution.
    repetition_window: int = setting(
        0, "Window of repetition-aware sampling, in tokens (CosyVoice: 10); 0 = off.", minimum=0
    )
    repetition_share: float = setting(
        0.1, "Share of the window at which a token counts as repeated.", above=0, maximum=1
    )
    repetition_mask: bool = setting(
        False, "Whether a repeated token is excluded from the second draw (CosyVoice since 2026)."
    )

    def __post_init__(self):
        check(self)
        if self.repetition_window and self.temperature == 0:
            raise ConfigError(
                "repetition_window: repetition-aware sampling draws twice, but temperature=0 does "
                "not draw: set repetition_window=0 or a temperature above 0"
            )


MEMBER_ADDRESS = re.compile(r".*#[0-9]+", re.DOTALL)


def member_address(utterance_id: str, member: int = 0) -> str:
    """Return the address of a member of an utterance's group: `utterance#g`, for member 0 the id
    alone.

    If the id itself ends like a member's address ("x#1"), member 0 gets its number too ("x#1#0"),
    so that addresses are unique.
    """
    return (
        f"{utterance_id}#{member}"
        if member or MEMBER_ADDRESS.fullmatch(utterance_id)
        else utterance_id
    )


def utterance_keys(
    seed: int, utterance_ids: Sequence[str], members: Sequence[int] | None = None
) -> Tensor:
    """Return a 64-bit key per utterance (or member of its group) and seed, int64 [B];
    independent of Python's hash seed."""
    numbers = [0] * len(utterance_ids) if members is None else members
    names = [
        member_address(name, member) for name, member in zip(utterance_ids, numbers, strict=True)
    ]
    keys = [hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest() for name in names]
    return torch.tensor([int.from_bytes(k, "little", signed=True) for k in keys], dtype=torch.int64)


def group_keys(
    seed: int,
    utterance_ids: Sequence[str],
    members: Sequence[int],
    common_random_numbers: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return keys of rows, each a member of its utterance's group: for draws of tokens [B], and for
    all others [B].

    Member 0 draws as the utterance itself, the others by addresses of their own (`member_address`).
    With common_random_numbers the members draw tokens with common random numbers and differ only by
    their decisions.
    """
    keys = utterance_keys(seed, utterance_ids, members)
    return (utterance_keys(seed, utterance_ids) if common_random_numbers else keys), keys


SPLITMIX64_INCREMENT = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed integer


def splitmix64_steps(count: int | Tensor) -> int | Tensor:
    """Return count * SPLITMIX64_INCREMENT modulo 2^64, signed; tensors wrap by themselves."""
    if isinstance(count, Tensor):
        return count * SPLITMIX64_INCREMENT
    return (count * SPLITMIX64_INCREMENT + 2**63) % 2**64 - 2**63


def logical_shift(x: Tensor, bits: int) -> Tensor:
    """Shift signed 64-bit integers to the right as if they were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64_mix(x: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 (Steele et al. 2014); int64 arithmetic wraps as
    intended."""
    x = (x ^ logical_shift(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed integer
    x = (x ^ logical_shift(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ logical_shift(x, 31)


BELOW_ONE = 1 - 2.0**-40
"""Largest uniform number: u times a sum is less than the sum, whatever the rounding."""


def uniform(keys: Tensor, stream: str, position: Tensor, draw: int | Tensor = 0) -> Tensor:
    """Return uniform numbers in [0, 1), float64, as a pure function of their address.

    keys: [B] from `utterance_keys`; position: [B, …]; the result has the shape of position.
    """
    keys = keys.view(-1, *[1] * (position.dim() - 1))
    state = splitmix64_mix(keys + splitmix64_steps(STREAMS[stream]))
    state = splitmix64_mix(state + splitmix64_steps(position + 1))
    state = splitmix64_mix(state + splitmix64_steps(draw + 1))
    return (logical_shift(state, 11).to(torch.float64) * 2.0**-53).clamp(max=BELOW_ONE)


# a logit that no other comes near, and that no temperature above 1e-8 makes infinite
IMPOSSIBLE = -1e30


def warp(
    logits: Tensor,
    config: SamplingConfig,
    forbidden: Tensor | None = None,
    eos: int | None = None,
    history: Tensor | None = None,
    mask_of: MaskOfLargest = largest,
) -> Tensor:
    """Return the distribution that is sampled from, [..., V] float32, given logits [..., V].

    Order: forbid EOS (where `forbidden` [...] is true) -> temperature -> top-k -> top-p -> softmax.
    Of equal values the lowest ids are kept; likewise, temperature 0 is a one-hot at the argmax. If
    EOS is forbidden and nothing else is possible (all other logits are -inf), all other ids are
    equally likely: an utterance that must not end continues. With a repetition_window the
    distribution depends on the tokens before, `history` [..., repetition_window] (-1 = none; see
    `BatchState.histories`). NaN logits yield NaN; the caller checks. mask_of: see
    `dcar.ties.largest`.
    """
    logits = allowed(logits, forbidden, eos)
    if config.repetition_window:
        if history is None:
            raise ConfigError(
                "repetition_window: repetition-aware sampling needs the tokens before each "
                "position, which this method does not provide: set repetition_window=0, or use "
                "another method"
            )
        return repetition_aware(
            *nuclei(logits, config, mask_of=mask_of),
            history,
            share=config.repetition_share,
            mask=config.repetition_mask,
        )
    if config.temperature == 0:
        top = logits == logits.amax(-1, keepdim=True)
        first = top & (top.cumsum(-1) == 1)
        return first.to(torch.float32)
    if config.temperature != 1:
        logits = logits / config.temperature
    if 0 < config.top_k < logits.shape[-1]:
        logits = torch.where(mask_of(logits, config.top_k, None, 1.0), logits, -torch.inf)
    probs = logits.softmax(-1)
    if config.top_p < 1:
        # the smallest set that reaches top_p: a token stays while the mass before it is short of it
        probs = probs * mask_of(probs, 0, probs, config.top_p)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def nuclei(
    logits: Tensor,
    config: SamplingConfig,
    forbidden: Tensor | None = None,
    eos: int | None = None,
    mask_of: MaskOfLargest = largest,
) -> tuple[Tensor, Tensor]:
    """Return the distributions of `dcar.repetition.nucleus`, with the arguments of `warp`."""
    logits = allowed(logits, forbidden, eos) / config.temperature
    return nucleus(logits, config.top_k, config.top_p, mask_of)


def allowed(logits: Tensor, forbidden: Tensor | None, eos: int | None) -> Tensor:
    """Return logits [..., V] float32, with EOS impossible where it is forbidden [...]."""
    if logits.dtype != torch.float32:
        logits = logits.to(torch.float32)
    if forbidden is None:
        return logits
    banned = forbidden.unsqueeze(-1) & (torch.arange(logits.shape[-1], device=logits.device) == eos)
    return logits.clamp(min=IMPOSSIBLE).masked_fill(banned, -torch.inf)


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Return ids [...], the inverse of the cumulative distribution at u: distribution [..., V],
    u [...]. An id of zero mass is never drawn; if there is no distribution (NaN, or no mass) the
    id is V. u is at most BELOW_ONE."""
    shape = torch.broadcast_shapes(probs.shape[:-1], u.shape)  # searchsorted does not broadcast
    return sample_several(probs.expand(*shape, -1), u.expand(shape).unsqueeze(-1)).squeeze(-1)


def sample_several(probs: Tensor, u: Tensor) -> Tensor:
    """Return ids [..., N], drawn like `sample` at several numbers from every distribution:
    distribution [..., V], u [..., N]."""
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    # ids whose cumulative sum is <= u
    return torch.searchsorted(cumulative, u * cumulative[..., -1:], right=True)


def shifted(u: Tensor, several: int) -> Tensor:
    """Return N = `several` numbers [..., N] for each u [...] in [0, 1), at equal distances
    around the circle. The first is u; each is uniform by itself, and together they are spread,
    so that the chunks drawn at them differ."""
    if several == 1:
        return u.unsqueeze(-1)
    steps = torch.arange(several, device=u.device, dtype=u.dtype) / several
    return ((u.unsqueeze(-1) + steps) % 1).clamp(max=BELOW_ONE)
