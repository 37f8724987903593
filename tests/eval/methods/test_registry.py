"""Methods by name: what a name means, what cannot be, and the models that a method needs."""

from operator import attrgetter

import pytest
import torch
from compare_worker import scored_policy, tiny_policy
from tiny_decoders import tiny_decoder
from tiny_verifiers import tiny_statistics

from dcar.decoding import Method, decode
from dcar.errors import CheckpointError, ConfigError
from dcar.methods import Models, load_models, make_methods
from dcar.model.draft import build_draft
from dcar.sampling import SamplingConfig
from dcar.sources.code import code_digest
from eval.methods.families import family_of
from eval.verifiers.drafters import HeadDrafter, ModelDrafter
from eval.verifiers.entropy import EntropyChunk
from eval.verifiers.mtp_viterbi import MTPViterbi
from eval.verifiers.pcg import GroupVerifier
from eval.verifiers.sd import SpeculativeDecoding
from eval.verifiers.ssd import TolerantDecoding
from eval.verifiers.topk_verify import TopKVerify
from eval.verifiers.typical import TypicalAcceptance
from eval.verifiers.vadusa import Vadusa, chain
from heads.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def models() -> dict[str, Models]:
    decoder = tiny_decoder()
    statistics = tiny_statistics(decoder=decoder.checksum(), tokenizer=decoder.config.tokenizer)
    return {
        "all": Models(
            decoder,
            tiny_decoder(heads=1, seed=5),
            {"": tiny_policy()},
            build_draft(decoder).eval(),
            statistics,
            {"other": tiny_decoder(heads=6, seed=7)},
        ),
        "bare": Models(decoder),
        "one head": Models(tiny_decoder(heads=1)),
        "two heads": Models(tiny_decoder(heads=2)),
        "scored": Models(decoder, policies={"": scored_policy(decoder)}),
        "two policies": Models(decoder, policies={"a": tiny_policy(), "b": tiny_policy(1)}),
    }


STRICT, LOOSE = {"eos": False}, {"eos": True}


@pytest.mark.parametrize(
    ("name", "kind", "drafter", "length", "settings"),
    [
        ("sd", SpeculativeDecoding, HeadDrafter, 3, {}),
        ("sd:2", SpeculativeDecoding, HeadDrafter, 2, {}),
        ("ssd-0.4@draft:4", TolerantDecoding, ModelDrafter, 4, {"beta": 0.4, **STRICT}),
        ("ssd-0.4-eos", TolerantDecoding, HeadDrafter, 3, {"beta": 0.4, **LOOSE}),
        ("pcg--0.2", GroupVerifier, HeadDrafter, 3, {"theta": -0.2}),
        ("typical", TypicalAcceptance, HeadDrafter, 3, {"epsilon": 0.09, "delta": 0.3, **STRICT}),
        (
            "typical-0.1-0.4-eos@draft",
            TypicalAcceptance,
            ModelDrafter,
            3,
            {"epsilon": 0.1, "delta": 0.4, **LOOSE},
        ),
        ("topk-verify-50", TopKVerify, HeadDrafter, 3, {"k": 50, **STRICT}),
        ("vadusa-2-chain", Vadusa, None, 0, {"tau": 2, "ranks": chain(3)}),
        ("mtp-viterbi-3", MTPViterbi, None, 0, {"heads": 3, "k": 3}),
        ("entropy-0.8", EntropyChunk, None, 0, {"threshold": 0.8}),
    ],
)
def test_names_say_what_they_mean(models, name, kind, drafter, length, settings):
    (entry,) = make_methods([name], models["all"])
    method = entry.method
    assert type(method) is kind and method.name == name
    assert {setting: attrgetter(setting)(method) for setting in settings} == settings
    if drafter:
        assert type(method.drafter) is drafter and method.draft_length == length


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sd-0.1", "draft, length and temperature"),
        ("sd@model", "draft .*'model'"),
        ("sd:0", ": length "),
        ("ssd-a", "'ssd-a' .*ssd-0.4.*beta, eos, draft, length"),
        ("ssd--0.1", ": beta .*-0.1"),
        ("ssd-1e999", ": beta .*inf"),
        ("pcg--1", ": theta .*-1$"),
        ("typical-0-0.3", ": epsilon "),
        ("topk-verify-2.5", ": k .*2.5"),
        ("sd:4", "'sd:4': .* 3 "),
        ("car", ": size .*car-3"),
        ("car-99", "'car-99': .*1..4"),
        ("speculative", "'speculative'.* far, car-3"),
        ("dcar@x@d1", "dcar@.*'dcar'"),
        ("random-4-2", "random-2-4$"),
        ("random-3-2-2", "random-2-2-3$"),
        ("end-on-confident-3-3", "-3-3.*end-on-confident-4-7"),
        ("end-on-confident-3-9", "1..4"),
        ("entropy", ": .*entropy-0.8"),
        ("entropy-0.8@3.0", ": .*entropy-0.8"),
        ("vadusa-2-n4-chain", "-n4-chain.*vadusa-2-n32"),
        ("mtp-viterbi-5", "size 5 .*1..4"),
        ("mtp-viterbi-3-14", "k = 14 .*13"),
        ("dcar@n4", "chunk_scorer"),
        ("best-of-2-4", "policies.*chunk_scorer"),
    ],
)
def test_names_that_cannot_be_are_refused(models, name, message):
    with pytest.raises(ConfigError, match=message):
        make_methods([name], models["all"])


