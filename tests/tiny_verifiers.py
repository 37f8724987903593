"""Verifying methods and drafts for `tiny_decoder`."""

from __future__ import annotations

import torch

from dcar.model.car import CARDecoder
from dcar.model.draft import DraftDecoder, build_draft
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
