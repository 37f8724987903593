"""A method as a mapping and as a compact name: both say the same, and records are found by the
name."""

import pytest
from compare_worker import tiny_tools

from dcar.config import load_config, save_config
from dcar.config.read import load_yaml
from dcar.config.recipes import folder
from dcar.errors import ConfigError
from dcar.methods import MethodSpec, read_methods
from dcar.methods.find import every_method
from eval.compare.config import CompareConfig
from eval.compare.run import run

SAME = [
    (
        "ssd-0.4@draft:4@t0.8",
        {"method": "ssd", "beta": 0.4, "draft": "draft", "length": 4, "temperature": 0.8},
    ),
    ("far", {"method": "far"}),
    ("car-5@t0", {"method": "car", "size": 5, "temperature": 0}),
    ("random-2-2-3", {"method": "random", "sizes": [2, 2, 3]}),
    ("end-on-confident-4-7", {"method": "end-on-confident", "longest": 7, "shortest": 4}),
    ("best-of-10-4", {"method": "best-of", "size": 10, "num_candidates": 4}),
    ("dcar", {"method": "dcar", "policy": None}),
    ("dcar-sampled@d0.5", {"method": "dcar-sampled", "dial": 0.5}),
    (
        "dcar@2-3@n4@d-0.5@t1-k0",
        {
            "method": "dcar",
            "policy": "2-3",
            "num_candidates": 4,
            "dial": -0.5,
            "temperature": 1.0,
            "top_k": 0,
        },
    ),
    ("entropy-0.8", {"method": "entropy", "threshold": 0.8}),
    ("entropy@3", {"method": "entropy", "tokens_per_pass": 3.0}),
    ("mtp-viterbi-4", {"method": "mtp-viterbi", "heads": 4}),
    ("mtp-viterbi-4-5", {"method": "mtp-viterbi", "heads": 4, "k": "5"}),
    ("sd:4", {"method": "sd", "length": 4}),
    ("sd", {"method": "sd", "draft": "heads"}),
    ("ssd-0-eos:2", {"method": "ssd", "beta": 0, "eos": True, "length": 2}),
    ("ssd-0", {"method": "ssd", "beta": 0, "eos": False}),
    ("pcg--0.2", {"method": "pcg", "theta": -0.2}),
    ("typical-0.09-0.4", {"method": "typical", "delta": 0.4}),
    ("typical", {"method": "typical"}),
    (
        "topk-verify-50-eos@t0.8-k10-p0.9",
        {
            "method": "topk-verify",
            "k": 50,
            "eos": True,
            "temperature": 0.8,
            "top_k": 10,
            "top_p": 0.9,
        },
    ),
    ("vadusa-2-n32", {"method": "vadusa", "tau": 2, "nodes": 32}),
    ("vadusa-2-chain", {"method": "vadusa", "tau": 2, "chained": True}),
    ("ssd-1e-05", {"method": "ssd", "beta": 0.00001}),
    ("dcar@tall", {"method": "dcar", "policy": "tall"}),
    ("dcar@range-2-3@t0.4", {"method": "dcar", "policy": "range-2-3", "temperature": 0.4}),
    (
        "entropy@3@t0-p0.5",
        {"method": "entropy", "tokens_per_pass": 3, "temperature": 0, "top_p": 0.5},
    ),
    ("car-5@tuned", {"method": "car", "size": 5, "tuned": True}),
]


@pytest.mark.parametrize(("name", "mapping"), SAME)
def test_a_mapping_and_its_name_are_one_method(name, mapping):
    spec = MethodSpec.from_mapping(mapping)
    # repr: records are found by their text, in which 0 is not 0.0
    assert str(spec) == name and repr(MethodSpec.parse(name)) == repr(spec)
    assert MethodSpec.from_mapping(spec.to_mapping()) == spec


def test_a_number_has_one_spelling():
    for name, canonical in [
        ("ssd-1e-3@heads", "ssd-0.001"),  # the default is left out
        ("ssd-0.40", "ssd-0.4"),
        ("entropy@3.0", "entropy@3"),
        ("car-1@t1.0", "car-1@t1"),
        ("car-05@t0.40", "car-5@t0.4"),
    ]:
        assert str(MethodSpec.parse(name)) == canonical


