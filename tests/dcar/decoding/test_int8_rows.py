"""`@int8` behind a method's name: the same method with int8 layers, in the same comparison."""

from __future__ import annotations

import pytest
import torch
from compare_worker import tiny_config, tiny_tools
from tiny_backbones import tiny_backbone

from dcar.decoding import decode
from dcar.decoding.fast.quantize import quantize_int8
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig
from eval.compare.run import run
from eval.methods.families import group_families, parse_method
from eval.methods.registry import Models, load_models, make_methods


def test_an_int8_row_stands_beside_its_float_row(tmp_path):
    methods = ["car-1", "car-3", "car-3@int8", "dcar", "dcar@int8"]
    tools = tiny_tools()
    result = run(tiny_config(tmp_path, methods=methods, timing_utterances=1), tools)
    rows = {r["method"]: r for r in result["rows"] if r["kind"] == "method"}
    assert list(rows) == methods
    assert rows["car-3@int8"]["n"] == rows["car-3"]["n"] and rows["car-3@int8"]["lm_rtf"] > 0
    assert rows["car-3@int8"]["best_car"] in ("car-1", "car-3")  # an int8 row is no baseline
    assert set(group_families(list(rows.values()))) == {"car", "car@int8", "dcar", "dcar@int8"}


def test_the_layers_are_quantised_and_nothing_else():
    tools = tiny_tools()
    models = tools.models
    plain, quantised, sd = make_methods(["car-3", "car-3@int8", "sd@int8"], models)
    assert quantised.name == "car-3@int8" and quantised.decoder is sd.decoder is not plain.decoder
    assert isinstance(quantised.decoder.layers[0].qkv, torch.ao.nn.quantized.dynamic.Linear)
    assert torch.equal(quantised.decoder.heads.base.weight, plain.decoder.heads.base.weight)
    assert quantised.identity == {**plain.identity, "layers": "int8"}  # finished float records are not taken for these
    prompts, sampling = [i.prompt for i in tools.items], SamplingConfig(max_tokens=30)
    expected = decode(quantize_int8(plain.decoder), prompts, plain.build(), sampling)
    got = decode(quantised.decoder, prompts, quantised.build(), sampling)
    assert [r.tokens for r in got] == [r.tokens for r in expected]


@pytest.mark.parametrize(("name", "family", "setting"), [
    ("car-3@int8", "car@int8", "3"), ("dcar@int8", "dcar@int8", ""), ("dcar@wide@int8", "dcar@int8", "wide"),
    ("ssd-0.4@draft@int8", "ssd@draft@int8", "0.4")])
def test_names(name, family, setting):
    parsed = parse_method(name)
    assert (parsed.family, parsed.setting) == (family, setting)
    assert parsed.kind == name.split("@")[0].split("-")[0] and "int8" in parsed.label


def test_what_has_no_int8_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not of a BackboneDecoder"):
        make_methods(["car-2@int8"], Models(tiny_backbone()))
    with pytest.raises(ConfigError, match="cannot be called 'int8'"):
        load_models("unused", "", [f"int8={tmp_path}"])
