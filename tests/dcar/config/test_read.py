"""Reading: YAML files of every kind of brokenness, and the spellings of a command line."""

import re
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from dcar.config import load_config, save_config, setting
from dcar.config.recipes import folder, recipe_file
from dcar.errors import ConfigError
from dcar.prepare.run import PrepareConfig
from dcar.train.car import TrainConfig


@dataclass
class Inner:
    width: int = setting(4, "Width.")


@dataclass
class Toy:
    """A toy."""

    text: str = setting("", "A text.", positional=True, prose=True)
    name: str = setting("a", "A name.", short="-n")
    rate: float = setting(0.5, "A rate.")
    loud: bool = setting(False, "A switch.")
    top_k: int | None = setting(None, "A count.")
    sizes: list[int] = setting([1], "Sizes.")
    words: list[str] = setting([], "Texts.")
    extra: dict[str, Any] = setting({}, "Anything.")
    inner: Inner = setting(Inner, "A group.")
    plain: int = field(default=7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "mapping"),
        (b"null\n", "mapping"),
        (b"just words\n", "mapping"),
        ("name: café\n".encode("latin-1"), "UTF-8"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"name: [a\n", "YAML"),
        (b"name: a: b\n", "YAML"),
        (b"name: !!python/object/apply:os.system [true]\n", "YAML"),
        (b"name: a\x00b\n", "YAML"),
        (b"? [a, b]\n: c\n", "YAML"),
        (b"a: 1\n---\nb: 2\n", "YAML"),
        (b"name: a\nname: b\n", "line 1: 'name'"),
        (b"top_k: 1" + b"0" * 5000 + b"\n", "YAML"),
        (b"1: 2\n", "'1'"),
        (b"inner: [1]\n", "inner"),
        (b"top_k: 1:30\n", "top_k .*'1:30'"),
        (b"top_k: !!int x\n", "YAML .*'x'"),
        (b"inner: {width: [1]}\n", "inner.width"),
        (b"extra: [1]\n", "extra"),
    ],
)
def test_broken_files_are_errors_that_name_the_file(tmp_path, content, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(content)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(Toy, ["--config", str(recipe)])
    assert str(recipe) in str(caught.value) and "\n" not in str(caught.value)
    assert time.monotonic() - started < 20


def test_files_that_cannot_be_opened(tmp_path):
    for path in (tmp_path, tmp_path / "none.yaml", tmp_path / "a\0b"):
        with pytest.raises(ConfigError, match=tmp_path.name):
            load_config(Toy, [f"--config={path}"])
    with pytest.raises(ConfigError, match="--config"):
        load_config(Toy, ["--config"])


def test_anchors_work(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("extra: &e {b: 1}\nname: ${rate}/x\ninner: {<<: {width: 7}}\n")
    config = load_config(Toy, ["--config", str(recipe)])
    assert (config.name, config.inner.width, config.extra) == ("${rate}/x", 7, {"b": 1})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["name=b"], {"name": "b"}),
        (["--name=b"], {"name": "b"}),
        (["--name", "b"], {"name": "b"}),
        (["-n", "b"], {"name": "b"}),
        (["-n=b"], {"name": "b"}),
        (["name=b", "name=c"], {"name": "c"}),
        (["--top-k", "3"], {"top_k": 3}),
        (["top_k=null"], {"top_k": None}),
        (["--loud"], {"loud": True}),
        (["--loud", "name=b"], {"loud": True, "name": "b"}),
        (["--loud", "hello"], {"loud": True, "text": "hello"}),
        (["--loud", "false"], {"loud": False}),
        (["loud=yes"], {"loud": True}),
        (["rate=1e-3"], {"rate": 1e-3}),
        (["rate=3"], {"rate": 3.0}),
        (["top_k=1e3"], {"top_k": 1000}),
        (["sizes=3"], {"sizes": [3]}),
        (["sizes=[3,4]"], {"sizes": [3, 4]}),
        (["sizes=[]"], {"sizes": []}),
        (["name=1e5"], {"name": "1e5"}),
        (["name=007"], {"name": "007"}),
        (["name=2026-01-01"], {"name": "2026-01-01"}),
        (["name="], {"name": ""}),
        (["name=a: b"], {"name": "a: b"}),
        (["name='no'"], {"name": "no"}),
        (["name=true"], {"name": "true"}),
        (["name=room #5"], {"name": "room #5"}),
        (["top_k=010"], {"top_k": 10}),
        (['extra={"a":0.1,"b":[1]}'], {"extra": {"a": 0.1, "b": [1]}}),
        (["inner={width: 9}"], {"inner": Inner(9)}),
        (["--inner.width", "9"], {"inner": Inner(9)}),
        (["Good morning."], {"text": "Good morning."}),
        (["E=mc2, he said: [sic]"], {"text": "E=mc2, he said: [sic]"}),
        (["--", "--loud"], {"text": "--loud"}),
        (["name=b", "x", "plain=8"], {"name": "b", "text": "x", "plain": 8}),
    ],
)
def test_spellings_of_a_command_line(arguments, expected):
    assert load_config(Toy, arguments) == Toy(**expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("top_k: 010", {"top_k": 10}),
        ("top_k: 0o10", {"top_k": 8}),
        ("top_k: 0x1F", {"top_k": 31}),
        ("rate: -1e-3", {"rate": -1e-3}),
        ("rate: .5", {"rate": 0.5}),
        ("loud: yes", {"loud": True}),
        *(
            (f"name: {word}", {"name": word})
            for word in "010 1.10 1e3 12:30 no True 0b1 1_000 2026-01-01 = .inf".split()
        ),
        (
            "words: [no, 010, 1:30, 1.0, true, 'null']",
            {"words": ["no", "010", "1:30", "1.0", "true", "null"]},
        ),
        ("words: 010", {"words": ["010"]}),
        (
            "extra: {no: off, 010: 010, b: [1:30, true, null, 1e1, 1_0]}",
            {"extra": {"no": "off", "010": 10, "b": ["1:30", True, None, 10.0, "1_0"]}},
        ),
        ("variants: {no: {top_k: 1}, 010: {top_k: 2}}", {}),
    ],
)
def test_a_plain_word_means_what_the_core_schema_of_yaml_1_2_says(content, expected, tmp_path):
    (tmp_path / "r.yaml").write_text(content)
    config = load_config(Toy, [f"--config={tmp_path}/r.yaml"])
    assert config == Toy(**expected)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(Toy, [f"--config={tmp_path}/saved.yaml"]) == config
    if "variants" in content:
        assert [
            load_config(Toy, [f"--config={tmp_path}/r.yaml:{v}"]).top_k for v in ("no", "010")
        ] == [1, 2]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("~/a", "/home/me/a"),
        ("~", "/home/me"),
        ("best=~/a", "best=/home/me/a"),
        ("hubert:~/a@9", "hubert:/home/me/a@9"),
        ("~/a,~/b", "/home/me/a,/home/me/b"),
        ("./~/a", "./~/a"),
        ("a~", "a~"),
        ("~nobody-of-this-name/a",) * 2,
    ],
)
def test_a_tilde_is_the_home_folder_in_every_setting_but_what_is_spoken(
    given, read, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "r.yaml").write_text(
        f'text: "{given}"\nname: "{given}"\nwords: ["{given}"]\nextra: {{a: "{given}"}}\n'
    )
    config = load_config(Toy, [f"--config={tmp_path}/r.yaml"])
    assert (config.text, config.name, config.words, config.extra) == (
        given,
        read,
        [read],
        {"a": given},
    )
    assert load_config(Toy, [given, f"name='{given}'"]).name == read


