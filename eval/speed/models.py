"""Models of the benchmark: checkpoints, or random weights in the papers' shapes, because times do
not depend on the weights."""

from typing import Any

import torch

from dcar.methods import Models
from dcar.model.car import CARConfig, CARDecoder
from dcar.model.draft import AnyDecoder, build_draft
from dcar.model.precision import cast_decoder, chosen_dtype, matched_policy
from dcar.model.statistics import VerifierStatistics
from eval.verifiers.mtp_viterbi import count_bigrams
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig
from heads.policy import (
    CandidatePolicy,
    CandidatePolicyConfig,
    ChunkPolicy,
    HiddenPolicy,
    HiddenPolicyConfig,
)

SHAPE = (
    *("text_vocab_size", "speech_vocab_size", "hidden_size", "num_layers"),
    *("num_attention_heads", "ffn_size"),
)
SIZES: dict[str, tuple[int, ...]] = {
    "tiny": (128, 64, 64, 2, 2, 128),
    "starter": (64, 1024, 192, 8, 4, 704),  # launch/recipes/car_starter.yaml
    "paper": (),
}
"""Shapes of random models (`SHAPE`); the defaults of CARConfig are the paper's."""


def random_models(size: str, heads: str, device: str, dtype: str) -> Models:
    """Return a decoder of random weights with its policies. With shared heads it has sixteen and a
    policy that decides after the draw, as the shipped models; otherwise seven, and policies that
    decide before it."""
    torch.manual_seed(0)
    number = 16 if heads == "shared" else 7
    shape: Any = dict(zip(SHAPE, SIZES[size], strict=False))
    config = CARConfig(**shape, bos=True, heads=heads, num_prediction_heads=number)
    random = CARDecoder(config).eval()
    group_codes(random)
    decoder = cast_decoder(random, chosen_dtype(dtype, device)).to(device)
    models = Models(decoder)
    models.policies = random_policies(decoder, after_draw=heads == "shared")
    return models


def group_codes(decoder: CARDecoder, size: int = 64) -> None:
    """Make the embeddings of every `size` codes similar: PCG has groups about as large as those of
    a trained decoder (of the shipped one's 1,024 codes, at most 44), while no two random ones are
    similar."""
    table = decoder.speech_embedding.weight.detach()[: decoder.config.speech_vocab_size]
    table.mul_(0.5).add_(table[::size].repeat_interleave(size, 0)[: len(table)].clone())


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
        config = CandidatePolicyConfig(width, most, chunk_scorer=scorer.config)
        policies = {"after the draw": CandidatePolicy(config)}
    else:
        heads = {"num_attention_heads": model.config.num_attention_heads}
        narrow = HiddenPolicyConfig(width, most, width=min(256, width // 2), **heads)
        full = HiddenPolicyConfig(width, most, width=None, **heads)
        policies = {"bottleneck": HiddenPolicy(narrow), "full": HiddenPolicy(full)}
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
