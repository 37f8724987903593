"""Batches of waveforms by length, and the precision of encoders on a GPU."""

import pytest
import torch

from dcar.tokens.base import by_length, full_float32, in_batches


def test_batches_hold_no_more_than_allowed_or_one_waveform():
    lengths = [5, 30, 5, 4, 10, 5]
    assert list(by_length(lengths, 15)) == [[3, 0, 2], [5], [4], [1]]
    assert list(by_length(lengths, 15, equal=True)) == [[3], [0, 2, 5], [4], [1]]
    assert in_batches(lengths, 15, lambda rows: [lengths[i] for i in rows]) == list(lengths)
    with pytest.raises(ValueError, match="zip"):
        in_batches(lengths, 15, lambda rows: rows[1:])
    assert list(by_length(lengths, 10, equal=True)) == [[3], [0, 2], [5], [4], [1]]
    assert list(by_length([], 15)) == []


def test_float32_is_full_in_the_block_only_whatever_happens_there(monkeypatch):
    cudnn = torch.backends.cudnn
    before = torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision
    with pytest.raises(KeyError), full_float32():
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert {cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision} == {"ieee"}
        raise KeyError
    assert (torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision) == before