@pytest.mark.parametrize(
    ("which", "name", "message"),
    [
        ("bare", "far", "far_decoder"),
        ("bare", "car-2:other", "'car-2:other': no decoder 'other' .*known: none"),
        ("all", "car-2:another", "known: other"),
        ("all", "car-7:other", "predicts 1..6 tokens"),
        ("bare", "dcar", "policies"),
        ("bare", "sd@draft", "'sd@draft': .*`dcar train-draft`"),
        ("bare", "vadusa-2", "`dcar fit-verifiers`"),
        ("bare", "mtp-viterbi-3", "`dcar fit-verifiers`"),
        ("bare", "entropy@2", "'entropy@2': .*`dcar fit-verifiers`"),
        ("one head", "sd", "'sd': .* 0 "),
        ("one head", "entropy-1", "'entropy-1': .*heads"),
        ("one head", "vadusa-2-chain", "'vadusa-2-chain': .*heads"),
        ("scored", "best-of-99-4", "1..4"),
        ("scored", "best-of-2-1", "num_candidates .*not 1"),
    ],
)
def test_methods_without_their_models_are_refused(models, which, name, message):
    with pytest.raises(ConfigError, match=message):
        make_methods([name], models[which])


def test_models_belong_together():
    with pytest.raises(ConfigError, match="twice"):
        make_methods(["car-1", "car-1"], Models(tiny_decoder()))
    with pytest.raises(CheckpointError, match="policy .*000000000000"):
        Models(tiny_decoder(), policies={"": tiny_policy(base="0" * 64)})
    with pytest.raises(ConfigError, match="speech_vocab_size"):
        Models(tiny_decoder(), tiny_decoder(heads=1, speech_vocab_size=13))
    with pytest.raises(ConfigError, match="decoder 'other' has speech_vocab_size 13"):
        Models(tiny_decoder(), decoders={"other": tiny_decoder(speech_vocab_size=13)})


def test_a_fixed_size_may_decode_with_another_decoder(models, prompts):
    """Its tokens and its identity are those of a comparison with that decoder, which may have more
    heads."""
    own, other = make_methods(["car-2", "car-6:other@t0.5"], models["all"])
    assert other.spec.to_mapping() == {
        "method": "car",
        "size": 6,
        "decoder": "other",
        "temperature": 0.5,
    }
    (alone,) = make_methods(["car-6@t0.5"], Models(models["all"].decoders["other"]))
    assert other.identity == alone.identity != own.identity
    assert [r.tokens for r in other.decode(prompts, 3)] == [
        r.tokens for r in alone.decode(prompts, 3)
    ]
    family = family_of(other.settings)
    assert (family.label, family.decoder) == ("CAR-k (other decoder, T 0.5)", "other")


def test_every_verifier_runs_under_its_name(models, prompts):
    names = (
        "sd sd@draft ssd-0.4 ssd-0.4@draft:2 pcg-0.42 pcg-0.42@draft typical "
        "topk-verify-50 vadusa-1-chain vadusa-2-n4 mtp-viterbi-3 entropy@2"
    ).split()
    entries = make_methods(names, models["all"])
    assert [e.name for e in entries] == names
    assert entries[8].identity == {
        "decoder": models["all"].decoder.checksum(),
        "code": code_digest(Vadusa, Method)[:16],
    }
    assert len(entries[9].method.ranks.paths) == 4
    for entry in entries:
        assert entry.identity["decoder"] == models["all"].decoder.checksum()
        assert ("draft" in entry.identity) == ("@draft" in entry.name)
        results = decode(entry.decoder, prompts, entry.method, SamplingConfig(max_tokens=20))
        assert {r.method for r in results} == {entry.name}
        if entry in entries[:8]:
            most = 2 if ":2" in entry.name else 3
            assert max(p for r in results for p in r.proposed) == most


