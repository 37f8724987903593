"""The decoding loop: cache, chunks, EOS, limits, position-addressed randomness."""

import random
from dataclasses import replace

import pytest
import torch
from dcar.decoding.fast.passes import FastDecoder
from tiny_backbones import tiny_backbone
from tiny_decoders import eos_decoder, states, tiny_decoder
from ways import SAMPLING, policy_of

from dcar.decoding import ChunkMethod, FixedChunk, PolicyChunk, Prompt, RandomChunk, decode
from dcar.errors import ConfigError, DataError, TextError
from dcar.model.base import pad
from dcar.sampling import SamplingConfig
from heads.layers import KVCache, last_of


def test_a_size_that_is_written_more_often_is_drawn_more_often(decoder, prompts):
    long = [replace(p, utterance_id=f"{p.utterance_id}.{i}") for p in prompts for i in range(48)]
    results = decode(decoder, long, ChunkMethod(RandomChunk([1, 2, 2, 2])), SAMPLING, seed=2)
    drawn = [size for r in results for size in r.actions]
    share = sum(size == 2 for size in drawn) / len(drawn)
    assert len(drawn) > 400 and abs(share - 0.75) < 4 * (0.75 * 0.25 / len(drawn)) ** 0.5


@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_constant_policy_equals_car_k(decoder, prompts, mode):
    policy = policy_of()
    torch.nn.init.zeros_(policy.output.weight)
    policy.output.bias.data = torch.tensor([-50.0, -50.0, 50.0, -50.0])
    dcar = decode(decoder, prompts, ChunkMethod(PolicyChunk(policy, mode)), SAMPLING, seed=2)
    car = decode(decoder, prompts, ChunkMethod(FixedChunk(3)), SAMPLING, seed=2)
    assert [r.tokens for r in dcar] == [r.tokens for r in car]
    assert [r.emitted for r in dcar] == [r.emitted for r in car]


def test_recorded_hidden_states_can_train_a_policy(decoder, prompts):
    """Decoding runs in inference mode; what it records is used in backward passes all the same."""
    results = decode(decoder, prompts, ChunkMethod(RandomChunk([1, 2, 4])), SAMPLING, seed=9, record_hidden=True)
    for result in results:
        assert not result.hidden.is_inference() and not result.hidden.requires_grad
        head = torch.nn.Linear(result.hidden.shape[1], 1)
        head(result.hidden).square().mean().backward()
        assert head.weight.grad.abs().sum() > 0


def test_every_member_of_a_group_needs_its_forced_size(decoder, prompts):
    method = ChunkMethod(PolicyChunk(policy_of(), "sample", forced={"utt1": [2, 3, 0, 0]}))
    with pytest.raises(ConfigError, match="one per member"):
        decode(decoder, prompts, method, SAMPLING, group_size=5)


@pytest.mark.parametrize("head", [1, 2, 3])
def test_eos_inside_a_chunk_ends_the_utterance_there(prompts, head):
    sampling = SamplingConfig(max_tokens=50, max_tokens_per_text_unit=50, min_tokens=0)
    for result in decode(eos_decoder(head), prompts, ChunkMethod(FixedChunk(3)), sampling):
        assert len(result.tokens) == head - 1
        assert result.emitted == [head - 1] and not result.truncated


