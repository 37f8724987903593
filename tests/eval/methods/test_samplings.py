"""Sampling in the names of methods: every kind, sweeps, families, baselines of the same sampling."""

from __future__ import annotations

import pytest
from compare_worker import scored_policy, tiny_tools
from tiny_decoders import tiny_decoder

from dcar.decoding import decode
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig
from eval.compare.run import CompareConfig
from eval.compare.sweeps import expand_names
from eval.methods.families import group_families, parse_method, short_name
from eval.methods.registry import Models, load_models, make_methods
from eval.methods.samplings import OwnSampling, names_sampling, parse_sampling, split_sampling
from eval.report.table import rival_sentences
from eval.results.rows import make_rows, strict_baseline

COMMON = SamplingConfig(temperature=0.8, top_k=10, max_tokens=20, max_tokens_per_text_unit=4)


@pytest.mark.parametrize(("name", "method", "own"), [
    ("car-5@t0.4", "car-5", OwnSampling(0.4)), ("dcar@t0", "dcar", OwnSampling(0.0)),
    ("sd@t0.8-k10", "sd", OwnSampling(0.8, 10)), ("ssd-0.4@draft@t0.6", "ssd-0.4@draft", OwnSampling(0.6)),
    ("car-3@t0.8-k10-p0.9", "car-3", OwnSampling(0.8, 10, 0.9)),
    ("sd@draft:4@t1-k0", "sd@draft:4", OwnSampling(1.0, 0)),
    ("dcar@range-2-3@t0.4", "dcar@range-2-3", OwnSampling(0.4)),
    ("entropy@3.0@t0-p0.5", "entropy@3.0", OwnSampling(0.0, None, 0.5)),
    ("car-5", "car-5", None), ("dcar@tall", "dcar@tall", None), ("far", "far", None),
])
def test_names_say_their_sampling_and_are_written_back(name, method, own):
    assert split_sampling(name) == (method, own)
    assert (f"{method}@{own.word}" if own else method) == name
    assert own is None or parse_sampling(own.word) == own


@pytest.mark.parametrize("name", ["car-5@t", "car-5@t-1", "car-5@t0.4-x", "car-5@t0.4k10", "car-5@t0.4-p0.9-k10",
                                  "car-5@t0.4@t0.5", "sd@t0.4@draft", "car-5@t.4", "car-5@tuned-2"])
def test_malformed_samplings_are_refused_before_anything_is_loaded(name):
    with pytest.raises(ConfigError, match="write its sampling at the end") as error:
        CompareConfig(methods=[name])
    assert name in str(error.value)


def test_impossible_samplings_are_refused_and_named():
    for name in ("car-3@t0.4-p0", "car-3@t0.4-p1.5"):
        with pytest.raises(ConfigError, match=f"method '{name}'"):
            make_methods([name], tiny_tools().models, COMMON)
    with pytest.raises(ConfigError, match=r"car-1@t0.*repetition_window"):
        make_methods(["car-1@t0"], tiny_tools().models, SamplingConfig(repetition_window=5))


def test_every_kind_takes_a_sampling_and_what_it_leaves_open_is_the_common_one():
    models = tiny_tools().models
    models.draft = tiny_decoder(heads=1, seed=3)
    names = ["far", "car-3", "random-2-3", "dcar", "dcar-sampled", "entropy-0.8", "sd", "ssd-0.4", "pcg-0.1", "typical",
             "vadusa-1-chain", "topk-verify-2", "sd@draft:2"]
    plain = make_methods(names, models, COMMON)
    own = make_methods([f"{n}@t0.5-p0.9" for n in names], models, COMMON)
    assert [e.sampling for e in plain] == [COMMON] * len(names)
    assert {e.sampling for e in own} == {SamplingConfig(0.5, 10, 0.9, max_tokens=20, max_tokens_per_text_unit=4)}
    for a, b in zip(plain, own, strict=True):
        assert b.name == f"{a.name}@t0.5-p0.9"
        assert b.identity == {**a.identity, "sampling": "temperature 0.5, top_k 10, top_p 0.9"}
        assert "sampling" not in a.identity


