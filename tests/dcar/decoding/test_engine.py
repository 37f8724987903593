"""Engines: whatever is beside an utterance or was in its row before, the oracle speaks the same."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from held import ROUNDING, check
from oracle import speak
from tiny_decoders import policy_of, tiny_decoder
from tiny_methods import KINDS, candidates_policy, scored
from tiny_verifiers import rule_of

from dcar.decoding import Engine, FixedChunk, PolicyChunk, Prompt, RandomChunk, decode
from dcar.errors import ConfigError, DataError, DistributionError, EngineError, TextError
from dcar.model.car import CARDecoder
from dcar.sampling import SamplingConfig
from eval.verifiers.controls import BestOfChunk, EndOnConfident
from eval.verifiers.drafters import HeadDrafter
from eval.verifiers.mtp_viterbi import MTPViterbi, Transitions, count_bigrams
from eval.verifiers.pcg import build_groups
from eval.verifiers.sd import SpeculativeDecoding
from eval.verifiers.vadusa import Vadusa, chain
from heads.policy import HiddenPolicy, HiddenPolicyConfig

SAMPLING = SamplingConfig(
    temperature=0.9, top_k=9, max_tokens=30, max_tokens_per_text_unit=1.7, min_tokens=3
)
LENGTHS = [(4, 3), (2, 0), (9, 5), (1, 1), (17, 17), (6, 0), (12, 2)]  # of text and prompt
PROMPTS = [
    Prompt(
        f"u{i}",
        [(5 * i + 3 * j) % 19 + 1 for j in range(text)],
        [(i + 7 * j) % 12 for j in range(speech)],
    )
    for i, (text, speech) in enumerate(LENGTHS)
]
CALLS = [
    (PROMPTS[:2], 1, False),
    (PROMPTS, 1, False),
    (PROMPTS[::-1], 1, False),
    (PROMPTS[3:6], 3, True),
]
"""Prompts, the size of groups, and whether these share draws: longer texts than before, other
seeds, groups."""


def test_threads_decode_side_by_side_with_one_decoder():
    """A server has an engine a thread. Tokens are those of one thread, and nothing crashes."""
    decoder = tiny_decoder(hidden_size=64, ffn_size=256, num_layers=6)  # passes that overlap
    sampling = replace(SAMPLING, max_tokens=90, min_tokens=60, max_tokens_per_text_unit=90)

    def tokens(turn: int) -> list[tuple[int, ...]]:
        rows = 1 + turn % 3  # caches of different sizes
        results = Engine(decoder, FixedChunk(3), sampling, rows).decode(PROMPTS)
        return [tuple(result.tokens) for result in results]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(tokens, range(9)))
    assert found == [tokens(0)] * 9


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_refilled_moved_and_used_again(name):
    """Two rows for seven utterances; five, which move together when half of them are empty; on
    the kernels of this processor, in plain PyTorch, and with the fixed shapes of a GPU."""
    exact, _, rule = KINDS[name](lambda module: copy.deepcopy(module).double())
    expected = [
        [
            speak(exact, prompt, rule, SAMPLING, seed, member, share)
            for prompt in prompts
            for member in range(size)
        ]
        for seed, (prompts, size, share) in enumerate(CALLS)
    ]
    for way, rows, fixed in (
        ("float32", 2, False),
        ("float32", 5, False),
        ("float64", 5, True),
        ("float32", 2, True),
    ):
        model, method, _ = KINDS[name](
            lambda module, way=way: copy.deepcopy(module).to(getattr(torch, way))
        )
        engine = Engine(model, method, SAMPLING, rows, record_hidden=method.tree is None)
        engine.eager = engine.eager and not fixed
        for seed, ((prompts, size, share), wanted) in enumerate(zip(CALLS, expected, strict=True)):
            how = dict(seed=seed, group_size=size, common_random_numbers=share)
            said: dict[int, list[int]] = {}
            results = {}
            for progress in engine.run(prompts, stream=seed != 1, **how):
                assert progress.index not in results
                said.setdefault(progress.index, []).extend(progress.tokens)
                if progress.result is not None:
                    results[progress.index] = progress.result
            for index, spoken in enumerate(wanted):
                assert said[index] == results[index].tokens
                if spoken.margin > ROUNDING[way]:
                    check(
                        results[index],
                        spoken,
                        ROUNDING[way],
                        f"{name}, {way}, {rows} rows, {fixed=}, call {seed}",
                    )
        assert sum(s.margin > ROUNDING[way] for call in expected for s in call) > 18  # of 25


@pytest.mark.parametrize(
    "method",
    [
        FixedChunk(3),
        RandomChunk([1, 2, 4]),
        PolicyChunk(policy_of(features=256), "sample"),
        SpeculativeDecoding(drafter=HeadDrafter(3)),
    ],
    ids=lambda method: method.name,
)
def test_a_row_is_the_same_bit_by_bit_whatever_is_beside_it(method):
    """Heads of 64, in float32, on the kernels: rows of other texts, and of other lengths, change
    no bit."""
    model = tiny_decoder(
        hidden_size=256, num_attention_heads=4, ffn_size=1024, speech_vocab_size=1000
    )
    prompts = [
        Prompt(
            f"u{i}",
            [(5 * i + 3 * j) % 19 + 1 for j in range(text)],
            [31 * j + i for j in range(speech)],
        )
        for i, (text, speech) in enumerate([(5, 0), (30, 3), (12, 20), (3, 7), (16, 1), (40, 2)])
    ]
    sampling = SamplingConfig(max_tokens=40, max_tokens_per_text_unit=2, min_tokens=100)
    alone = [decode(model, [prompt], method, sampling, record_hidden=True)[0] for prompt in prompts]
    for order, rows in ((prompts, 6), (prompts[::-1], 3), (prompts, 2)):
        for result in decode(model, order, method, sampling, record_hidden=True, batch_size=rows):
            (wanted,) = (one for one in alone if one.utterance_id == result.utterance_id)
            assert torch.equal(result.hidden, wanted.hidden) and result.tokens == wanted.tokens
            # partly in PyTorch
            assert result.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [policy_of, lambda: policy_of(None), candidates_policy, lambda: scored(width=16)],
    ids=["before", "before, full width", "after", "scored"],
)
def test_every_run_takes_the_present_weights_of_a_policy(decoder, prompts, make):
    """Also such as no version counter tells, and those of another policy of the same shape."""
    policy, spoken = make(), []
    engine = Engine(decoder, PolicyChunk(policy, "sample"), SAMPLING, 3, record_hidden=True)
    for turn in range(3):
        for result, wanted in zip(
            engine.decode(prompts),
            decode(decoder, prompts, engine.method, SAMPLING, record_hidden=True),
            strict=True,
        ):
            check(result, wanted, 1e-5)
            spoken.append((turn, *result.sizes))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.data.add_(
                    0.3
                    * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(turn))
                )
        engine.method = PolicyChunk(policy if turn else copy.deepcopy(policy), "sample")
    assert len({line[1:] for line in spoken}) > len(prompts)
    engine.method = PolicyChunk(
        HiddenPolicy(HiddenPolicyConfig(32, 3, width=16, num_attention_heads=2)), "sample"
    )
    with pytest.raises(ConfigError, match="num_actions=3.* cannot replace .*num_actions=4"):
        engine.decode(prompts)


# --- what is refused ------------------------------------------------------------------------------


def test_prompts_that_the_model_cannot_read(decoder):
    """Nothing is decoded before all prompts have been checked."""
    without, method = tiny_decoder(bos=False), FixedChunk(1)
    for model, text, speech, error, message in (
        (decoder, (), (1,), TextError, "phonemes"),
        (decoder, (25,), (1,), DataError, "text id 25"),
        (decoder, (1,), (12,), DataError, "codebook"),
        (without, (1,), (), DataError, "BOS"),
    ):
        with pytest.raises(error, match=f"bad: .*{message}"):
            next(
                Engine(model, method, SAMPLING).run(
                    [Prompt("good", (1,), (1,)), Prompt("bad", text, speech)]
                )
            )


SCORED = scored()
REFUSED = {
    "5 heads, .* 1..4": FixedChunk(5),
    "9 heads": EndOnConfident(2, 9),
    "6 heads": RandomChunk([1, 6]),
    "chunk size 9 .*4 tokens": BestOfChunk(9, 2, SCORED.chunk_scorer),
    "1..5 tokens, .*4": PolicyChunk(HiddenPolicy(HiddenPolicyConfig(32, 5))),
    "7 heads": PolicyChunk(policy_of(), forced={"a": [7]}),
    "draft of 4 .* 5 .* 4": SpeculativeDecoding(drafter=HeadDrafter(4)),
    "size 6 ": Vadusa(2, chain(5)),
    "size 7 ": MTPViterbi(7, transitions=Transitions(*count_bigrams([[0]], 12), 14)),
    "vadusa-2: record_hidden": Vadusa(2, chain(2)),
    "repetition_window=0": Vadusa(2, chain(2)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_methods_that_do_not_fit(decoder, prompts, message):
    sampling = SamplingConfig(repetition_window=3) if "repetition" in message else SAMPLING
    with pytest.raises(ConfigError, match=message):
        decode(decoder, prompts, REFUSED[message], sampling, record_hidden="hidden" in message)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            EngineError,
            "1 rows .*batch size.*max_tokens",
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), EngineError, "2 utterances"),
        (RuntimeError("shape mismatch"), RuntimeError, "^shape mismatch$"),
    ],
)  # is not taken for memory
def test_too_little_memory_keeps_what_is_finished(
    fault, error, message, decoder, prompts, monkeypatch
):
    engine = Engine(decoder, FixedChunk(1), SAMPLING)
    admit, calls = engine._admit, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise fault
        admit(*arguments)

    monkeypatch.setattr(engine, "_admit", failing)
    with pytest.raises(error, match=message) as caught:
        engine.decode(prompts)
    if error is EngineError:
        # the longest texts first
        assert [r.utterance_id for r in caught.value.finished] == ["utt6", "utt5"]
    monkeypatch.undo()
    assert [r.tokens for r in engine.decode(prompts)] == [
        # the engine can be used again
        r.tokens
        for r in decode(decoder, prompts, engine.method, SAMPLING)
    ]


def test_engines_that_cannot_be(decoder, prompts):
    method = FixedChunk(1)
    long = SamplingConfig(max_tokens=9000, max_tokens_per_text_unit=9000)
    with pytest.raises(EngineError, match=" 1000000000 rows"):
        Engine(decoder, method, SAMPLING, 10**9).decode(prompts)
    with pytest.raises(EngineError, match=" 8192 .*text or prompt.*max_tokens"):
        decode(decoder, prompts, method, long)
    with pytest.raises(EngineError, match="'cpu'.*graphs=false"):
        Engine(decoder, method, SAMPLING, graphs=True)
    assert (
        decode(decoder, [], method, SAMPLING) == Engine(decoder, method, SAMPLING).decode([]) == []
    )


# --- no distribution ------------------------------------------------------------------------------


def broken(token: int) -> CARDecoder:
    """A decoder that is sound until it reads `token`."""
    model = tiny_decoder()
    with torch.no_grad():
        model.speech_embedding.weight[token] = float("nan")
    return model


LONG = SamplingConfig(temperature=0.9, max_tokens=40, max_tokens_per_text_unit=6, min_tokens=12)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("sampling", [LONG, replace(LONG, temperature=0), replace(LONG, top_p=0.9)])
def test_an_utterance_without_a_distribution_is_named_with_its_position(prompts, sampling, fixed):
    """With fixed shapes the host looks seldom, and names the last position that it knew."""
    method = FixedChunk(2)
    sound = decode(tiny_decoder(), prompts[3:4], method, sampling)[0].tokens
    token = next(t for t in sound if t not in prompts[3].prompt_ids)
    # it is read with its chunk; the next distribution is the first that suffers
    read = sound.index(token) // 2 * 2 + 2
    engine = Engine(broken(token), method, sampling, 3)
    engine.eager = not fixed
    with pytest.raises(DistributionError, match="utt3: .*token") as raised:
        engine.decode([prompts[3]] * 2)
    assert f"token {read}," in str(raised.value) or fixed


def test_the_others_of_a_batch_are_not_blamed_and_the_finished_are_kept(prompts):
    """Utterance 5 has a prompt that breaks; the one beside it is complete."""
    token = next(t for t in prompts[5].prompt_ids if t not in prompts[2].prompt_ids)
    sampling = SamplingConfig(temperature=0, max_tokens=2)
    with pytest.raises(DistributionError, match="utt5: .*token 0") as raised:
        decode(broken(token), [prompts[2], prompts[5]], FixedChunk(1), sampling, batch_size=1)
    assert raised.value.finished == []  # the longest text is first
    short = replace(prompts[5], text_ids=prompts[5].text_ids[:2])
    for rows in (1, 2):
        with pytest.raises(DistributionError, match="utt5: .*token 0") as raised:
            decode(broken(token), [prompts[2], short], FixedChunk(2), sampling, batch_size=rows)
        assert [r.utterance_id for r in raised.value.finished] == ["utt2"]


@pytest.mark.parametrize("kind", ["sd", "ssd", "pcg", "typical", "topk", "vadusa", "mtp-viterbi"])
def test_verifiers_report_it_too(prompts, kind):
    model = broken(next(t for t in prompts[5].prompt_ids if t not in prompts[2].prompt_ids))
    table = Transitions(*count_bigrams([[0]], 12), 14)
    groups = build_groups(tiny_decoder().speech_embedding.weight[:12], 0.1)
    method = {
        "vadusa": lambda: Vadusa(2, chain(3)),
        "mtp-viterbi": lambda: MTPViterbi(2, transitions=table),
    }.get(kind, lambda: rule_of(kind, HeadDrafter(2), groups))()
    with pytest.raises(DistributionError, match="utt5: .*token 0"):
        decode(model, [prompts[2], prompts[5]], method, SamplingConfig(max_tokens=2), batch_size=2)