def test_length_guard_and_minimum(prompts):
    sampling = SamplingConfig(max_tokens=50, max_tokens_per_text_unit=2.5)
    results = decode(eos_decoder(4), prompts, ChunkMethod(FixedChunk(3)), sampling)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.truncated
        assert len(result.tokens) == -(-5 * len(prompt.text_ids) // 2)  # rounded up, the last chunk cut
    sampling = SamplingConfig(max_tokens=50, min_tokens=4)
    results = decode(eos_decoder(1), prompts, ChunkMethod(FixedChunk(1)), sampling)
    assert all(len(r.tokens) == 4 and not r.truncated for r in results)


def test_prompts_that_the_model_cannot_read(decoder):
    one, two, without = FixedChunk(1), tiny_decoder(heads=2), tiny_decoder(bos=False)
    for model, text, speech, schedule, error, message in (
        (decoder, (), (1,), one, TextError, "no phonemes"), (decoder, (25,), (1,), one, DataError, "outside the model"),
        (decoder, (1,), (12,), one, DataError, "codebook"), (without, (1,), (), one, DataError, "at least one prompt"),
        (decoder, (1,), (1,), FixedChunk(5), ConfigError, "needs 5 heads"),
        (two, (1,), (1,), PolicyChunk(policy_of()), ConfigError, "has 2 heads"),
    ):
        with pytest.raises(error, match=message):
            decode(model, [Prompt("a", text, speech)], ChunkMethod(schedule), SAMPLING)


def test_a_prompt_takes_ids_of_any_sequence_and_keeps_tuples():
    given = Prompt("a", [1, 2], torch.tensor([3, 4]))
    assert given == Prompt("a", (1, 2), (3, 4)) and hash(given) == hash(Prompt("a", (1, 2), (3, 4)))
    assert all(type(i) is int for i in (*given.text_ids, *given.prompt_ids))


def test_cache_after_random_rollbacks_equals_recomputation(decoder):
    """Extend and truncate in random order leave the cache as if the kept tokens had been read in one go."""
    rng, read = random.Random(0), [Prompt("a", (1, 2, 3), (1,)), Prompt("b", (4, 5, 6, 7, 8), (2, 3, 4))]
    text, prompts = pad([[1, 2, 3], [4, 5, 6, 7, 8]], "cpu"), pad([[1, 13], [2, 3, 4, 13]], "cpu")
    cache, _ = decoder.prefill(*text, *prompts, 80)
    kept: list[list[int]] = [[], []]
    for _ in range(12):
        counts = torch.tensor([rng.randint(1, 4), rng.randint(1, 4)])
        tokens, start = torch.randint(0, 12, (2, int(counts.max()))), cache.lengths.clone()
        hidden = decoder.extend(cache, tokens, counts)
        keep = [rng.randint(0, int(c)) for c in counts]
        cache.truncate(start + torch.tensor(keep))
        for b in range(2):
            kept[b] += tokens[b, : keep[b]].tolist()
            if keep[b]:
                full = states(decoder, read[b], kept[b])
                assert torch.allclose(hidden[b, keep[b] - 1], full[-1], atol=1e-5)


def test_gather_keeps_the_accepted_branch_of_a_tree(decoder):
    """Two sibling branches are read in one pass; after `gather` the cache knows the accepted one only."""
    given = *pad([[1, 2, 3]], "cpu"), *pad([[1, 13]], "cpu")
    plain, _ = decoder.prefill(*given, 20)
    chain = decoder.extend(plain, torch.tensor([[5, 7]]), torch.tensor([2]))
    after_chain = decoder.extend(plain, torch.tensor([[9]]), torch.tensor([1]))

    cache, _ = decoder.prefill(*given, 20)
    # columns: 5, its children 6 and 7; depth decides the position, the mask who sees whom
    sees = torch.tensor([[[True, False, False], [True, True, False], [True, False, True]]])
    start = cache.lengths.clone()
    read = decoder.extend(cache, torch.tensor([[5, 6, 7]]), torch.tensor([3]), (sees, torch.tensor([[0, 1, 1]])))
    assert torch.allclose(read[0, 2], chain[0, 1], atol=1e-5)
    cache.gather(start, torch.tensor([[0, 2]]), torch.tensor([2]))
    assert torch.allclose(decoder.extend(cache, torch.tensor([[9]]), torch.tensor([1])), after_chain, atol=1e-5)


@pytest.mark.parametrize("reader", [tiny_decoder, lambda: FastDecoder(tiny_decoder()), tiny_backbone])
@pytest.mark.parametrize("schedule", ["random", "policy"])
def test_a_cache_off_the_host_holds_rows_of_unequal_chunks(reader, schedule, monkeypatch):
    """On a GPU the bound on the longest row grows by the widest chunk of each pass. It ran past the capacity while
    every row still fitted, in the decoder's cache and in the policy's."""
    model, policy, sampling = reader(), policy_of(), SamplingConfig(max_tokens=60, min_tokens=60)
    torch.nn.init.normal_(policy.output.weight, std=0.1)  # so that it draws all sizes
    prompts = [Prompt(f"u{i}", tuple(range(1, 9)), (1, 2, 3)) for i in range(8)]

    def speak():
        made = RandomChunk([1, 4]) if schedule == "random" else PolicyChunk(policy, "sample")
        return decode(model, prompts, ChunkMethod(made), sampling)

    expected, waits, tighten = speak(), [], KVCache.tighten
    monkeypatch.setattr(KVCache, "on_host", property(lambda self: False))
    monkeypatch.setattr(KVCache, "tighten", lambda self: waits.append(0) or tighten(self))
    got = speak()
    assert [r.tokens for r in got] == [r.tokens for r in expected] and all(len(r.tokens) == 60 for r in got)
    assert 0 < len(waits) < max(r.target_passes for r in got) / 2  # the device is seldom waited for


def test_last_of_takes_the_last_real_column():
    hidden = torch.arange(12.0).view(2, 3, 2)
    assert last_of(hidden, torch.tensor([1, 3])).tolist() == [[0.0, 1.0], [10.0, 11.0]]
