"""Verifying methods and drafts for `tiny_decoder`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from dcar.decoding import DecodeResult, Method, decode
from dcar.model.car import CARDecoder
from dcar.model.draft import DraftDecoder, build_draft
from dcar.sampling import SamplingConfig
from eval.verifiers.chain import ChainVerifier
from eval.verifiers.groups import build_groups
from eval.verifiers.pcg import GroupVerifier
from eval.verifiers.sd import SpeculativeDecoding
from eval.verifiers.ssd import TolerantDecoding
from eval.verifiers.topk_verify import TopKVerify
from eval.verifiers.typical import TypicalAcceptance


def imperfect_draft(target: CARDecoder, noise: float = 0.4) -> DraftDecoder:
    """A draft of both layers of a tiny target: the target itself but for noise on its output head."""
    draft = build_draft(target).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        draft.heads.base.weight += noise * draft.heads.base.weight.std() * torch.randn_like(draft.heads.base.weight)
    return draft


def method_of(kind: str, target: CARDecoder, drafter, theta: float = 0.1) -> ChainVerifier:
    codes = target.config.speech_vocab_size
    return {
        "sd": lambda: SpeculativeDecoding("sd", drafter), "ssd": lambda: TolerantDecoding("ssd-0.4", drafter, 0.4),
        "pcg": lambda: GroupVerifier("pcg", drafter, build_groups(target.speech_embedding.weight[:codes], theta)),
        "typical": lambda: TypicalAcceptance("typical", drafter), "topk": lambda: TopKVerify("topk", drafter, 4),
    }[kind]()


def check_batching(decoder: CARDecoder, prompts, make: Callable[[], Method], sampling: SamplingConfig,
                   facts: Callable[[DecodeResult], Any]) -> list[DecodeResult]:
    """Batches of another size and in another order say the same; returns the results of one batch of all."""
    results = decode(decoder, prompts, make(), sampling, seed=4, batch_size=8)
    for batch_size in (1, 3, 8):
        shuffled = random.Random(batch_size).sample(prompts, len(prompts))
        got = decode(decoder, shuffled, make(), sampling, seed=4, batch_size=batch_size)
        assert {r.utterance_id: facts(r) for r in got} == {r.utterance_id: facts(r) for r in results}
    return results
