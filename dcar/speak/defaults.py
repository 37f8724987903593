"""Defaults of `dcar speak` and `Speaker.load`. At temperature 0.4 the policy makes
fewer word errors on development sentences than fixed chunks that take as long (docs/history.md)."""

from dcar.sampling import SamplingConfig

FIXED_SIZE = 8
"""Tokens per pass of a decoder without a policy; a decoder with fewer heads keeps all of them."""
SAMPLING = SamplingConfig(temperature=0.4, top_k=10, max_tokens_per_text_unit=10)
"""Sampling with at most ten tokens per phoneme, as in the comparison of the models: they do not
end a text of one short word by themselves."""
POLICY = "starter-t0.4"
"""Shipped policy that was trained at this temperature."""
NUM_CANDIDATES = 4
"""Number of candidates for a policy that can choose among them."""
DIALS = (-2.0, 2.0)
"""Range of the dial, in nats per token; the measured values are well within it."""


def fixed_method(num_heads: int) -> str:
    """Return the method of a decoder without a policy."""
    return f"car-{min(FIXED_SIZE, num_heads)}"
