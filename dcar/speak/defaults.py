"""Defaults of `dcar speak`, `Speaker.load` and `dcar demo`. At temperature 0.4 the policy makes
fewer word errors on development sentences than fixed chunks that take as long (docs/history.md)."""

from __future__ import annotations

from dcar.sampling import SamplingConfig

FIXED_SIZE = 8
"""Tokens a pass of a decoder without a policy; of one with fewer heads: all of them."""
SAMPLING = SamplingConfig(temperature=0.4, top_k=10, max_tokens_per_text_unit=10)
"""At most ten tokens a phoneme, as the models were compared: they find no end of a text of one
short word."""
POLICY = "starter-t0.4"
"""The shipped policy that was trained at this temperature."""
NUM_CANDIDATES = 4
"""Chunks that are drawn side by side for a policy that can choose among them."""
DIALS = (-2.0, 2.0)
"""Range of the dial, in nats a token; what was measured lies well within."""


def fixed_method(num_heads: int) -> str:
    """The method of a decoder without a policy."""
    return f"car-{min(FIXED_SIZE, num_heads)}"
