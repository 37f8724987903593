"""Defaults of `dcar speak`, `Speaker.load` and `dcar demo`. Of the shipped models, eight tokens a pass at temperature
0.4 make about as many word errors on the development sentences as five or six, in less time (docs/history.md)."""

from __future__ import annotations

from dcar.sampling import SamplingConfig

METHOD = "car-8"
"""Where the decoder has fewer heads: all of them."""
SAMPLING = SamplingConfig(temperature=0.4, top_k=10, max_tokens_per_text_unit=10)
"""At most ten tokens a phoneme, as the models were compared: they find no end of a text of one short word."""
POLICY = "starter-t0.4"
"""The shipped policy that was trained at this temperature."""
NUM_CANDIDATES = 4
"""Chunks that are drawn side by side for a policy that can choose among them."""
DIALS = (-2.0, 2.0)
"""Range of the dial, in nats a token; what was measured lies well within."""


def method_for(policy: str, dial: float, num_candidates: int, num_heads: int) -> str:
    """The method where none is given: dcar with a policy of the user's, a dial or a number of candidates."""
    if policy != POLICY or dial or num_candidates:
        return "dcar"
    return f"car-{min(int(METHOD.removeprefix('car-')), num_heads)}"