def test_a_recipe_is_found_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "r.yaml").write_text("name: b\n")
    assert load_config(Toy, ["--config=~/r.yaml"]).name == "b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name"], "--name"),
        (["t", "inner.widht=3"], "'inner.width'"),
        (["rate=fast"], "rate .*'fast'"),
        (["one", "two"], "'two'"),
        (["one", "nam=b"], "'nam'.*'name'"),
        (["-x"], "'-x'"),
        (["inner=3"], "inner"),
        (["t", "extra.size=3"], r"write extra=\{size: …\}"),
        (["name=null"], "name .*null"),
        (["sizes=[a"], "sizes: .*YAML"),
        (["zzzzzzzz=1", "t"], "'zzzzzzzz'|'t'"),
    ],
)
def test_wrong_command_lines(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_config(Toy, arguments)


def test_the_command_line_counts_more_than_files_and_later_files_more_than_earlier(tmp_path):
    for name, width in (("a", 5), ("b", 6)):
        (tmp_path / f"{name}.yaml").write_text(
            f"name: {name}\ninner: {{width: {width}}}\nrate: 0.{width}\n"
        )
    files = f"--config={tmp_path}/a.yaml", "--config", f"{tmp_path}/b.yaml"
    config = load_config(Toy, ["rate=0.9", *files, "sizes=[3]"])
    assert config == Toy(name="b", rate=0.9, sizes=[3], inner=Inner(6))
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(Toy, [f"--config={tmp_path}/resolved.yaml"]) == config


def test_real_schemas_load():
    assert load_config(PrepareConfig, ["out=x", "speeds=[0.9,1.0]"]).speeds == (0.9, 1.0)
    with pytest.raises(ConfigError):
        load_config(PrepareConfig, ["out=x", "speeds=[0.9,0.9]"])
    assert load_config(TrainConfig, ["model.num_prediction_heads=1"]).head_weights == [1.0]
    declining = load_config(TrainConfig, ["head_weight_decay=0.5", "model.num_prediction_heads=3"])
    assert declining.head_weights == [1, 0.5, 0.25]


def test_defaults_are_not_shared_between_configurations():
    one, two = load_config(Toy, []), load_config(Toy, [])
    one.sizes.append(2)
    one.extra["a"] = 1
    one.inner.width = 99
    assert (two.sizes, two.extra, two.inner.width) == ([1], {}, 4)
    assert load_config(Toy, []) == Toy()


# --- recipes and their variants -------------------------------------------------------------------

VARIED = """name: a
inner: {width: 5}
variants:
  wide: &wide  # wider
    inner:
      width: 9
  loud:
    <<: *wide
    loud: true
    sizes: [7]
  wrong:
    rate: 1
    nam: b
"""


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("", {"name": "a", "inner": Inner(5)}),
        (":wide", {"name": "a", "inner": Inner(9)}),
        (":loud", {"name": "a", "inner": Inner(9), "loud": True, "sizes": [7]}),
    ],
)
def test_a_variant_says_what_differs(variant, expected, tmp_path):
    (tmp_path / "r.yaml").write_text(VARIED)
    for arguments in (
        [f"--config={tmp_path}/r.yaml{variant}"],
        ["--config", f"{tmp_path}/r.yaml{variant}"],
    ):
        assert load_config(Toy, arguments) == Toy(**expected)
    assert load_config(Toy, [*arguments, "inner.width=1"]).inner == Inner(1)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (":narrow", "r.yaml: .*'narrow'.*wide, loud, wrong"),
        (":wrong", "r.yaml:13: .*'nam'.*'name'"),
    ],
)
def test_wrong_variants_are_named(variant, message, tmp_path):
    (tmp_path / "r.yaml").write_text(VARIED)
    with pytest.raises(ConfigError, match=message):
        load_config(Toy, [f"--config={tmp_path}/r.yaml{variant}"])


