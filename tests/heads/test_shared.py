"""Shared heads: the formula, one offset at a time, what belongs to an offset, settings that
contradict each other."""

import pytest
import torch
import torch.nn.functional as F
from tiny_decoders import draw_blocks, sharpen_heads

from dcar.errors import ConfigError
from dcar.model.car import CARConfig, CARDecoder
from heads.build import build_heads, head_costs
from heads.multi_token import MultiTokenHeads
from heads.shared import SharedHeads


def made(size: int = 16, out: int = 11, heads: int = 5, **changes) -> SharedHeads:
    torch.manual_seed(0)
    shared = SharedHeads(size, out, heads, **{"blocks": 3, **changes}).requires_grad_(False)
    sharpen_heads(draw_blocks(shared), 3)
    return shared


@pytest.mark.parametrize("changes", [{}, dict(base_bias=True), dict(blocks=1)])
def test_the_formula_and_that_no_offset_depends_on_how_many_are_asked_for(changes):
    heads, hidden = made(**changes), torch.randn(2, 3, 16)
    full = heads.logits(hidden)
    assert full.shape == (2, 3, 5, 11)
    # k = 1 is the base head
    assert torch.equal(heads.logits(hidden, 1)[..., 0, :], heads.base(hidden))
    for k in range(1, 6):
        assert torch.allclose(heads.logits(hidden, k), full[..., :k, :], atol=1e-5)
    own = torch.randn(4, 7, 16)  # states of their own
    for head, logits in enumerate(heads(own), start=2):
        assert torch.allclose(logits, heads.logits(own[head - 2])[:, head - 1], atol=1e-5)
    z = hidden + heads.offset[2]
    for i in range(heads.blocks):
        inner = z @ heads.up[i].weight.T * (1 + heads.scale[i, 2]) + heads.shift[i, 2]
        z = z + F.silu(inner) @ heads.down[i].weight.T + heads.down[i].bias
    normed = F.layer_norm(z, (16,), heads.norm.weight, heads.norm.bias)
    assert torch.allclose(full[..., 3, :], normed @ heads.out.weight.T, atol=1e-5)
    assert (full[..., 1, :] - full[..., 4, :]).abs().max() > 0.1  # the offsets do differ


def test_the_stack_begins_as_the_identity_and_its_output_as_the_base_head():
    heads, hidden = SharedHeads(16, 11, 5).requires_grad_(False), torch.randn(4, 16)
    for k in (2, 5):
        plain = F.layer_norm(hidden + heads.offset[k - 2], (16,))
        assert torch.allclose(heads.logits(hidden, k)[:, -1], heads.base(plain), atol=1e-5)
    heads.start_outputs(torch.ones(4, 16))
    assert (heads.out.weight[:4] == 1).all()
    assert torch.equal(heads.out.weight[4:], heads.base.weight[4:])


def test_little_belongs_to_an_offset():
    """Bytes of a step hardly grow with k: three vectors a block and offset, against blocks and a
    projection."""
    few, many = made(64, 100, 7), made(64, 100, 16)
    costs = head_costs(many)
    sizes = [sum(p.numel() for p in heads.parameters()) for heads in (few, many)]
    assert sizes[1] - sizes[0] == 9 * costs.each == 9 * (64 + 2 * 3 * 128)
    assert sizes[1] == many.base.weight.numel() + costs.read(16)
    independent = head_costs(MultiTokenHeads(64, 100, 16, 3))
    assert independent.once == 0 and independent.read(16) > 4 * costs.read(16)
    assert costs.read(1) == 0


def test_a_decoder_has_the_heads_of_its_configuration(tmp_path):
    config = CARConfig(20, 12, 32, 2, 2, 64, 6, heads="shared", head_blocks=2)
    decoder = CARDecoder(config)
    assert isinstance(decoder.heads, SharedHeads) and len(decoder.heads.up) == 2
    decoder.save_pretrained(tmp_path)
    again = CARDecoder.from_pretrained(tmp_path)
    assert again.config == config and again.checksum() == decoder.checksum()
    assert isinstance(build_heads(CARConfig(hidden_size=32)), MultiTokenHeads)
    with pytest.raises(ConfigError, match="independent"):
        CARConfig(heads="medusa")