def test_a_name_that_stands_for_several_rows_samples_them_all():
    models = tiny_tools().models
    policies = {"a": models.policies[""], "b": models.policies[""]}
    entries = make_methods(["dcar@t0.4", "dcar@b@t0"], Models(models.decoder, policies=policies), COMMON)
    assert [e.name for e in entries] == ["dcar@a@t0.4", "dcar@b@t0.4", "dcar@b@t0"]
    with pytest.raises(ConfigError, match="twice: car-1@t0.4"):
        make_methods(["car-1@t0.4", "car-1@t0.40"], models, COMMON)
    with pytest.raises(ConfigError, match="tuned="):
        make_methods(["car-1@tuned"], models, COMMON)


def test_draws_stand_in_names_of_methods_that_can_tell_them_apart():
    models = tiny_tools().models
    plain, decoder = models.policies[""], models.decoder
    able = scored_policy(decoder)
    both = Models(decoder, policies={"": able})
    one, four, turned, fixed = make_methods(["dcar", "dcar@n4", "dcar-sampled@n4@d0.5", "best-of-2-4"], both, COMMON)
    schedules = [entry.build().schedule for entry in (one, four, turned, fixed)]
    seen = [(s.num_candidates, getattr(s, "dial", None)) for s in schedules]
    assert seen == [(1, 0.0), (4, 0.0), (4, 0.5), (4, None)]
    assert four.identity == {**one.identity, "num_candidates": "4"} and turned.identity["dial"] == "0.5"
    assert fixed.identity["chunk_scorer"] == able.chunk_scorer.checksum() and schedules[3].sizes == (2,)
    results = decode(decoder, [i.prompt for i in tiny_tools().items[:2]], four.build(), COMMON)
    assert all(r.method == "dcar@n4" and r.tokens for r in results)
    with pytest.raises(ConfigError, match="chunk_scorer"):
        make_methods(["dcar@n4"], Models(decoder, policies={"": plain}), COMMON)
    for wrong, message in (("best-of-2", "how many are drawn"), ("best-of-99-4", "chunk sizes"),
                           ("best-of-2-1", "at least 2"), ("dcar@n0", "no such policy")):
        with pytest.raises(ConfigError, match=message):
            make_methods([wrong], both, COMMON)
    old = make_methods(["coherent-2-4", "sure-last-2-3@t0.4"], both, COMMON)  # names of before
    assert [entry.name for entry in old] == ["best-of-2-4", "end-on-confident-2-3@t0.4"]
    with pytest.raises(ConfigError, match="with chunk_scorer"):
        make_methods(["best-of-2-4"], Models(decoder, policies={"": plain}), COMMON)


def test_policies_are_not_called_like_samplings(tmp_path):
    assert names_sampling("t0.4") and names_sampling("tuned") and names_sampling("t5-run")
    assert not names_sampling("tall") and not names_sampling("range-2-3") and not names_sampling("")
    tiny_decoder().save_pretrained(tmp_path / "car")
    models = tiny_tools().models
    models.policies[""].save_pretrained(tmp_path / "t0.4")
    with pytest.raises(ConfigError, match="would read as a sampling"):
        load_models(str(tmp_path / "car"), "", [f"t0.4={tmp_path / 't0.4'}"])
    for name in ("n4", "d0.3", "a@n4"):
        with pytest.raises(ConfigError, match="would read as a sampling, a number of candidates or a dial"):
            load_models(str(tmp_path / "car"), "", [f"{name}={tmp_path / 't0.4'}"])


def test_sweeps_reach_samplings():
    assert expand_names(["car-{1,5}@t{0,0.4}"]) == ["car-1@t0", "car-1@t0.4", "car-5@t0", "car-5@t0.4"]
    assert expand_names(["ssd-0.4@{heads,draft}@t0.8-k{5,10}"])[-1] == "ssd-0.4@draft@t0.8-k10"


