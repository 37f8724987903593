"""The static engine gives the tokens and hidden states of the reference loop, whatever batch, width or order."""

import pytest
import torch
from dcar.decoding.engine.run import EngineConfig, Job, Plan, StaticEngine, engine_for, room_for
from dcar.decoding.fast.graphs import StepGraphs
from tiny_decoders import tiny_decoder
from ways import SAMPLING, check_ways, policy_of, same

from dcar.decoding import ChunkMethod, FixedChunk, PolicyChunk, Prompt, decode
from dcar.errors import ConfigError, DataError, EngineError
from dcar.sampling import SamplingConfig
from heads.policy import ChunkPolicy, ChunkPolicyConfig


def schedules(policy: ChunkPolicy):
    return {"far": FixedChunk(1), "car-3": FixedChunk(3),
            "greedy": PolicyChunk(policy), "sampled": PolicyChunk(policy, "sample")}


@pytest.mark.parametrize("name", ["far", "car-3", "greedy", "sampled"])
@pytest.mark.parametrize(("batch", "chunks"), [(1, "exact"), (3, "exact"), (8, "padded"), (1, "padded")])
def test_equals_the_reference_loop(decoder, prompts, name, batch, chunks):
    check_ways(decoder, prompts, ChunkMethod(schedules(policy_of())[name]), batch=batch, chunks=chunks, seed=3)


@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=0, max_tokens=30),
                                      SamplingConfig(temperature=0.7, top_k=5, top_p=0.9, max_tokens=40, min_tokens=6)])
def test_sampling_settings(decoder, prompts, sampling):
    check_ways(decoder, prompts, ChunkMethod(FixedChunk(2)), sampling, seed=1)


def test_decoder_without_bos_and_full_width_policy():
    prompts = [Prompt(f"u{i}", tuple(range(1, 4 + i)), tuple(range(1, 3 + i))) for i in range(5)]
    check_ways(tiny_decoder(bos=False), prompts, ChunkMethod(PolicyChunk(policy_of(None), "sample")), batch=2)


@pytest.mark.parametrize(("name", "value"), [("stack.kernels", lambda dtype: None), ("cpu.native.LARGE", 1)])
def test_other_kernels_give_the_same_tokens(decoder, prompts, name, value, monkeypatch):
    """Where there is no C compiler, and where no weight is small enough to be copied."""
    monkeypatch.setattr(f"dcar.decoding.fast.{name}", value)
    check_ways(decoder, prompts, ChunkMethod(PolicyChunk(policy_of(), "sample")), seed=3)


@pytest.mark.parametrize("share", [False, True])
def test_groups_with_forced_members(decoder, prompts, share):
    forced = {p.utterance_id: [2, 3, 0, 0] for p in prompts[1:]}
    check_ways(decoder, prompts, ChunkMethod(PolicyChunk(policy_of(), "sample", forced=forced)), batch=6, seed=4,
               group_size=4, share_token_draws=share)


def test_rows_are_replaced_as_they_finish(decoder, prompts):
    """Two rows serve seven utterances; results come in the order of finishing, tokens as if spoken alone."""
    engine = engine_for(decoder, prompts, SAMPLING, batch=2)
    plan = Plan(ChunkMethod(FixedChunk(2)), SAMPLING, seed=5)
    asked: list[int] = []

    def jobs():
        for i, prompt in enumerate(prompts):
            asked.append(i)
            yield Job(i, prompt)

    finished, streamed = {}, {i: [] for i in range(7)}
    for progress in engine.run(jobs(), plan, stream=True):
        streamed[progress.job.index] += progress.tokens
        if progress.result is not None:
            finished[progress.job.index] = progress.result
            assert len(asked) <= len(finished) + 2  # no job is taken before a row is free
    expected = decode(decoder, prompts, plan.method, SAMPLING, seed=5)
    assert [finished[i].tokens for i in range(7)] == [r.tokens for r in expected]
    assert streamed == {i: r.tokens for i, r in enumerate(expected)}
    assert list(finished) != sorted(finished)