@pytest.mark.parametrize(
    "content", ["variants: [wide]\n", "name: a\nvariants: {wide: 3}\n", "variants: null\n"]
)
def test_variants_are_mappings(content, tmp_path):
    (tmp_path / "r.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"r.yaml:\d: variants"):
        load_config(Toy, [f"--config={tmp_path}/r.yaml"])


def test_shipped_recipes_are_found_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("car_tiny", "car_tiny.yaml", "launch/recipes/car_tiny.yaml"):
        path, variant = recipe_file(f"{name}:far")
        assert path == folder() / "car_tiny.yaml" and variant == "far"
        assert recipe_file(name) == (path, "")
    (tmp_path / "car_tiny").write_text("name: mine\n")  # a file of the user's own comes first
    assert load_config(Toy, ["--config", "car_tiny"]).name == "mine"
    (tmp_path / "a:b.yaml").write_text("name: colon\n")
    assert load_config(Toy, ["--config", "a:b.yaml"]).name == "colon"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("car_startr", "car_starter"),
        ("car_starter_shared.yaml", "car_starter:shared"),
        (str(folder() / "paper/dcpo_no_chase.yaml"), "dcpo_paper:no_chase"),
    ],
)
def test_a_recipe_that_is_not_there_is_answered_with_the_nearest(wrong, meant):
    with pytest.raises(ConfigError, match=f"{re.escape(wrong)}: .*{meant}"):
        recipe_file(wrong)