def test_rules_and_dials_by_name(models):
    names = "end-on-confident-2-4 dcar@a@d0.5 dcar@a dcar@b@d-1@t0.4 dcar-sampled@d0.5".split()
    entries = make_methods(names, models["two policies"])
    assert [e.name for e in entries] == [*names[:-1], "dcar-sampled@a@d0.5", "dcar-sampled@b@d0.5"]
    sure, turned, plain, cold, *_ = (e.method for e in entries)
    assert (sure.shortest, sure.longest) == (2, 4)
    assert (turned.dial, plain.dial, cold.dial) == (0.5, 0.0, -1.0) and entries[
        3
    ].sampling.temperature == 0.4
    assert entries[1].identity == entries[2].identity
    (shuffled,) = make_methods(["dcar-shuffled@b@d-1"], models["two policies"])
    assert shuffled.method.rule.dial == -1.0
    several = make_methods(["dcar", "dcar-sampled@b"], models["two policies"])
    assert [e.name for e in several] == ["dcar@a", "dcar@b", "dcar-sampled@b"]


def test_draws_stand_in_names_of_methods_that_can_tell_them_apart(models, prompts):
    both = models["scored"]
    entries = make_methods(["dcar", "dcar@n4", "dcar-sampled@n4@d0.5", "best-of-2-4"], both)
    one, four, _, fixed = entries
    rules = [entry.method for entry in entries]
    seen = [(s.num_candidates, getattr(s, "dial", None)) for s in rules]
    assert seen == [(1, 0.0), (4, 0.0), (4, 0.5), (4, None)]
    assert four.identity == one.identity
    assert (
        fixed.identity["chunk_scorer"] == both.policies[""].chunk_scorer.checksum()
        and rules[3].longest == 2
    )
    results = decode(both.decoder, prompts[:2], four.method, SamplingConfig(max_tokens=20))
    assert all(r.method == "dcar@n4" and r.tokens for r in results)


def test_the_checksum_of_a_model_is_computed_once_for_its_weights(monkeypatch):
    decoder, far = tiny_decoder(), tiny_decoder(heads=1, seed=5)
    policy, hashed, checksum = scored_policy(decoder), [], Checkpoint.checksum
    monkeypatch.setattr(
        Checkpoint, "checksum", lambda model: hashed.append(model) or checksum(model)
    )
    everything = Models(decoder, far, {"": policy})
    names = ["far", "car-2", "car-3", "dcar", "dcar@n4", "best-of-2-4", "car-2@t0.5"]
    before = make_methods(names, everything)
    assert len(hashed) == len(set(hashed)) == 4 and policy.chunk_scorer in hashed
    assert before[1].identity["decoder"] == checksum(decoder)
    with torch.no_grad():
        decoder.norm.bias[0] += 1e-3  # trained
        far.norm.bias = torch.nn.Parameter(far.norm.bias + 1e-3)  # replaced
    policy.half()  # rounded
    after = make_methods(names, everything)
    assert hashed[4:] == [far, decoder, policy, policy.chunk_scorer]
    for a, b in zip(before, after, strict=True):
        assert a.identity["decoder"] != b.identity["decoder"]
        assert "policy" not in a.identity or a.identity["policy"] != b.identity["policy"]


def test_draft_of_another_decoder_is_refused(tmp_path):
    mine, other = tiny_decoder(), tiny_decoder(seed=1)
    with pytest.raises(CheckpointError, match="draft .*dcar train-draft"):
        Models(mine, draft=build_draft(other))
    with pytest.raises(ConfigError, match="text_vocab_size 21.* 20"):
        Models(mine, draft=build_draft(tiny_decoder(text_vocab_size=21)))
    with pytest.raises(ConfigError, match="bos False.*True"):
        Models(mine, draft=tiny_decoder(bos=False))
    mine.save_pretrained(tmp_path / "decoder")
    build_draft(mine).save_pretrained(tmp_path / "draft")
    loaded = load_models(str(tmp_path / "decoder"), "", [], draft=str(tmp_path / "draft"))
    assert loaded.draft is not None and loaded.draft.config.inherited_layers == (0, 1)
    assert load_models(str(tmp_path / "decoder"), "", []).draft is None


def test_any_decoder_of_the_same_ids_may_draft(tmp_path):
    target = tiny_decoder(num_layers=3)
    small = tiny_decoder(heads=1, seed=5, num_layers=1, hidden_size=16)
    target.save_pretrained(tmp_path / "target")
    small.save_pretrained(tmp_path / "small")
    models = load_models(str(tmp_path / "target"), "", [], draft=str(tmp_path / "small"))
    (entry,) = make_methods(["sd@draft:2"], models)
    assert entry.identity["draft"] == small.checksum()
    build_draft(target, 1, 1).save_pretrained(tmp_path / "draft")
    # "draft only" is a row of the papers' tables
    alone = load_models(str(tmp_path / "draft"), "", [])
    assert alone.decoder.config.num_layers == 2 and len(make_methods(["car-1"], alone)) == 1