def test_what_does_not_fit_is_refused_and_the_finished_are_kept(decoder, prompts):
    method = ChunkMethod(FixedChunk(2))
    engine = StaticEngine(decoder, EngineConfig(batch=1, capacity=30, text=6))
    with pytest.raises(EngineError, match=r"utt4: prompt and up to 42 tokens need 47 positions.*capacity=30") as caught:
        engine.decode(prompts[:1] + prompts[4:], method, SAMPLING)
    assert [r.utterance_id for r in caught.value.finished] == ["utt0"]
    with pytest.raises(EngineError, match="9 phonemes, the engine has text=6"):
        engine.decode(prompts[6:], method, SamplingConfig(max_tokens=5))
    with pytest.raises(DataError, match="codebook"):
        engine.decode([Prompt("a", (1,), (12,))], method, SAMPLING)
    five = ChunkPolicy(ChunkPolicyConfig(32, 5, 16, num_attention_heads=2)).eval()  # of a decoder with 5 heads
    for asked, speaks, message in (
        (FixedChunk(5), engine, "1..4 tokens"), (PolicyChunk(policy_of()), engine, "without that policy"),
        (PolicyChunk(five), engine_for(decoder, prompts, SAMPLING, policy=five), "1..5 tokens, but the decoder has 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            speaks.decode(prompts, ChunkMethod(asked), SAMPLING)
    with pytest.raises(ConfigError, match="rotary table"):
        StaticEngine(decoder, EngineConfig(capacity=9000))


@pytest.mark.parametrize(("fault", "error", "message"), [
    (torch.OutOfMemoryError("CUDA out of memory"), EngineError, "lower batch first"),
    (RuntimeError("shape mismatch"), RuntimeError, "^shape mismatch$"),  # is not taken for memory
])
def test_out_of_memory_names_the_setting_and_keeps_the_finished(fault, error, message, decoder, prompts, monkeypatch):
    engine = engine_for(decoder, prompts, SAMPLING, batch=1)
    admit, calls = engine._admit, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise fault
        admit(*arguments)

    monkeypatch.setattr(engine, "_admit", failing)
    with pytest.raises(error, match=message) as caught:
        engine.decode(prompts, ChunkMethod(FixedChunk(1)), SAMPLING)
    if error is EngineError:
        assert [r.utterance_id for r in caught.value.finished] == ["utt0", "utt1"]
        with pytest.raises(EngineError, match="batch=100000000"):
            StaticEngine(decoder, EngineConfig(batch=10**8, capacity=8000))


def test_a_changed_model_is_refused(decoder, prompts):
    engine = engine_for(decoder, prompts, SAMPLING)
    with torch.no_grad():
        decoder.layers[0].qkv.weight.mul_(1.1)
    with pytest.raises(EngineError, match="build a new StaticEngine"):
        engine.decode(prompts, ChunkMethod(FixedChunk(1)), SAMPLING)
    engine = engine_for(decoder, prompts, SAMPLING)
    decoder.to(torch.bfloat16)
    with pytest.raises(EngineError, match="torch.float32.*torch.bfloat16"):
        engine.decode(prompts, ChunkMethod(FixedChunk(1)), SAMPLING)


def test_graphs_need_cuda_and_their_own_shape(decoder):
    with pytest.raises(EngineError, match="graphs=false"):
        StaticEngine(decoder, EngineConfig(graphs=True))
    assert not StaticEngine(decoder, EngineConfig(batch=1)).graphs.enabled
    with pytest.raises(EngineError, match="captured for"):
        StepGraphs.check((1, "float32"), (2, "float32"))
    for bad in ({"batch": 0}, {"chunks": "wide"}, {"sync_every": 0}):
        with pytest.raises(ConfigError):
            EngineConfig(**bad)


def change(policy: ChunkPolicy, seed: int = 1) -> None:
    """An update of the policy, in place, as an optimiser makes it."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))


@pytest.mark.parametrize("width", [16, None])
def test_a_changed_policy_decides_anew_after_load_policy(decoder, prompts, width):
    policy = policy_of(width)
    method = ChunkMethod(PolicyChunk(policy, "sample"))
    engine = engine_for(decoder, prompts, SAMPLING, batch=3, policy=policy)
    before = engine.decode(prompts, method, SAMPLING, record_hidden=True)
    layers, cache = engine.passes.stack, engine.cache.kv.data_ptr()
    change(policy)
    with pytest.raises(EngineError, match="call load_policy"):  # never with old weights
        engine.decode(prompts, method, SAMPLING)
    engine.load_policy(policy)
    after = engine.decode(prompts, method, SAMPLING, record_hidden=True)
    assert [r.actions for r in after] != [r.actions for r in before]
    same(after, decode(decoder, prompts, method, SAMPLING, record_hidden=True))
    assert engine.passes.stack is layers and engine.cache.kv.data_ptr() == cache  # nothing was built anew


def test_load_policy_sees_writes_that_no_version_counts(decoder, prompts):
    policy = policy_of()
    method = ChunkMethod(PolicyChunk(policy))
    engine = engine_for(decoder, prompts, SAMPLING, batch=3, policy=policy)
    addresses = engine.signature()
    for parameter in policy.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    engine.load_policy(policy)
    same(engine.decode(prompts, method, SAMPLING), decode(decoder, prompts, method, SAMPLING), False)
    other = policy_of()
    change(other, 7)
    engine.load_policy(other)  # another object of the same shape
    method = ChunkMethod(PolicyChunk(other))
    same(engine.decode(prompts, method, SAMPLING), decode(decoder, prompts, method, SAMPLING), False)
    assert engine.signature() == addresses  # CUDA graphs read the same memory as before
    with pytest.raises(ConfigError, match="layer_width=32 cannot take the place of one with 16"):
        engine.load_policy(policy_of(None))
    with pytest.raises(ConfigError, match="without a policy"):
        engine_for(decoder, prompts, SAMPLING).load_policy(policy)


def test_fit_makes_room_and_only_then(decoder, prompts):
    policy = policy_of()
    method = ChunkMethod(PolicyChunk(policy, "sample"))
    engine = engine_for(decoder, prompts[:1], SAMPLING, batch=1, policy=policy)
    with pytest.raises(EngineError, match="capacity"):
        engine.decode(prompts, method, SAMPLING)
    engine.fit(5, *room_for(prompts, SAMPLING))
    same(engine.decode(prompts, method, SAMPLING, record_hidden=True),
         decode(decoder, prompts, method, SAMPLING, record_hidden=True))
    cache = engine.cache
    engine.fit(2, 20, 3)
    assert engine.cache is cache and engine.config.batch == 5
    with pytest.raises(ConfigError, match="rotary table"):
        engine.fit(1, 9000, 1)


def test_steps_that_do_the_same_share_a_graph():
    """The key of a captured step goes by what the step does, not by which object asked for it."""
    policy, seen = policy_of(), set()
    for schedule in (FixedChunk(1), FixedChunk(2), PolicyChunk(policy),
                     PolicyChunk(policy, "sample"), PolicyChunk(policy, "sample", forced={"a": [1]})):
        seen.add(Plan(ChunkMethod(schedule), SAMPLING).step)
    assert len(seen) == 5
    assert Plan(ChunkMethod(PolicyChunk(policy, "sample", forced={"b": [2]})), SAMPLING).step in seen
    assert Plan(ChunkMethod(FixedChunk(2)), SAMPLING, record_hidden=True).step not in seen
