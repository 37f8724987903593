"""Multi-token heads in C equal PyTorch's. How they speak: test_oracle.py."""

import copy

import pytest
import torch
from test_native import near
from tiny_decoders import sharpen_heads

from dcar.decoding.cpu import native as module
from dcar.decoding.cpu.backend import cpu_backend
from dcar.decoding.cpu.heads import native_heads
from dcar.decoding.cpu.native import Kernels
from heads.build import Heads
from heads.multi_token import MultiTokenHeads
from heads.shared import SharedHeads

KINDS = {
    "independent": {}, "independent, one block": dict(blocks=1), "independent, biased": dict(base_bias=True),
    "independent, shared blocks": dict(share_blocks=True), "shared": {}, "shared, tied": dict(tie=True),
    "shared, tied, biased": dict(tie=True, base_bias=True), "shared, width": dict(width=50, blocks=3)}


def made(kind: str, size: int, out: int) -> Heads:
    """Six heads whose every weight counts."""
    torch.manual_seed(size)
    build = SharedHeads if kind.startswith("shared") else MultiTokenHeads
    heads = build(size, out, 6, **{"blocks": 2, "zero_init": False, **KINDS[kind]}).requires_grad_(False)
    if isinstance(heads, SharedHeads):
        sharpen_heads(heads, 1)
        torch.nn.init.normal_(heads.norm.weight, 1, 0.3)
        torch.nn.init.normal_(heads.norm.bias, 0, 0.3)
    return heads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size, out", [(64, 48), (40, 70), (33, 7), (24, 1030)])
def test_c_equals_pytorch(own, size, out, kind):
    """Widths that fill vectors and that do not; a row's logits depend neither on other rows nor on how many heads."""
    heads = made(kind, size, out).to(own.dtype)
    logits, exact = native_heads(own, heads), copy.deepcopy(heads).float()
    for rows in (1, 2, 5, 8, 20):
        x = torch.randn(rows, size).to(own.dtype)
        for k in (1, 6):
            assert near(logits(x, k), exact(x.float(), k)), (rows, k)
    whole, alone = logits(x[:4], 6), torch.cat([logits(row[None], 6) for row in x[:4]])
    assert torch.equal(whole, alone)
    for k in (1, 2, 5):
        assert torch.equal(logits(x[:4], k), whole[:, :k])
    for k in (0, 7):
        with pytest.raises(ValueError, match=f"asked for {k} heads of a model that has 6"):
            logits(x, k)
    for bad in (x[:, 1:], x.to(torch.float64)):
        with pytest.raises(TypeError, match="cannot be multiplied by a weight"):
            logits(bad, 2)


@pytest.mark.parametrize("kind", ["independent", "shared"])
def test_threads_share_the_heads(own, kind, monkeypatch):
    heads = native_heads(own, made(kind, 256, 1030).to(own.dtype))
    x = torch.randn(5, 256).to(own.dtype)
    alone = heads(x, 6)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 3)
    assert torch.equal(heads(x, 6), alone)


def test_what_the_kernels_cannot_read():
    own = Kernels(torch.float32)
    assert native_heads(own, made("shared", 32, 7)) is not None
    wrapped, quantised, transposed, normed = made("independent", 32, 7), *(made("shared", 32, 7) for _ in range(3))
    wrapped.base = torch.nn.Sequential(wrapped.base)
    wrapped.base.weight = wrapped.base[0].weight
    quantised.up[1] = torch.nn.Sequential(quantised.up[1])
    transposed.down[0].weight.data = transposed.down[0].weight.data.t().contiguous().t()
    normed.norm = torch.nn.RMSNorm(32)
    other = made("shared", 32, 7)
    for bad in (wrapped, quantised, transposed, normed, other.bfloat16(), copy.deepcopy(other).float().to("meta")):
        assert native_heads(own, bad) is None


@pytest.mark.parametrize("large", [1 << 19, 1])
@pytest.mark.parametrize("kind", ["independent", "independent, shared blocks", "shared", "shared, tied"])
@pytest.mark.parametrize("shape", [(32,), (1, 32), (3, 32), (2, 4, 32), (60, 32)])
def test_heads_of_a_backend(shape, kind, large, monkeypatch):
    """Few rows and many, by weights that are copied and by weights where they lie."""
    monkeypatch.setattr(module, "LARGE", large)
    heads = made(kind, 32, 13)
    hidden, logits = torch.randn(shape), cpu_backend(torch.float32).heads(heads)
    for k in (1, 2, 6, None):
        assert torch.allclose(logits(hidden, k), heads(hidden, k), atol=1e-5)
    with pytest.raises(ValueError, match="asked for 7 heads"):
        logits(hidden, 7)
