"""Sampling in the names of methods: every kind takes one, sweeps reach it."""

import pytest
from compare_worker import tiny_tools
from tiny_decoders import tiny_decoder

from dcar.errors import ConfigError
from dcar.methods import Models, load_models, make_methods
from dcar.methods.names import expand_sweep
from dcar.sampling import SamplingConfig
from eval.compare.config import CompareConfig

COMMON = SamplingConfig(temperature=0.8, top_k=10, max_tokens=20, max_tokens_per_text_unit=4)


def test_impossible_samplings_are_refused_and_named():
    for name in ("car-3@t0.4-p0", "car-3@t0.4-p1.5"):
        with pytest.raises(ConfigError, match=f"method '{name}'"):
            make_methods([name], tiny_tools().models, COMMON)
    with pytest.raises(ConfigError, match=r"car-1@t0.*repetition_window"):
        make_methods(["car-1@t0"], tiny_tools().models, SamplingConfig(repetition_window=5))


def test_every_kind_takes_a_sampling_and_what_it_leaves_open_is_the_common_one():
    models = tiny_tools().models
    models.draft = tiny_decoder(heads=1, seed=3)
    names = (
        "far car-3 random-2-3 dcar dcar-sampled entropy-0.8 sd ssd-0.4 pcg-0.1 typical "
        "vadusa-1-chain topk-verify-2 sd@draft:2"
    ).split()
    plain = make_methods(names, models, COMMON)
    own = make_methods([f"{n}@t0.5-p0.9" for n in names], models, COMMON)
    assert [e.sampling for e in plain] == [COMMON] * len(names)
    assert {e.sampling for e in own} == {
        SamplingConfig(0.5, 10, 0.9, max_tokens=20, max_tokens_per_text_unit=4)
    }
    for a, b in zip(plain, own, strict=True):
        assert b.name == f"{a.name}@t0.5-p0.9"
        assert b.identity == a.identity and b.spec.plain == a.spec


def test_a_name_that_stands_for_several_rows_samples_them_all():
    models = tiny_tools().models
    policies = {"a": models.policies[""], "b": models.policies[""]}
    entries = make_methods(
        ["dcar@t0.4", "dcar@b@t0"], Models(models.decoder, policies=policies), COMMON
    )
    assert [e.name for e in entries] == ["dcar@a@t0.4", "dcar@b@t0.4", "dcar@b@t0"]
    with pytest.raises(ConfigError, match="twice: car-1@t0.4"):
        make_methods(["car-1@t0.4", "car-1@t0.40"], models, COMMON)
    with pytest.raises(ConfigError, match="tuned="):
        make_methods(["car-1@tuned"], models, COMMON)


def test_policies_are_not_called_like_samplings(tmp_path):
    tiny_decoder().save_pretrained(tmp_path / "car")
    models = tiny_tools().models
    models.policies[""].save_pretrained(tmp_path / "t0.4")
    for name in ("t0.4", "tuned", "t-1", "n4", "d0.3", "a@n4", "a@t1"):
        with pytest.raises(ConfigError, match=f"'{name}': dcar@{name}"):
            load_models(str(tmp_path / "car"), "", [f"{name}={tmp_path / 't0.4'}"])
    (tmp_path / "a=b").symlink_to(tmp_path)  # an = in the path belongs to the folder
    assert list(load_models(str(tmp_path / "car"), "", [str(tmp_path / "a=b/t0.4")]).policies) == [
        ""
    ]
    folder = tmp_path / "a=b" / "t0.4"
    named = load_models(
        str(tmp_path / "car"), "", [f"{name}={folder}" for name in ("tall", "range-2-3")]
    )
    assert [e.name for e in make_methods(["dcar"], named)] == ["dcar@tall", "dcar@range-2-3"]


# --- sweeps in braces -----------------------------------------------------------------------------


def test_braces_expand_in_order():
    assert expand_sweep("far") == ["far"]
    assert expand_sweep("ssd-{0,0.1, 0.4}") == ["ssd-0", "ssd-0.1", "ssd-0.4"]
    assert expand_sweep("{ssd,pcg}-{0,1}:2") == ["ssd-0:2", "ssd-1:2", "pcg-0:2", "pcg-1:2"]
    assert expand_sweep("car-{1,5}@t{0,0.4}") == [
        "car-1@t0",
        "car-1@t0.4",
        "car-5@t0",
        "car-5@t0.4",
    ]


@pytest.mark.parametrize("bad", "ssd-{0,1 ssd-0,1} ssd-{0,{1,2}} ssd-{0} ssd-{0,}".split())
def test_broken_braces_are_refused_and_named(bad):
    with pytest.raises(ConfigError) as error:
        CompareConfig(methods=[bad])
    assert bad in str(error.value)
