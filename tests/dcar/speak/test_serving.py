"""Streaming gives the audio of the whole utterance in pieces; batches are served row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_data import tiny_vocoder
from tiny_decoders import tiny_decoder

from dcar.decoding import ChunkMethod, FixedChunk, decode
from dcar.decoding.engine.run import Job, Plan, engine_for
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig
from dcar.speak.stream import in_one_thread, stream_audio

SAMPLING = SamplingConfig(max_tokens=120, min_tokens=100, max_tokens_per_text_unit=40)


def features(seed: int = 0) -> np.ndarray:
    voice = np.random.default_rng(seed).normal(size=298).astype(np.float32)
    voice[256:258] = 5.1, 0.2  # mean and spread of log F0
    return voice


def test_streams_of_several_utterances_through_two_rows(prompts):
    decoder, vocoder = tiny_decoder(), tiny_vocoder()
    plan = Plan(ChunkMethod(FixedChunk(3)), SAMPLING, seed=2)
    engine = engine_for(decoder, prompts[:3], SAMPLING, batch=2)
    voices = {i: features(i) for i in range(3)}
    audio: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}
    first: dict[int, float] = {}
    results, order = {}, []
    for chunk in stream_audio(engine, [Job(i, prompts[i]) for i in range(3)], plan, vocoder, voices, every=20):
        audio[chunk.index].append(chunk.samples)
        order.append(chunk.index)
        first.setdefault(chunk.index, chunk.seconds)
        if chunk.result is not None:
            results[chunk.index] = (chunk.result, chunk.seconds)
    expected = decode(decoder, prompts[:3], plan.method, SAMPLING, seed=2)
    for i, result in enumerate(expected):
        assert results[i][0].tokens == result.tokens
        whole = vocoder.synthesize([result.tokens], voices[i][None])[0]
        got = np.concatenate(audio[i])
        assert got.shape == whole.shape and np.abs(got - whole).max() < 1e-2 * np.abs(whole).max()
        assert first[i] < results[i][1]  # sound before the end
    assert order != sorted(order)  # interleaved


def test_one_thread_while_something_is_made_and_no_longer():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert [(seen, torch.get_num_threads()) for seen in in_one_thread(torch.get_num_threads() for _ in "ab")] == [
            (1, 3), (1, 3)]
    finally:
        torch.set_num_threads(before)


def test_bad_settings():
    with pytest.raises(ConfigError):
        list(stream_audio(None, [], None, tiny_vocoder(), {}, every=0))
