"""Models of the benchmark: checkpoints, or random weights in the papers' shapes, because times do
not depend on the weights."""

from __future__ import annotations

from typing import Any

import torch

from dcar.model.car import CARConfig, CARDecoder
from dcar.model.draft import AnyDecoder, build_draft
from dcar.model.precision import cast_decoder, chosen_dtype, matched_policy
from eval.methods.registry import Models
from eval.verifiers.mtp_viterbi import count_bigrams
from eval.verifiers.statistics import VerifierStatistics
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig
from heads.policy import (
    CandidatePolicy,
    CandidatePolicyConfig,
    ChunkPolicy,
    HiddenPolicy,
    HiddenPolicyConfig,
    shape_of,
)

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "text_vocab_size": 128,
        "speech_vocab_size": 64,
        "hidden_size": 64,
        "num_layers": 2,
        "num_attention_heads": 2,
        "ffn_size": 128,
        "head_blocks": 2,
    },
    "starter": {  # launch/recipes/car_starter.yaml
        "text_vocab_size": 64,
        "speech_vocab_size": 1024,
        "hidden_size": 192,
        "num_layers": 8,
        "num_attention_heads": 4,
        "ffn_size": 704,
    },
    "paper": {},
}
"""Shapes of random models; the defaults of CARConfig are the paper's."""


def random_models(size: str, heads: str, device: str, dtype: str, draft: bool = True) -> Models:
    """Return a decoder of random weights with its policies and, if asked for, a draft model. With
    shared heads it has sixteen and a policy that decides after the draw, as the shipped models;
    otherwise seven, and policies that decide before it."""
    torch.manual_seed(0)
    number = 16 if heads == "shared" else 7
    config = CARConfig(**SIZES[size], bos=True, heads=heads, num_prediction_heads=number)
    decoder = cast_decoder(CARDecoder(config).eval(), chosen_dtype(dtype, device)).to(device)
    models = Models(decoder)
    models.policies = random_policies(decoder, after_draw=heads == "shared")
    if draft:
        models.draft = random_draft(decoder)
    return models


def random_draft(decoder: AnyDecoder) -> AnyDecoder:
    """Return an untrained draft model made of a decoder's own layers, in its precision."""
    return cast_decoder(build_draft(decoder).eval(), decoder.norm.weight.dtype)


def random_policies(model: AnyDecoder, after_draw: bool = False) -> dict[str, ChunkPolicy]:
    """Return untrained policies that choose among all sizes with equal probability: a bottleneck
    of 256 (half the width of a small model) and the paper's full width; or one that decides after
    the draw, in the shape of launch/recipes/dcpo_starter.yaml."""
    width, most = model.config.hidden_size, model.config.num_prediction_heads
    policies: dict[str, ChunkPolicy]
    if after_draw:
        scorer = ChunkScorer(ChunkScorerConfig(width, most, model.config.output_size))
        config = CandidatePolicyConfig(width, most, **shape_of(scorer))
        policies = {"after the draw": CandidatePolicy(config)}
    else:
        heads = model.config.num_attention_heads
        policies = {
            name: HiddenPolicy(
                HiddenPolicyConfig(width, most, width=own, num_attention_heads=heads)
            )
            for name, own in {"bottleneck": min(256, width // 2), "full": None}.items()
        }
    device = model.norm.weight.device
    return {n: matched_policy(p.eval().to(device), model) for n, p in policies.items()}


def made_up_statistics(model: AnyDecoder) -> VerifierStatistics:
    """Return invented statistics for timing methods that need some: every lower rank is half as
    likely."""
    codes, depths = model.config.speech_vocab_size, model.config.num_prediction_heads - 1
    keys, counts = count_bigrams([[(7 * i) % codes for i in range(4 * codes)]], codes)
    return VerifierStatistics(
        model.checksum(),
        model.config.tokenizer,
        codes + 2,
        (0.5 ** torch.arange(1, 11)).repeat(depths, 1),
        keys,
        counts,
        torch.tensor([0.0, 1.0]),
        torch.tensor([1.0, 2.0]),
    )
