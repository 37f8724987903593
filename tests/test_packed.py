"""Weights that are kept once: the layout of decoding in the place of the checkpoint's."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from conftest import tiny_decoder

from dcar.decoding import ChunkMethod, FixedChunk, PolicyChunk, decode
from dcar.decoding.fused import affine
from dcar.decoding.packed import PackedLinear, pack_weights
from dcar.decoding.quantize import quantize_int8
from dcar.decoding.static import engine_for
from dcar.errors import ConfigError
from dcar.model import CARDecoder
from dcar.sampling import SamplingConfig
from heads.policy import ChunkPolicy, ChunkPolicyConfig

SAMPLING = SamplingConfig(max_tokens=40, max_tokens_per_text_unit=6)
WIDE = dict(hidden_size=256, ffn_size=2048, num_layers=3)  # `up` and `down` are large enough to be packed


def tensors() -> list[torch.Tensor]:
    gc.collect()
    return [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.device.type != "meta"]


def held_bytes(others: list[torch.Tensor]) -> int:
    """Bytes of the tensors that are alive beside `others` (of tests before this one), each storage once; packed ones
    have no storage, but the same size."""
    known = {id(t) for t in others}
    plain, packed = {}, 0
    for thing in tensors():
        if id(thing) in known:
            continue
        if thing.layout == torch._mkldnn:
            packed += 4 * thing.numel()
        elif thing.layout == torch.strided:
            storage = thing.untyped_storage()
            plain[storage.data_ptr()] = storage.nbytes()
    return sum(plain.values()) + packed


@pytest.fixture(params=["packed", "stored"])
def layout(request, monkeypatch) -> str:
    """Every weight through oneDNN, or none."""
    monkeypatch.setattr("dcar.decoding.packed.PACK_FROM", 1 if request.param == "packed" else 1 << 60)
    return request.param


def test_an_engine_of_packed_weights_holds_them_once(prompts):
    """Of the issue: weights and KV at most 1.2 times. Without packing, the engine's copies come on top."""
    others = tensors()
    model = tiny_decoder(**WIDE)
    for rotary in (model.speech_rotary, model.text_rotary):
        rotary.table(torch.device("cpu"))  # a constant, made at the first use anyhow
    weights = sum(p.nbytes for p in model.parameters())
    empty = held_bytes(others) - weights
    layers = 4 * sum(p.numel() for p in model.layers.parameters() if p.dim() > 1)
    assert layers > 0.5 * weights
    copies = engine_for(model, prompts[:1], SAMPLING, batch=1)
    cache = copies.cache.kv.nbytes
    assert held_bytes(others) - empty > weights + layers  # both are alive
    del copies
    pack_weights(model)
    assert any(isinstance(m, PackedLinear) for m in model.modules())
    assert held_bytes(others) - empty <= weights + 4096
    engine = engine_for(model, prompts[:1], SAMPLING, batch=1)
    engine.decode(prompts[:1], ChunkMethod(FixedChunk(3)), SAMPLING)
    assert held_bytes(others) - empty <= 1.2 * (weights + cache)


def test_engine_and_loop_of_packed_weights_speak_the_same(decoder, prompts, layout):
    policy = ChunkPolicy(ChunkPolicyConfig(32, 4, 16, num_attention_heads=2)).eval()
    torch.nn.init.normal_(policy.output.weight, std=0.5)
    method = ChunkMethod(PolicyChunk(policy, "sample"))
    expected = decode(decoder, prompts, method, SAMPLING, seed=3, record_hidden=True)
    pack_weights(decoder)
    assert any(isinstance(m, PackedLinear) for m in decoder.modules()) == (layout == "packed")
    engine = engine_for(decoder, prompts, SAMPLING, batch=3, policy=policy)
    for results in (decode(decoder, prompts, method, SAMPLING, seed=3, record_hidden=True),
                    engine.decode(prompts, method, SAMPLING, seed=3, record_hidden=True)):
        for got, wanted in zip(results, expected, strict=True):
            assert (got.tokens, got.actions) == (wanted.tokens, wanted.actions)
            assert torch.allclose(got.hidden, wanted.hidden, atol=1e-5)


def test_checkpoints_and_checksums_stay_as_they_were(decoder, tmp_path, layout):
    checksum, plain = decoder.checksum(), {n: t.clone() for n, t in decoder.state_dict().items()}
    pack_weights(decoder)
    assert decoder.checksum() == checksum
    decoder.save_pretrained(tmp_path)
    loaded = CARDecoder.from_pretrained(tmp_path)
    assert loaded.checksum() == checksum
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, plain[name]), name
    loaded.train()  # a loaded copy is an ordinary one
    assert all(p.is_contiguous() for p in loaded.parameters())


def test_packed_weights_are_for_decoding_only(decoder, monkeypatch):
    decoder.train()
    with pytest.raises(ConfigError, match="eval"):
        pack_weights(decoder)
    decoder.eval()
    monkeypatch.setattr("dcar.decoding.packed.PACK_FROM", 1)
    pack_weights(decoder)
    with pytest.raises(ConfigError, match="cannot be trained; load the model again"):
        decoder.train()
    with pytest.raises(ConfigError, match="bfloat16"):
        decoder.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="packed weights cannot be quantised"):
        quantize_int8(decoder)
    assert copy.deepcopy(decoder).checksum() == decoder.checksum()


needs_bf16 = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here")


@needs_bf16
def test_bfloat16_weights_of_every_size_are_packed():
    model = tiny_decoder().to(torch.bfloat16).eval()
    plain = {n: t.clone() for n, t in model.state_dict().items()}
    layer, x = copy.deepcopy(model.layers[0]), torch.randn(5, 32).to(torch.bfloat16)
    pack_weights(model)
    assert all(isinstance(linear, PackedLinear) for linear in (model.layers[0].qkv, model.layers[0].down))
    close = dict(atol=0.03, rtol=0.02)  # one rounding of a bfloat16 sum
    assert torch.allclose(model.layers[0].qkv(x), layer.qkv(x), **close)
    assert torch.allclose(affine(layer.up)(x), layer.up(x), **close)  # as an engine lays out an unpacked model
    assert all(torch.equal(t, plain[n]) for n, t in model.state_dict().items())
    with pytest.raises(ConfigError, match="stay in torch.bfloat16 on the CPU and cannot go to torch.float32"):
        model.to(torch.float32)
    assert model.to(torch.bfloat16) is model


@needs_bf16
def test_engine_and_loop_in_bfloat16(prompts):
    """As far as they speak the same tokens, their states differ from float32's by bfloat16 rounding."""
    exact = tiny_decoder().eval()
    loop = copy.deepcopy(exact).to(torch.bfloat16)
    packed = copy.deepcopy(loop)
    pack_weights(packed)
    sampling = SamplingConfig(max_tokens=12, min_tokens=12, top_k=1, max_tokens_per_text_unit=6)
    method = ChunkMethod(FixedChunk(4))
    expected = decode(exact, prompts, method, sampling, record_hidden=True)
    engine = engine_for(packed, prompts, sampling, batch=3)
    for results in (decode(loop, prompts, method, sampling, record_hidden=True),
                    engine.decode(prompts, method, sampling, record_hidden=True)):
        compared = 0
        for got, wanted in zip(results, expected, strict=True):
            same = 0
            while same < len(wanted.tokens) and got.tokens[same] == wanted.tokens[same]:
                same += 1
            states = len(wanted.hidden) - len(wanted.tokens) + same  # those that have read equal tokens
            assert (got.hidden[:states].float() - wanted.hidden[:states]).abs().max() < 0.1
            compared += states
        assert compared > 20