@pytest.mark.parametrize(("name", "family", "settings", "label"), [
    ("car-5@t0.4", "car@t0.4", (5.0,), "CAR-k (T 0.4)"), ("far@t0", "far@t0", (), "FAR (T 0)"),
    ("dcar@a@t0.8-k10", "dcar@t0.8-k10", ("a",), "DCAR (T 0.8, top-k 10)"),
    ("dcar@a@n4@d-0.5", "dcar@n4", ("a", -0.5), "DCAR (4 candidates)"), ("dcar@d0.3", "dcar", (0.3,), "DCAR"),
    ("dcar@n8@t0.4", "dcar@n8@t0.4", (), "DCAR (8 candidates, T 0.4)"),
    ("best-of-10-4", "best-of", (10.0, 4.0), "best of several chunks"),
    ("ssd-0.4-eos@draft@t0.6-p0.9", "ssd@eos@draft@t0.6-p0.9", (0.4,), "SSD (eos, draft, T 0.6, top-p 0.9)"),
    ("random-2-3@tuned", "random@tuned", (2.0, 3.0), "random size (own best)"),
])
def test_families_hold_one_sampling(name, family, settings, label):
    parsed = parse_method(name)
    assert (parsed.family, parsed.settings, parsed.label) == (family, settings, label)
    assert parse_method(family).family == family and parse_method(family).label == label
    assert "t0" not in "".join(parsed.words) and parsed.entry is not None


@pytest.mark.parametrize(("name", "short"), [
    ("random-4-5-6-7-8", "random-4…8"), ("random-4-5-6-7@t0.4", "random-4…7@t0.4"), ("random-4-5-6", "random-4-5-6"),
    ("random-4-6-8-10", "random-4-6-8-10"), ("best-of-10-4", "best-of-10-4"), ("dcar@n4@d-0.5", "dcar@n4@d-0.5"),
])
def test_names_in_sentences_are_short(name, short):
    assert short_name(name) == short


def test_a_dial_is_one_line_through_the_policy_as_it_is():
    names = ["dcar", "dcar@d0.5", "dcar@d-1.5", "dcar@b", "dcar@b@d-1", "dcar@n4", "dcar@n4@d-0.4"]
    grouped = group_families([{"method": m, "kind": "method"} for m in names])
    assert {family: [row["method"] for row in rows] for family, rows in grouped.items()} == {
        "dcar": ["dcar@d-1.5", "dcar", "dcar@d0.5", "dcar@b@d-1", "dcar@b"], "dcar@n4": ["dcar@n4@d-0.4", "dcar@n4"]}


def test_a_sweep_over_k_and_temperature_is_one_line_by_k_a_temperature():
    names = expand_names(["car-{1,3}", "car-{3,1}@t{0,0.4}", "car-{1,3}@tuned", "far@t0"])
    grouped = group_families([{"method": m, "kind": "method"} for m in names])
    assert {f: [r["method"] for r in members] for f, members in grouped.items()} == {
        "far@t0": ["far@t0"], "car": ["car-1", "car-3"], "car@t0": ["car-1@t0", "car-3@t0"],
        "car@t0.4": ["car-1@t0.4", "car-3@t0.4"], "car@tuned": ["car-1@tuned", "car-3@tuned"]}


def test_verifiers_are_judged_against_sd_at_their_own_temperature():
    methods = ["sd", "sd@draft", "sd@t0.6", "sd@draft@t0.4", "ssd-0.4@t0.6", "ssd-0.4@draft@t0.6"]
    assert strict_baseline("ssd-0.4@t0.6", methods) == "sd@t0.6"
    assert strict_baseline("ssd-0.4@draft@t0.6", methods) == "sd@t0.6"
    assert strict_baseline("ssd-0.4@draft@t0.4", methods) == "sd@draft@t0.4"
    assert strict_baseline("ssd-0.4@draft@t0.6", [*methods, "sd@draft@t0.6"]) == "sd@draft@t0.6"
    assert strict_baseline("ssd-0.4@t0.2", methods) is None  # not the distribution of another temperature
    assert strict_baseline("ssd-0.4", methods) == "sd"
    assert strict_baseline("sd@t0.6", methods) is None


