"""Streaming gives the audio of the whole utterance in pieces, several utterances at once in
their order."""

import numpy as np
import torch
from tiny_data import random_voice, tiny_vocoder
from tiny_decoders import tiny_decoder

from dcar.decoding import Engine, FixedChunk, decode
from dcar.sampling import SamplingConfig
from dcar.speak.stream import in_one_thread, speak_first_audio, stream_audio

SAMPLING = SamplingConfig(max_tokens=120, min_tokens=100, max_tokens_per_text_unit=40)


def test_streams_of_several_utterances_through_two_rows(prompts):
    decoder, vocoder, voices = tiny_decoder(), tiny_vocoder(), [random_voice(i) for i in range(3)]
    method = FixedChunk(3)
    engine = Engine(decoder, method, SAMPLING, rows=2)
    chunks = list(stream_audio(engine, prompts[:3], 2, vocoder, voices, every=20))
    for i, result in enumerate(decode(decoder, prompts[:3], method, SAMPLING, seed=2)):
        own = [chunk for chunk in chunks if chunk.phrase == i]
        assert [chunk.result.tokens for chunk in own if chunk.result is not None] == [result.tokens]
        (whole,) = vocoder.synthesize([result.tokens], voices[i][None])
        got = np.concatenate([chunk.samples for chunk in own])
        assert got.shape == whole.shape and np.abs(got - whole).max() < 1e-2 * np.abs(whole).max()
        # sound before the end
        assert own[0].result is None and len(own[0].samples) and own[-1].result is not None
    order = [chunk.phrase for chunk in chunks]
    assert order != sorted(order)  # interleaved
    assert list(dict.fromkeys(order)) == [0, 1, 2]


def test_the_first_audio_is_that_of_the_stream_and_leaves_the_engine_as_it_was(prompts):
    vocoder, voice = tiny_vocoder(), random_voice(0)
    for sampling in (SAMPLING, SamplingConfig(max_tokens=10, max_tokens_per_text_unit=40)):
        engine = Engine(tiny_decoder(), FixedChunk(3), sampling, rows=1)
        before = engine.decode(prompts[:1], seed=2)[0].tokens
        first = speak_first_audio(engine, prompts[0], 2, vocoder, voice)
        stream = stream_audio(engine, prompts[:1], 2, vocoder, [voice])
        expected = next(piece.samples for piece in stream if len(piece.samples))
        stream.close()
        assert len(first) == len(expected) and np.allclose(first, expected, atol=1e-4)
        assert engine.decode(prompts[:1], seed=2)[0].tokens == before


def test_one_thread_while_something_is_made_and_no_longer():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert [
            (seen, torch.get_num_threads())
            for seen in in_one_thread(torch.get_num_threads() for _ in "ab")
        ] == [(1, 3), (1, 3)]
    finally:
        torch.set_num_threads(before)
