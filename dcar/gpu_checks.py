"""Comparisons of the parts for GPUs with plain operators, each run in a process of its own by
`dcar.first_use`:

    python -m dcar.gpu_checks decoding cuda:0 kernels,compilation,graphs < case.json

It ends with status 0 if they agree, else with a line that says what differs. The models are made
for it: random weights, the widths of the model that is to be used, two layers.
"""

import itertools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dcar import first_use
from dcar.decoding import DecodeResult, Engine, FixedChunk, Method, PolicyChunk, Prompt
from dcar.decoding.readers import TEXT_UNITS, reader_of
from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder
from dcar.model.car import CARConfig, CARDecoder
from dcar.model.draft import AnyDecoder
from dcar.model.precision import cast_decoder
from dcar.optim.scaled_adam import ScaledAdam
from dcar.sampling import SamplingConfig
from dcar.vocoder.acoustic import VocoderConfig
from dcar.vocoder.captured import CapturedSynthesis
from dcar.vocoder.model import TokenVocoder
from heads.chunk_scorer import ChunkScorerConfig
from heads.policy import (
    CandidatePolicy,
    CandidatePolicyConfig,
    ChunkPolicy,
    HiddenPolicy,
    HiddenPolicyConfig,
)

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 10, "top_p": 0.9},
    {"top_k": 25, "top_p": 0.8, "repetition_window": 10},
)
TOKENS = 40  # of an utterance, at most
ROUNDING = 3.0  # times the error of operators in the same type, which other kernels may make
CLOSE = 1e-3  # of float32 results that are sums in another order


class Differs(Exception):
    """Parts do not compute what operators compute."""


def made_decoder(case: Mapping[str, Any]) -> AnyDecoder:
    """Return a decoder of these shapes with random weights, in float32."""
    torch.manual_seed(0)
    config = _settings(case)
    if case["language"]:
        return BackboneDecoder(BackboneConfig(**config)).eval()
    return CARDecoder(CARConfig(**config)).eval()


def _settings(case: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in case["config"].items()}


def check_decoding(case: Mapping[str, Any], device: torch.device) -> None:
    """Compare tokens in float32: one row and several, which end and begin at different steps, by
    three kinds of sampling and by policies; and hidden states in the decoder's own type."""
    torch.set_float32_matmul_precision("highest")
    decoder = made_decoder(case).to(device)
    codes, heads = decoder.config.speech_vocab_size, decoder.config.num_prediction_heads
    graphs = "graphs" in first_use.under_test if first_use.under_test is not None else None
    prompts = [
        Prompt(
            f"prompt-{i}",
            tuple((7 * i + j) % TEXT_UNITS for j in range(units)),
            tuple((5 * i + 11 * j) % codes for j in range(past)),
        )
        for i, (units, past) in enumerate([(3, 4), (11, 9), (23, 2), (6, 17)])
    ]
    fixed = FixedChunk(min(3, heads))
    cases: list[tuple[Method, dict[str, Any], int]] = [
        (fixed, settings, rows) for settings in SAMPLINGS for rows in (1, 3)
    ]
    cases += [(policy, {}, 3) for policy in made_policies(decoder)]
    for method, settings, rows in cases:
        # a low temperature: random weights give flat distributions, of which rounding draws others
        sampling = SamplingConfig(
            temperature=0.2, max_tokens=TOKENS, max_tokens_per_text_unit=2, **settings
        )
        expected, got = (
            Engine(reader, method, sampling, rows, graphs=captures).decode(prompts, seed=1)
            for reader, captures in (
                (reader_of(decoder, compile=False), False),
                (reader_of(decoder, compile=True), graphs),
            )
        )
        for a, b in zip(expected, got, strict=True):
            if a.tokens != b.tokens:
                how = ", ".join([method.name, f"rows {rows}", *map(str, settings.items())])
                raise Differs(f"other tokens in float32 ({how})")
    if case["dtype"] != "float32":
        check_rounding(decoder, getattr(torch, case["dtype"]), prompts, graphs)


@torch.no_grad()
def made_policies(decoder: AnyDecoder) -> list[PolicyChunk]:
    """Return policies of both kinds with random weights; none for a decoder with one head."""
    config, device = decoder.config, decoder.speech_embedding.weight.device
    hidden, heads = config.hidden_size, config.num_prediction_heads
    if heads == 1:
        return []
    scorer = ChunkScorerConfig(hidden, heads, config.speech_vocab_size + 1)
    policies: list[ChunkPolicy] = [
        HiddenPolicy(HiddenPolicyConfig(hidden, heads, width=64, num_attention_heads=2)),
        CandidatePolicy(CandidatePolicyConfig(hidden, heads, chunk_scorer=scorer)),
    ]
    for policy in policies:  # untrained ones are uniform, so that rounding would decide
        for parameter in policy.parameters():
            parameter.normal_(std=0.2)
        policy.eval().to(device)
    before, after = policies
    return [PolicyChunk(before), PolicyChunk(after, num_candidates=2)]