def record(method: str, uid: str, errors: int) -> dict:
    return {"method": method, "id": uid, "seed": 0, "words": [errors, 0, 0, 10], "characters": [errors, 0, 0, 40],
            "hypothesis": "x", "duration": 2.0, "reference_duration": 2.0, "passes": 5, "tokens": [1] * 10,
            "actions": [2] * 5, "draft_passes": 0, "rounds_proposed": [], "rounds_accepted": [], "truncated": False,
            "accepted": 0, "proposed": 0, "emitted": [2] * 5}


def test_errors_are_tested_at_the_same_sampling_and_speeds_on_one_clock():
    errors = {"far": 5, "car-1": 4, "car-2": 3, "far@t0": 4, "car-1@t0": 3, "car-2@t0": 2, "dcar@t0": 1,
              "car-2@t0.4": 2}
    records = [record(m, uid, e) for m, e in errors.items() for uid in "abc"]
    times = [{"method": m, "id": uid, "lm": lm, "vocoder": 0.0, "audio": 1.0, "policy": 0.0, "tokens": 10}
             for m, lm in (("far", 4.0), ("far@t0", 2.0), ("car-1", 3.0), ("dcar@t0", 1.0)) for uid in "abc"]
    rows = {r["method"]: r for r in make_rows(records, list(errors), times, resamples=200)}
    assert rows["dcar@t0"]["difference_vs_far"] == pytest.approx(0.1 - 0.4)
    assert rows["dcar@t0"]["difference_vs_car1"] == pytest.approx(0.1 - 0.3)
    assert rows["dcar@t0"]["best_car"] == "car-2@t0" and rows["car-2"]["best_car"] == "car-2"
    assert rows["car-2"]["difference_vs_far"] == pytest.approx(0.3 - 0.5)
    assert rows["car-2@t0.4"]["difference_vs_far"] is rows["car-2@t0.4"]["difference_vs_car1"] is None
    assert rows["dcar@t0"]["speedup_vs_far"] == 4 and rows["far@t0"]["speedup_vs_far"] == 2
    only = {r["method"]: r for r in make_rows([r for r in records if r["method"].endswith("@t0")],
                                              [m for m in errors if m.endswith("@t0")], times, resamples=200)}
    assert only["dcar@t0"]["speedup_vs_far"] == 2 and only["dcar@t0"]["speedup_vs_car1"] is None


def test_rivals_meet_at_the_same_sampling():
    def pair(a: str, b: str) -> dict:
        test = {"difference": 0.1, "ci": [0.05, 0.15], "p": 0.01}
        return {"axis": "tokens_per_pass", "a": a, "b": b, "shared": [2.0, 2.0], "at": 2.0, "wer_a": 0.3, "wer_b": 0.2,
                "detectable": 0.1, "average": test, "range_a": [1, 2], "range_b": [2, 3], **test}

    said = rival_sentences({"equal_speed": [pair("car", "dcar"), pair("car", "dcar@t0"), pair("car@t0", "dcar@t0"),
                                            pair("dcar@t0", "sd@t0"), pair("far", "sd@t0")]})
    assert len(said) == 3
    assert "CAR-k makes 30.0 % word errors and DCAR 20.0 %" in said[0]
    assert "CAR-k (T 0) makes 30.0 % word errors and DCAR (T 0) 20.0 %" in said[1] and "SD (T 0)" in said[2]


def test_the_sampling_is_what_is_decoded():
    tools = tiny_tools()
    prompts = [i.prompt for i in tools.items]
    (greedy,) = make_methods(["car-2@t0"], tools.models, COMMON)
    a, b = (decode(greedy.decoder, prompts, greedy.build(), greedy.sampling, seed=seed) for seed in (0, 1))
    assert [r.tokens for r in a] == [r.tokens for r in b]
