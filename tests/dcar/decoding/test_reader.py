"""Passes on the ragged cache, against the model's own forward over each plain sequence."""

from collections.abc import Callable

import pytest
import torch
from tiny_decoders import tiny_decoder
from torch import Tensor, nn

from dcar.decoding.backend import Backend
from dcar.decoding.columns import real_positions
from dcar.decoding.reader import Reader
from dcar.decoding.readers import reader_of
from dcar.decoding.tree import DraftTree
from dcar.errors import ConfigError
from dcar.model.batch import pad, speech_batch
from dcar.model.car import CARDecoder
from heads.layers import KVCache

TEXTS = ([1, 2, 3, 4, 5], [6, 7], [8, 9, 10])
PROMPTS = ([3, 1, 0], [0], [5, 0])
SPEECH = [[(5 * row + 7 * i + i * i) % 12 for i in range(12)] for row in range(3)]


def prefilled(reader: Reader, capacity: int = 20) -> tuple[KVCache, Tensor]:
    """A cache with room for more, and the hidden states of the prompts."""
    small, hidden = reader.prefill(*pad(TEXTS, reader.device), *pad(PROMPTS, reader.device))
    cache = reader.new_cache(3, reader.text_room(5), capacity)
    rows = torch.arange(3, device=reader.device)
    reader.cover(cache)
    for layer in cache.kv:
        layer.normal_()  # what was in it before is never read
    cache.copy_rows(rows, small, rows)
    cache.lengths = small.lengths.clone()
    cache.prefix_lengths = small.prefix_lengths
    cache.origin = small.origin
    return cache, hidden


def near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return float((found.float() - expected).abs().max()) < tolerance * float(expected.abs().max())


@torch.no_grad()
def check(
    reader: Reader,
    plain: Callable[[list[int], list[int]], Tensor],
    tolerance: float = 1e-4,
    real: bool = False,
) -> None:
    """Prompts, a draft that is rejected, pieces of unequal lengths, a tree, and what follows the
    path that is kept.

    plain(text, speech) -> hidden states [S, D]; real: padding is left out of the passes.
    """
    cache, hidden = prefilled(reader)
    assert hidden.dtype == reader.hidden_dtype and cache.kv[0].dtype == reader.dtype
    found = [[*hidden[row, : len(prompt)]] for row, prompt in enumerate(PROMPTS)]
    reader.read(cache, torch.tensor(SPEECH)[:, 7:11], 3)
    read = torch.zeros(3, dtype=torch.long)
    for counts in map(torch.tensor, ([2, 3, 1], [3, 1, 0], [1, 2, 4])):
        most = int(counts.max())
        tokens = torch.tensor(SPEECH).gather(1, (read[:, None] + torch.arange(most)).clamp(max=11))
        hidden = reader.read(
            cache,
            tokens,
            int(cache.lengths.max()),
            real=real_positions(counts, most) if real else None,
        )
        cache.lengths = cache.lengths + counts
        read += counts
        for row, count in enumerate(counts):
            found[row] += [*hidden[row, :count]]
    spoken = [
        [*prompt, *speech[:count]]
        for prompt, speech, count in zip(PROMPTS, SPEECH, read.tolist(), strict=True)
    ]
    for row, speech in enumerate(spoken):
        assert near(torch.stack(found[row]), plain(TEXTS[row], speech), tolerance)

    nodes, tree, roots = [5, 7, 8, 2, 11], DraftTree([-1, -1, 0, 1, 2]), [1, 2, 4]
    paths = [[0], [1], [0, 2], [1, 3], [0, 2, 4]]
    tokens = torch.tensor([[root, *nodes] for root in roots])
    hidden = reader.read(cache, tokens, int(cache.lengths.max()), tree.layout)
    for row, root in enumerate(roots):
        for node, path in enumerate(paths):
            states = plain(TEXTS[row], [*spoken[row], root, *(nodes[i] for i in path)])
            assert near(hidden[row, 1 + node], states[-1], tolerance)
    kept = ([0, 2, 4], [1], [1, 3])  # nodes of each row
    cache.lengths = cache.lengths + 1
    cache.gather(cache.lengths, pad(kept, "cpu")[0])
    cache.lengths = cache.lengths + torch.tensor([len(path) for path in kept])
    last = reader.read(cache, torch.tensor([[10], [3], [6]]), int(cache.lengths.max()))
    for row, (root, path, token) in enumerate(zip(roots, kept, (10, 3, 6), strict=True)):
        states = plain(TEXTS[row], [*spoken[row], root, *(nodes[i] for i in path), token])
        assert near(last[row, 0], states[-1], tolerance)


def plain_of(model: CARDecoder) -> Callable[[list[int], list[int]], Tensor]:
    @torch.no_grad()
    def plain(text: list[int], speech: list[int]) -> Tensor:
        prompt = PROMPTS[TEXTS.index(text)]
        return model.speech_hidden(speech_batch([text], [speech], [len(prompt)]))[0]

    return plain


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-6), (torch.bfloat16, 0.1)]
)
@pytest.mark.parametrize(
    "changes", [{}, dict(bos=False), dict(num_attention_heads=3, hidden_size=36)]
)
def test_every_row_has_the_states_of_its_plain_sequence(changes, dtype, tolerance, real):
    """In C, and in PyTorch (float64)."""
    exact = tiny_decoder(**changes)
    reader = reader_of(tiny_decoder(**changes).to(dtype))
    assert (type(reader.backend) is Backend) == (dtype != torch.float32)
    check(reader, plain_of(exact), tolerance, real)


def test_without_a_c_compiler(monkeypatch):
    exact = tiny_decoder()
    monkeypatch.setattr("dcar.decoding.cpu.backend.kernels", lambda: None)
    reader = reader_of(tiny_decoder())
    assert type(reader.backend) is Backend
    check(reader, plain_of(exact))


def test_a_reader_is_made_anew_where_weights_have_changed():
    model = tiny_decoder()
    reader = reader_of(model)
    assert reader_of(model) is reader is reader_of(reader)
    with torch.no_grad():
        model.layers[0].up.weight.mul_(1.5)
    assert reader_of(model) is not reader
    check(reader_of(model), plain_of(model))
    model.layers[1] = nn.Identity()
    with pytest.raises(ConfigError, match="CARDecoder"):
        reader_of(model)


def test_a_cache_refuses_more_than_it_holds():
    reader = reader_of(tiny_decoder())
    cache, _ = prefilled(reader, capacity=8)
    with pytest.raises(ValueError, match="6 . 3 .*8"):
        reader.read(cache, torch.zeros(3, 3, dtype=torch.long), 6)
