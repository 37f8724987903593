"""Ways to speak that must agree: the loop, fast passes in the loop, and the static engine; policies for them."""

import os

import pytest
import torch
from dcar.decoding.engine.run import engine_for
from dcar.decoding.fast.passes import fast
from tiny_decoders import policy_of as policy_of

from dcar.decoding import DecodeResult, decode
from dcar.sampling import SamplingConfig

# of the compiler: for this processor, and for one without AVX-512
FLAGS = [(), ("-mno-avx512f",)] if os.uname().machine == "x86_64" else [()]
SAMPLING = SamplingConfig(max_tokens=60, max_tokens_per_text_unit=6)


def same(got: list[DecodeResult], expected: list[DecodeResult], hidden: bool = True) -> None:
    """The same utterances, bit for bit but for the rounding of states and probabilities."""
    assert [r.utterance_id for r in got] == [r.utterance_id for r in expected]
    for a, b in zip(got, expected, strict=True):
        for name in ("tokens", "emitted", "actions", "decision_positions", "truncated", "target_passes", "method",
                     "prompt_length", "seed"):
            assert getattr(a, name) == getattr(b, name), name
        if b.action_log_probs and b.action_log_probs[0] is not None:
            assert a.action_log_probs == pytest.approx(b.action_log_probs, abs=1e-5)
        if hidden:
            assert torch.allclose(a.hidden, b.hidden, atol=1e-5)
        if b.candidates is not None:
            assert a.candidates.shape == b.candidates.shape == (len(b.actions), *b.candidates.shape[1:])
            assert torch.allclose(a.candidates, b.candidates, atol=1e-4)


def check_ways(model, prompts, method, sampling: SamplingConfig = SAMPLING, batch: int = 3, chunks: str = "exact",
               **how) -> list[DecodeResult]:
    """Fast passes and the engine, new and used, speak what the loop speaks; returns that."""
    how = {"record_hidden": True, **how}
    expected = decode(model, prompts, method, sampling, **how)
    same(decode(fast(model), prompts, method, sampling, batch_size=batch, **how), expected)
    policy = getattr(method.schedule, "policy", None)
    engine = engine_for(model, prompts, sampling, batch=batch, policy=policy, chunks=chunks)
    for _ in range(2):
        same(engine.decode(prompts, method, sampling, **how), expected)
    return expected