@pytest.mark.parametrize(
    "name",
    (
        "car-5@t car-5@t-1 car-5@t0.4-x car-5@t0.4-p0.9-k10 car-5@t0.4@t0.5 sd@t0.4@draft car-5@t.4 "
        "car-5@tuned-2"
    ).split(),
)
def test_malformed_samplings_are_refused_before_anything_is_loaded(name):
    with pytest.raises(ConfigError, match=f"method '{name}'"):
        CompareConfig(methods=[name])


def test_names_in_recipes_keep_their_spelling():
    names = []
    for recipe in folder().glob("*.yaml"):
        loaded = load_yaml(recipe.read_text(encoding="utf-8"))
        for of in (loaded, *loaded.get("variants", {}).values()):
            names += [m for m in of.get("methods", []) if isinstance(m, str)]
    assert len(names) > 40
    for name in names:
        assert "{" in name or str(MethodSpec.parse(name)) == name
    assert len(read_methods(names)) > 100


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"method": "ssd", "betta": 0.4}, "'ssd' .*betta; .*beta, eos, draft, length"),
        ({"method": "ssd"}, "'ssd': beta .*ssd-0.4"),
        ({"method": "ssd", "beta": "much"}, "'ssd': beta .*'much'"),
        ({"method": "ssd", "beta": True}, "'ssd': beta .*True"),
        ({"method": "ssd", "beta": [0, 0.4]}, "'ssd': beta .*0.4"),  # a sweep is a name in braces
        ({"method": "car", "size": 2.5}, "'car': size .*2.5"),
        ({"method": "sd", "draft": "model"}, "'sd': draft .*'model'"),
        ({"method": "far", "size": 1}, "'far' .*size; .*temperature, top_k, top_p"),
        ({"method": "car", "size": 2, "top_p": 0.9}, "'car': top_p .*temperature"),
        ({"method": "car", "size": 2, "temperature": -1}, "'car': temperature .*-1"),
        ({"method": "ssd-0.4"}, "'ssd-0.4': .* ssd; "),
        ({"method": "speculative"}, "'speculative'"),
        ({"beta": 0.4}, "{'beta': 0.4} .*method"),
        ({"method": 3}, "{'method': 3} .*method"),
    ],
)
def test_what_is_no_method_is_refused_by_the_setting(mapping, message):
    with pytest.raises(ConfigError, match=message):
        read_methods([mapping])
    with pytest.raises(ConfigError):
        CompareConfig(methods=[mapping])


def test_a_comparison_takes_mappings_in_yaml_and_on_the_command_line(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "methods:\n  - car-1\n  - {method: ssd, beta: 0.4, length: 2}\nlimit: 2\n"
    )
    config = load_config(
        CompareConfig, ["--config", str(tmp_path / "r.yaml"), f"out={tmp_path / 'out'}"]
    )
    assert config.methods == ["car-1", {"method": "ssd", "beta": 0.4, "length": 2}]
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(CompareConfig, ["--config", str(tmp_path / "saved.yaml")]) == config
    assert load_config(CompareConfig, ["methods=[{method: car, size: 2}]"]).methods == [
        {"method": "car", "size": 2}
    ]
    tools = tiny_tools()
    settings = dict(
        limit=2,
        resamples=100,
        timing_utterances=0,
        audio_utterances=0,
        report=False,
        device="cpu",
        out=str(tmp_path / "out"),
    )
    by_mapping = run(CompareConfig(methods=config.methods, **settings), tools)
    records = (tmp_path / "out" / "records.jsonl").read_bytes()
    by_name = run(CompareConfig(methods=["car-1", "ssd-0.4:2"], **settings), tools)
    assert (tmp_path / "out" / "records.jsonl").read_bytes() == records
    assert by_name.first == by_mapping.first


def test_every_method_is_written_as_its_example():
    for name, cls in every_method().items():
        spec = MethodSpec.parse(cls.example)
        assert (str(spec), spec.method, spec.of) == (cls.example, name, cls)
        assert spec.build().name == cls.example
