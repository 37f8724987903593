"""How speech is made where nothing else is said: by `dcar speak`, by `Speaker.load`, and at first on the page of `dcar
demo`. This is the only place. Of what ships, five tokens a pass at temperature 0.4 make the fewest word errors
(docs/results.md)."""

from __future__ import annotations

from dcar.sampling import SamplingConfig

METHOD = "car-5"
SAMPLING = SamplingConfig(temperature=0.4, top_k=10)
POLICY = "starter-t0.4"
"""Of what ships the policy that was trained at this temperature."""
NUM_CANDIDATES = 4
"""Chunks that are drawn side by side for a policy that can choose among them."""
DIALS = (-2.0, 2.0)
"""How far a policy may be turned, in nats a token; what was measured lies well within."""


def method_for(policy: str, dial: float, num_candidates: int = 0) -> str:
    """The method where none is named: who gives a policy of their own, turns one, or has it choose, means it to
    decide."""
    return "dcar" if policy != POLICY or dial or num_candidates else METHOD
