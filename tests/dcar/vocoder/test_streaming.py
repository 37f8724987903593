"""An utterance in pieces is the utterance, and what speaks it is the reference in another order
of sums."""

import numpy as np
import pytest
import torch
from tiny_data import random_voice, tiny_vocoder

from dcar.errors import DataError
from dcar.vocoder import streaming
from dcar.vocoder.acoustic import VocoderConfig
from dcar.vocoder.captured import captured_synthesis
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.operations import Operations
from dcar.vocoder.streaming import StreamingVocoder, product_type, reach

SHAPES = {
    "shipped hops": {},
    "window of four": {"window": 960},
    "odd hop": {"hop": 15, "window": 45, "n_fft": 65},
    "25 tokens a second": {"token_rate": 25},
}


def vocoder(**shape) -> TokenVocoder:
    torch.manual_seed(0)
    made = TokenVocoder(
        VocoderConfig(
            vocab_size=12,
            condition_size=8,
            mel_bands=20,
            acoustic_size=16,
            acoustic_ffn_size=16,
            renderer_size=16,
            renderer_ffn_size=16,
            acoustic_dilations=(1, 2),
            renderer_dilations=(2, 1),
            calibration_tokens=tuple(range(12)),
            **shape,
        )
    )
    torch.nn.init.normal_(made.acoustic.output.weight, std=0.3)  # a pitch that moves
    return made.eval()


def ids(n: int) -> list[int]:
    return np.random.default_rng(1).integers(0, 12, n).tolist()


@torch.inference_mode()
def reference(model: TokenVocoder, tokens: list[int], seed: int = 0) -> np.ndarray:
    voice = torch.as_tensor(random_voice(seed))[None]
    return model(torch.tensor([tokens]), torch.tensor([len(tokens)]), voice)[0].clamp(-1, 1).numpy()


@pytest.fixture(params=["C", "PyTorch"])
def exact(request, monkeypatch):
    """Products in float32, and other operations in C or in PyTorch."""
    monkeypatch.setattr(streaming, "product_type", lambda: torch.float32)
    if request.param == "PyTorch":
        monkeypatch.setattr(streaming, "operations", lambda config: Operations())


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_reference(exact, shape):
    model = vocoder(**SHAPES[shape])
    for n in (1, 2, 70):
        expected = reference(model, ids(n))
        (got,) = model.synthesize([ids(n)], random_voice()[None])
        assert got.shape == expected.shape == (n * model.config.samples_per_token,)
        assert (
            np.abs(expected).max() > 1e-3
            and np.abs(got - expected).max() < 5e-3 * np.abs(expected).max()
        )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("piece", [1, 7, 40])
def test_pieces_are_the_whole(exact, shape, piece):
    model, tokens = vocoder(**SHAPES[shape]), ids(173)
    (whole,) = model.synthesize([tokens], random_voice()[None])
    stream = model.stream(random_voice())
    pieces = [
        stream.push(tokens[i : i + piece], last=i + piece >= len(tokens))
        for i in range(0, len(tokens), piece)
    ]
    got = np.concatenate(pieces)
    assert len(got) == len(whole) and np.abs(got - whole).max() < 5e-3 * np.abs(whole).max()
    assert len(pieces) > 4 and sum(len(p) > 0 for p in pieces) > 2


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_on_a_gpu_are_the_whole(device, shape):
    """Two streams in turn, one longer than the noise that is repeated, by few graphs."""
    model, speech = vocoder(**SHAPES[shape]), (ids(290), ids(90)[::-1])
    expected = [reference(model, tokens, seed) for seed, tokens in enumerate(speech)]
    model.to(device)
    streams = [model.stream(random_voice(seed)) for seed in (0, 1)]
    pieces: list[list[np.ndarray]] = [[], []]
    for start in range(0, 300, 25):
        for stream, tokens, made in zip(streams, speech, pieces, strict=True):
            if start < len(tokens):
                made.append(stream.push(tokens[start : start + 25], start + 25 >= len(tokens)))
    for made, whole in zip(pieces, expected, strict=True):
        got = np.concatenate(made)
        assert len(got) == len(whole) and np.abs(got - whole).max() < 1e-2 * np.abs(whole).max()
        assert sum(len(piece) > 0 for piece in made) > 2
    assert len(captured_synthesis(model).graphs) <= 4
    with pytest.raises(DataError, match="token 12 is outside 0..11"):
        streams[0].push([12])


def test_sound_is_there_as_soon_as_it_is_certain():
    model = tiny_vocoder()
    stream, behind = StreamingVocoder(model, random_voice()), reach(model)
    assert len(stream.push(ids(behind))) == 0
    assert len(stream.push([3])) >= model.config.samples_per_token
    changed = [
        np.concatenate((s.push([1] * 20 + [token]), s.push([], last=True)))
        for token in (1, 5)
        for s in [StreamingVocoder(model, random_voice())]
    ]
    first = int(np.flatnonzero(np.abs(changed[0] - changed[1]) > 1e-6)[0])
    assert (20 - behind) * model.config.samples_per_token <= first  # no later token is heard before


@pytest.mark.skipif(product_type() == torch.float32, reason="no bfloat16 on this processor")
def test_products_in_bfloat16_sound_alike(monkeypatch):
    model, tokens = tiny_vocoder(), ids(100)
    (low,) = model.synthesize([tokens], random_voice()[None])
    high = reference(model, tokens)
    levels = [np.log(np.square(wave.reshape(100, -1)).mean(1)) for wave in (low, high)]
    assert np.abs(low - high).max() > 0 and np.abs(levels[0] - levels[1]).mean() < 0.1


def test_what_was_trained_is_heard():
    model = tiny_vocoder()
    (before,) = model.synthesize([ids(30)], random_voice()[None])
    with torch.no_grad():
        model.renderer.head.bias.add_(0.5)  # louder by half
    (after,) = model.synthesize([ids(30)], random_voice()[None])
    assert np.abs(after).max() > 1.3 * np.abs(before).max()
