"""Verifying methods, drafters and statistics for `tiny_decoder`, and distributions to compare
them with."""

from collections import Counter
from collections.abc import Callable

import torch
from scipy import stats
from tiny_decoders import states

from dcar.decoding import DecodeResult, FixedChunk, Prompt, decode
from dcar.model.car import CARDecoder
from dcar.model.draft import DraftDecoder, build_draft
from dcar.model.statistics import VerifierStatistics
from dcar.sampling import SamplingConfig, warp
from eval.verifiers.chain import ChainVerifier
from eval.verifiers.pcg import GroupVerifier, TokenGroups, build_groups
from eval.verifiers.sd import SpeculativeDecoding
from eval.verifiers.ssd import TolerantDecoding
from eval.verifiers.topk_verify import TopKVerify
from eval.verifiers.typical import TypicalAcceptance

# a statistical test fails for correct code with this probability; the seeds are fixed
FALSE_ALARM = 1e-6


def imperfect_draft(target: CARDecoder, noise: float = 0.4) -> DraftDecoder:
    """Return a draft model with both layers of a tiny target: the target itself, with noise on
    its output head."""
    draft = build_draft(target).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        draft.heads.base.weight += (
            noise * draft.heads.base.weight.std() * torch.randn_like(draft.heads.base.weight)
        )
    return draft


def rule_of(kind: str, drafter, groups: TokenGroups) -> ChainVerifier:
    """Return a verifier by a short name; `groups` are those of PCG."""
    return {
        "sd": lambda: SpeculativeDecoding(drafter=drafter),
        "ssd": lambda: TolerantDecoding(0.4, drafter=drafter),
        "ssd-0": lambda: TolerantDecoding(0.0, drafter=drafter),
        "ssd-eos": lambda: TolerantDecoding(0.4, eos=True, drafter=drafter),
        "pcg": lambda: GroupVerifier(0.1, groups, drafter=drafter),
        "typical": lambda: TypicalAcceptance(drafter=drafter),
        "topk": lambda: TopKVerify(2, drafter=drafter),
    }[kind]()


def method_of(kind: str, target: CARDecoder, drafter, theta: float = 0.1) -> ChainVerifier:
    """Return a verifier by a short name, with the groups of a decoder's codes."""
    codes = target.speech_embedding.weight[: target.config.speech_vocab_size]
    return rule_of(kind, drafter, build_groups(codes, theta))


def tiny_statistics(**changes) -> VerifierStatistics:
    """Return statistics of a decoder of twelve codes and four heads."""
    settings = dict(
        decoder="a" * 64,
        tokenizer="t",
        states=14,
        rank_accuracy=torch.full((3, 4), 0.2),
        bigram_keys=torch.tensor([1, 16]),
        bigram_counts=torch.tensor([2, 1]),
        entropy_thresholds=torch.tensor([0.0, 1.0, 2.0, 3.0]),
        entropy_lengths=torch.tensor([1.0, 2.0, 1.9, 4.0]),
    )
    return VerifierStatistics(**{**settings, **changes})


def plain(
    target: CARDecoder, prompts: list[Prompt], sampling: SamplingConfig, **options
) -> list[DecodeResult]:
    """Decode token by token."""
    return decode(target, prompts, FixedChunk(1), sampling, **options)


def sequence_distribution(
    target: CARDecoder,
    prompt: Prompt,
    sampling: SamplingConfig,
    length: int,
    change: Callable = lambda probs, prompt, tokens: probs,
) -> dict[tuple, float]:
    """Return the probabilities of all token sequences of next-token decoding, by enumeration; EOS
    is the last element.

    change(probs [V + 1], prompt, tokens so far) may replace the distribution of a position.
    """
    eos, probs = target.config.eos, {}

    def walk(tokens: tuple, probability: float) -> None:
        if len(tokens) == length or eos in tokens:
            probs[tokens] = probability
            return
        window = [-1] * sampling.repetition_window + list(tokens)
        history = (
            torch.tensor([window[-sampling.repetition_window :]])
            if sampling.repetition_window
            else None
        )
        logits = target.heads.logits(states(target, prompt, tokens)[-1:], 1)[:, -1]
        step = warp(
            logits, sampling, torch.tensor([len(tokens) < sampling.min_tokens]), eos, history
        )[0].double()
        for token, p in enumerate(change(step, prompt, tokens).tolist()):
            if p:
                walk((*tokens, token), probability * p)

    with torch.no_grad():
        walk((), 1.0)
    return probs


def goodness(results: list[DecodeResult], probs: dict[tuple, float], eos: int) -> float:
    """Return the p-value of the drawn sequences under the distribution; rare ones are counted
    together, impossible ones give 0."""
    drawn = Counter(tuple(r.tokens) + (() if r.truncated else (eos,)) for r in results)
    if set(drawn) - set(probs):
        return 0.0
    often = [s for s, p in probs.items() if p * len(results) >= 10]
    observed = [drawn[s] for s in often]
    expected = [probs[s] * len(results) for s in often]
    rest = len(results) - sum(expected)
    if rest > 1e-6 * len(results):
        observed.append(len(results) - sum(observed))
        expected.append(rest)
    scale = len(results) / sum(expected)
    return stats.chisquare(observed, [e * scale for e in expected]).pvalue
