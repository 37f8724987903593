"""Names of verifying methods in a comparison, and the models that they need."""

from __future__ import annotations

import pytest
import torch
from tiny_decoders import tiny_decoder

from dcar.decoding import decode
from dcar.errors import CheckpointError, ConfigError
from dcar.model.draft import build_draft
from dcar.sampling import SamplingConfig
from eval.methods.registry import Models, load_models, make_methods
from eval.verifiers.drafters import HeadDrafter, ModelDrafter
from eval.verifiers.pcg import GroupVerifier
from eval.verifiers.sd import SpeculativeDecoding
from eval.verifiers.ssd import TolerantDecoding
from eval.verifiers.topk_verify import TopKVerify
from eval.verifiers.typical import TypicalAcceptance


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DCAR_CACHE", str(tmp_path))


@pytest.fixture
def models() -> Models:
    decoder = tiny_decoder()
    return Models(decoder, draft=build_draft(decoder).eval())


@pytest.mark.parametrize("name, kind, drafter, length, settings", [
    ("sd", SpeculativeDecoding, HeadDrafter, 3, {}),
    ("sd:2", SpeculativeDecoding, HeadDrafter, 2, {}),
    ("ssd-0.4@draft:4", TolerantDecoding, ModelDrafter, 4, {"beta": 0.4, "eos_strict": True}),
    ("ssd-0.4-eos", TolerantDecoding, HeadDrafter, 3, {"beta": 0.4, "eos_strict": False}),
    ("ssd-1e-3@heads", TolerantDecoding, HeadDrafter, 3, {"beta": 0.001, "eos_strict": True}),
    ("pcg--0.2", GroupVerifier, HeadDrafter, 3, {}),
    ("typical", TypicalAcceptance, HeadDrafter, 3, {"epsilon": 0.09, "delta": 0.3, "eos_strict": True}),
    ("typical-0.1-0.4-eos@draft", TypicalAcceptance, ModelDrafter, 3,
     {"epsilon": 0.1, "delta": 0.4, "eos_strict": False}),
    ("topk-verify-50", TopKVerify, HeadDrafter, 3, {"k": 50, "eos_strict": True}),
])
def test_names_say_what_they_mean(models, name, kind, drafter, length, settings):
    (entry,) = make_methods([name], models)
    method = entry.build()
    assert type(method) is kind and type(method.drafter) is drafter and method.draft_length == length
    assert {setting: getattr(method, setting) for setting in settings} == settings
    if kind is GroupVerifier:
        assert method.groups.theta == -0.2


@pytest.mark.parametrize("name, message", [
    ("sd-0.1", "0 parameters|1 parameters"), ("sd@model", "@heads or @draft"), ("sd:0", "at least 1 token"),
    ("sd:x", "write sd"), ("ssd", "0 parameters instead of 1; write ssd-0.4"), ("ssd-a", "write ssd-0.4"),
    ("ssd--0.1", "must be a number >= 0"), ("pcg-1.5", "cosine in"), ("pcg--1", "cosine in"), ("pcg-0.4-eos", "-eos"),
    ("typical-0.09", "1 parameters"), ("typical-0-0.3", "epsilon"), ("topk-verify", "write topk-verify-50"),
    ("topk-verify-2.5", "whole number"), ("topk-verify-0", "at least 1"), ("sd:4", "3 additional heads"),
    ("topk-50", "unknown method"), ("ssd-nan", "write ssd-0.4"),
    ("car-2@d1", "only methods that ask a policy take a dial"), ("car-99", "chunk sizes of this decoder are"),
    ("random-2-3@n4", "only methods that ask a policy take a dial"),
])
def test_names_that_cannot_be_are_refused(models, name, message):
    with pytest.raises(ConfigError, match=message):
        make_methods([name], models)


def test_every_kind_runs_under_its_name(models, prompts):
    names = ["sd", "sd@draft", "ssd-0.4", "ssd-0.4@draft:2", "pcg-0.42", "pcg-0.42@draft", "typical", "topk-verify-50"]
    entries = make_methods(names, models)
    assert [e.name for e in entries] == names
    assert len({tuple(sorted(e.identity.items())) + (e.name,) for e in entries}) == len(names)
    for entry in entries:
        assert entry.identity["decoder"] == models.decoder.checksum()
        assert ("draft_model" in entry.identity) == ("@draft" in entry.name)
        results = decode(entry.decoder, prompts, entry.build(), SamplingConfig(max_tokens=20))
        assert {r.method for r in results} == {entry.name}
        most = 2 if ":2" in entry.name else 3
        assert max(p for r in results for p in r.rounds_proposed) == most


def test_default_length_is_what_few_heads_allow(prompts):
    models = Models(tiny_decoder(heads=2))
    (entry,) = make_methods(["sd"], models)
    assert entry.build().draft_length == 1
    with pytest.raises(ConfigError, match="0 additional heads"):
        make_methods(["sd"], Models(tiny_decoder(heads=1)))
    with pytest.raises(ConfigError, match="needs a draft model"):
        make_methods(["sd@draft"], models)


def test_draft_of_another_decoder_is_refused(tmp_path):
    mine, other = tiny_decoder(), tiny_decoder(seed=1)
    with pytest.raises(CheckpointError, match="was made for the decoder"):
        Models(mine, draft=build_draft(other))
    with pytest.raises(ConfigError, match="text_vocab_size 21, the target 20"):
        Models(mine, draft=build_draft(tiny_decoder(text_vocab_size=21)))
    mine.save_pretrained(tmp_path / "decoder")
    build_draft(mine).save_pretrained(tmp_path / "draft")
    loaded = load_models(str(tmp_path / "decoder"), "", [], draft=str(tmp_path / "draft"))
    assert loaded.draft is not None and loaded.draft.config.inherited_layers == (0, 1)
    assert load_models(str(tmp_path / "decoder"), "", []).draft is None


def test_any_decoder_of_the_same_ids_may_draft(tmp_path):
    target, small = tiny_decoder(num_layers=3), tiny_decoder(heads=1, seed=5, num_layers=1, hidden_size=16)
    target.save_pretrained(tmp_path / "target")
    small.save_pretrained(tmp_path / "small")
    models = load_models(str(tmp_path / "target"), "", [], draft=str(tmp_path / "small"))
    (entry,) = make_methods(["sd@draft:2"], models)
    assert entry.identity["draft_model"] == small.checksum()
    build_draft(target, 1, 1).save_pretrained(tmp_path / "draft")
    alone = load_models(str(tmp_path / "draft"), "", [])  # "draft only" is a row of the papers' tables
    assert alone.decoder.config.num_layers == 2 and len(make_methods(["car-1"], alone)) == 1
    with pytest.raises(ConfigError, match="bos False, the target True"):
        Models(target, draft=tiny_decoder(bos=False))


def test_groups_are_built_once_and_bound_to_the_decoder(models, tmp_path, monkeypatch):
    make_methods(["pcg-0.1", "pcg-0.1@draft"], models)
    assert len(list((tmp_path / "groups").iterdir())) == 1
    with torch.no_grad():
        models.decoder.speech_embedding.weight.mul_(1.5)
    make_methods(["pcg-0.1"], Models(models.decoder))
    assert len(list((tmp_path / "groups").iterdir())) == 2