def check_rounding(
    decoder: AnyDecoder, dtype: torch.dtype, prompts: list[Prompt], graphs: bool | None
) -> None:
    """Compare the hidden states of a decoder in its own type with those in float32, up to the
    first token that rounding has changed: parts may be off by ROUNDING times as much as
    operators."""
    sampling = SamplingConfig(temperature=0.2, max_tokens=TOKENS, max_tokens_per_text_unit=2)

    def decoded(compile: bool, captures: bool | None) -> list[DecodeResult]:
        method = FixedChunk(min(3, decoder.config.num_prediction_heads))
        reader = reader_of(decoder, compile)
        engine = Engine(reader, method, sampling, 3, record_hidden=True, graphs=captures)
        return engine.decode(prompts, seed=2)

    exact = decoded(False, False)
    decoder = cast_decoder(decoder, dtype)
    usual, parts = decoded(False, False), decoded(True, graphs)
    errors = []
    for prompt, *results in zip(prompts, exact, usual, parts, strict=True):
        alike = itertools.takewhile(
            lambda tokens: len(set(tokens)) == 1, zip(*(r.tokens for r in results), strict=False)
        )
        states = [r.hidden.float() for r in results if r.hidden is not None]
        # positions that all have consumed; one whose speech has ended has not read its last tokens
        length = min(len(prompt.prompt_ids) + len(list(alike)), *map(len, states))
        states = [of[:length] for of in states]
        # the host reads here: a check is outside of any step
        errors.append([(of - states[0]).abs().max().item() for of in (*states[1:], 2 * states[0])])
    operators, error, largest = torch.tensor(errors).amax(0).tolist()
    if not error <= ROUNDING * operators + CLOSE * largest:  # also for NaN
        raise Differs(
            f"hidden states in {dtype} are off by {error:.3g}, operators by {operators:.3g}"
        )


def check_vocoder(case: Mapping[str, Any], device: torch.device) -> None:
    """Compare captured synthesis with the same operations: a batch of several lengths, and again
    with other tokens."""
    torch.manual_seed(0)
    vocoder = TokenVocoder(VocoderConfig(**_settings(case))).to(device).eval()
    config = vocoder.config
    speaker = torch.randn(3, config.speaker_dim)
    captured = CapturedSynthesis(vocoder)
    plain = CapturedSynthesis(vocoder, graphs=False)
    with torch.inference_mode():
        gains = vocoder.equalizer(vocoder.acoustic, speaker.to(device))
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(config.vocab_size, (3, 30), generator=generator)
            lengths = torch.tensor([30, 12, 21])
            numbers = torch.stack((lengths, *[torch.zeros_like(lengths)] * 3), 1)
            (a, _), (b, _) = (
                synthesis(vocoder, tokens, numbers, speaker, gains)
                for synthesis in (plain, captured)
            )
            for row, length in enumerate(lengths.tolist()):
                end = length * config.samples_per_token
                error = (a[row, :end] - b[row, :end]).abs().max()
                if not error <= CLOSE:
                    raise Differs(f"the waveform is off by {error:.3g}")


def check_optimizer(_case: Mapping[str, Any], device: torch.device) -> None:
    """Compare fifteen steps, one of them with a gradient that is not finite."""
    torch.manual_seed(0)
    shapes = [(1,), (7,), (33, 65), (129, 1030), (4, 3, 5)]
    weights = [torch.randn(shape, device=device) for shape in shapes]
    mine, theirs = ([torch.nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    optimizers = ScaledAdam(mine), ScaledAdam(theirs)
    for step in range(15):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn_like(a)
            if step == 7:
                a.grad.view(-1)[0] = torch.inf
            b.grad = a.grad.clone()
        optimizers[0].step()
        tested, first_use.under_test = first_use.under_test, frozenset()
        try:
            optimizers[1].step()
        finally:
            first_use.under_test = tested
    for a, b in zip(mine, theirs, strict=True):
        error = (a - b).abs().max() / b.abs().max()
        if not error <= 1e-5:
            raise Differs(f"weights of shape {tuple(a.shape)} are off by {error:.3g}")


CHECKS: dict[str, Callable[[Mapping[str, Any], torch.device], None]] = {
    "decoding": check_decoding,
    "vocoder": check_vocoder,
    "optimizer": check_optimizer,
}


def main() -> None:
    use, device, parts = sys.argv[1:]
    first_use.under_test = frozenset(filter(None, parts.split(",")))
    if not torch.cuda.is_available():
        sys.exit("no CUDA device is seen")
    torch.cuda.set_device(device)
    CHECKS[use](json.load(sys.stdin), torch.device(device))
    torch.cuda.synchronize()  # an error on the device is raised here


if __name__ == "__main__":
    main()
