"""Comparison of `decode` with the oracle: the same tokens and records, in every precision and
with every kernel."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Rule, Spoken, speak
from tiny_decoders import tiny_decoder

from dcar.decoding import Prompt, decode
from dcar.model.car import CARDecoder
from dcar.sampling import SamplingConfig

RECORDS = tuple(
    (
        "tokens truncated passes draft_passes emitted sizes decision_positions chosen "
        "proposed accepted prompt_length"
    ).split()
)
ROUNDING = {"float64": 1e-6, "float32": 1e-5}
"""Tolerance of probabilities and states; even in float64, distributions are passed on in
float32."""

PROMPTS = [
    Prompt("a", (1, 2, 3, 4, 5, 6), ()),
    Prompt("b", (4, 5, 6, 7), (1, 2, 3, 4)),
    Prompt("c#2", (7, 8, 9, 1, 2, 3, 4, 5), (5, 6)),
]
"""Prompts of different lengths; the id of the last one looks like that of a member of a group."""

SAMPLINGS = {
    "plain": SamplingConfig(max_tokens=13, max_tokens_per_text_unit=1.9),
    "short": SamplingConfig(max_tokens_per_text_unit=0.7),
    "greedy": SamplingConfig(temperature=0, max_tokens=11, min_tokens=0),
    "top-k": SamplingConfig(
        temperature=0.8, top_k=5, min_tokens=8, max_tokens=14, max_tokens_per_text_unit=2.6
    ),
    "top-p": SamplingConfig(top_p=0.8, min_tokens=6, max_tokens=13),
}
REPETITION = {
    "repetition": SamplingConfig(
        temperature=0.9,
        top_p=0.9,
        top_k=3,
        max_tokens=13,
        repetition_window=4,
        repetition_share=0.3,
    ),
    "repetition, masked": SamplingConfig(
        top_p=0.9,
        min_tokens=5,
        max_tokens=11,
        repetition_window=3,
        repetition_share=0.3,
        repetition_mask=True,
    ),
}
HOW: list[dict[str, Any]] = [
    dict(batch_size=2),
    dict(batch_size=32, group_size=2),
    dict(batch_size=2, group_size=3, common_random_numbers=True),
]
"""Small and large batches of different rows, and groups that share a prefill."""

Case = Callable[[Callable[[Any], Any]], tuple[Any, Any, Rule]]
"""Function that receives how to read a module, and returns a decoder, a method and the oracle's
rule."""


def target(end: float = -1.5) -> CARDecoder:
    """Return a decoder whose heads have much in common, so that some drafts of the additional
    heads are right. end: logit of the end of speech that they have in common."""
    model = tiny_decoder()
    with torch.no_grad():
        row, common = model.heads.base.weight[12], model.norm.bias.normal_(std=0.6)
        common += row * (end - common @ row) / (row @ row)
        model.heads.projection.copy_(model.heads.base.weight.expand(3, -1, -1))
    return model


def readers(module: Any) -> dict[str, Any]:
    """Return a decoder, draft, policy or chunk scorer in float64, which plain PyTorch computes, and
    in float32, which the kernels of this processor compute."""
    return {"float64": copy.deepcopy(module).double(), "float32": module}


def hold(
    case: Case, samplings: dict[str, SamplingConfig], ways: list[dict[str, Any]] = HOW
) -> list[Spoken]:
    """Decode with every sampling and reader, in small and large batches, the first sampling in all
    `ways`; return what the oracle generated.

    Raises AssertionError for a record that differs. An utterance with a decision that rounding may
    change is left out.
    """
    exact, _, rule = case(lambda module: readers(module)["float64"])
    built = {way: case(lambda module, way=way: readers(module)[way])[:2] for way in ROUNDING}
    prompts = [p for p in PROMPTS if p.prompt_ids or exact.config.bos]
    decoded: list[Spoken] = []
    for seed, (name, sampling) in enumerate(samplings.items()):
        for how in [dict(batch_size=2 if seed % 2 else 32)] if seed else ways:
            size, share = how.get("group_size", 1), how.get("common_random_numbers", False)
            expected = [
                speak(exact, prompt, rule, sampling, seed, member, share)
                for prompt in prompts
                for member in range(size)
            ]
            for way, (model, method) in built.items():
                results = decode(
                    model,
                    prompts,
                    method,
                    sampling,
                    seed=seed,
                    record_hidden=method.tree is None,
                    **how,
                )
                for result, wanted in zip(results, expected, strict=True):
                    if wanted.margin > ROUNDING[way]:
                        check(
                            result,
                            wanted,
                            ROUNDING[way],
                            f"{result.utterance_id}, {result.method}, {way}, {name}",
                        )
            decoded += expected
    certain = [utterance for utterance in decoded if utterance.margin > max(ROUNDING.values())]
    assert len(certain) > 0.8 * len(decoded)
    return decoded


def check(result: Any, wanted: Any, rounding: float, where: str = "") -> None:
    """Raise AssertionError if a result differs from that of the oracle, or from another result."""
    for name in RECORDS:
        assert getattr(result, name) == getattr(wanted, name), f"{where}: {name}"
    for name in ("hidden", "features"):
        got, exact = getattr(result, name), getattr(wanted, name)
        assert (got is None) == (exact is None) or result.method.startswith("vadusa"), (
            f"{where}: {name}"
        )
        if got is not None:
            torch.testing.assert_close(
                got.double().cpu(),
                exact.double(),
                rtol=rounding,
                atol=rounding,
                msg=lambda text, name=name: f"{where}: {name}: {text}",
            )
    assert result.log_probs == pytest.approx(wanted.log_probs, abs=10 * rounding), where
