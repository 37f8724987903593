"""Chunk rules, verifiers and scorers of another package, by their dotted path."""

import sys
import types

import numpy as np
import pytest
from compare_worker import tiny_tools
from tiny_decoders import tiny_decoder

from dcar.decoding import decode
from dcar.errors import ConfigError
from dcar.methods import Models, make_methods
from dcar.sampling import SamplingConfig
from dcar.sources.code import code_digest
from eval.compare.config import CompareConfig
from eval.compare.run import run
from eval.methods.families import family_of, setting_text
from eval.scorers.load import load_scorers

CODE = """
import torch
from dcar import Choice, ChunkRule, decoding_method
from dcar.decoding.declare import Style
from eval.verifiers.chain import ChainVerifier
from eval.verifiers.sd import of, residual
from plugged.limits import LONGEST

@decoding_method(style=Style("calm", "#123456", "s"))
class Calm(ChunkRule):
    nats: float = 2.0
    after_draw = True
    longest = LONGEST
    def choose(self, state, features):
        likely = features[:, 0, :, 0] >= -self.nats
        return Choice(1 + likely[:, 1:].cumprod(-1).sum(-1))

@decoding_method()
class AtLeast(ChainVerifier):
    threshold: float
    def accept(self, q, p, tokens, eos, uniform):
        return of(q, tokens) >= self.threshold
    def replacement(self, q, p, tokens, eos):
        return residual(q, p)

class Hidden(ChunkRule):
    def __init__(self, nats):
        self.nats = nats

@decoding_method()
class Warm(ChunkRule):
    temperature: float = 1.0

class Loudness:
    name = "loudness"
    def __call__(self, wave, sample_rate):
        return float(abs(wave).max())

nothing = 3
"""
LIMITS = "LONGEST = 4\n"


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """A package of a user's own on sys.path."""
    (tmp_path / "plugged").mkdir()
    (tmp_path / "plugged" / "__init__.py").touch()
    (tmp_path / "plugged" / "rules.py").write_text(CODE)
    (tmp_path / "plugged" / "limits.py").write_text(LIMITS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "plugged"]:
        del sys.modules[name]


NAMES = (
    "plugged.rules.Calm-1.5 plugged.rules.Calm-1.5@t0.4 plugged.rules.AtLeast-0.1 "
    "plugged.rules.AtLeast-0.1:2 plugged.rules.Calm"
).split()


def test_a_comparison_runs_them(tmp_path):
    tools = tiny_tools()
    result = run(
        CompareConfig(
            methods=["car-1", *NAMES[:3]],
            limit=2,
            resamples=100,
            timing_utterances=1,
            audio_utterances=1,
            out=str(tmp_path / "out"),
            device="cpu",
        ),
        tools,
    )
    assert [row.method for row in result.first.spoken] == ["car-1", *NAMES[:3]]
    assert {row.family.label for row in result.first.spoken} >= {"calm", "calm (T 0.4)"}
    assert (
        "plugged.rules.Calm-1.5" in (tmp_path / "out" / "compare.txt").read_text()
        and (tmp_path / "out" / "report.html").exists()
    )


def test_names_paths_and_numbers(prompts):
    models = Models(tiny_decoder())
    entries = make_methods(NAMES, models)
    assert [e.name for e in entries] == NAMES
    sampling = SamplingConfig(max_tokens=30)
    spoken = [
        [r.tokens for r in decode(e.decoder, prompts, e.method, sampling, seed=1)] for e in entries
    ]
    calm, _path, verifier, two, default = (e.method for e in entries)
    assert calm.nats == 1.5 and default.nats == 2.0 and verifier.threshold == 0.1
    assert two.draft_length == 2 and spoken[0] == spoken[1] != spoken[2]
    assert [family_of(e.settings).label for e in entries] == [
        "calm",
        "calm (T 0.4)",
        "plugged.rules.AtLeast",
        "plugged.rules.AtLeast (2 drafted)",
        "calm",
    ]
    assert [setting_text(e.settings) for e in entries] == ["1.5", "1.5", "0.1", "0.1", ""]


def test_a_mapping_names_the_fields():
    mappings = [
        {"method": "plugged.rules.Calm", "nats": 1.5},
        {"method": "plugged.rules.Calm", "nats": 3},
        {"method": "plugged.rules.Calm", "nats": 1.5, "temperature": 0.4},
        {"method": "plugged.rules.AtLeast", "threshold": 0.1, "draft": "heads", "length": 2},
    ]
    entries = make_methods(mappings, Models(tiny_decoder()))
    assert [e.name for e in entries] == [
        "plugged.rules.Calm-1.5",
        "plugged.rules.Calm-3",
        "plugged.rules.Calm-1.5@t0.4",
        "plugged.rules.AtLeast-0.1:2",
    ]
    assert [type(e.method.nats) for e in entries[:2]] == [float, float]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plugged.none.Calm", "plugged.none"),
        ("plugged.rules.Gone-2", "Gone"),
        ("plugged.rules.nothing", "dcar.ChunkRule"),
        ("plugged.rules.Loudness", "dcar.ChunkRule"),
        ("plugged.rules.Calm-1-2", "plugged.rules.Calm-1-2.*nats"),
        ("plugged.rules.Calm-x", "plugged.rules.Calm-x.*nats"),
        ("plugged.rules.AtLeast", "AtLeast.*: threshold"),
        ({"method": "plugged.rules.Calm", "threshold": 1}, "Calm.* threshold.*nats"),
        ({"method": "plugged.rules.Calm", "nats": "much"}, "nats .*'much'"),
        ({"method": "calmer"}, "car-3, .*package.module.Class"),
        ("calmer", "car-3, .*package.module.Class"),
        ("plugged.rules.Hidden-2", "Hidden.*constructor.*decoding_method"),
        ("plugged.rules.Warm", "Warm: field temperature: .*taken"),
    ],
)
def test_what_is_no_method_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        make_methods([name], Models(tiny_decoder()))


def test_results_of_another_version_of_the_code_are_not_used_again(tmp_path):
    """Of the class, or of what it imports of the same package; a comment changes nothing."""
    rules, limits = (tmp_path / "plugged" / name for name in ("rules.py", "limits.py"))

    def digest(name: str = "plugged.rules.Calm-1.5") -> str:
        return make_methods([name], Models(tiny_decoder()))[0].identity["code"]

    first = digest()
    rules.write_text(CODE.replace("after_draw = True", "after_draw = True  # reads them"))
    assert digest() == first
    limits.write_text("LONGEST = 3\n")
    second = digest()
    rules.write_text(CODE.replace(">= -self.nats", "> -self.nats"))
    assert len({first, second, digest()}) == 3
    shipped = digest("sd")
    assert shipped == digest("sd") != digest("ssd-0.4")


def test_scorers_by_path():
    wave = np.array([0.0, -0.5, 0.25], np.float32)
    (scorer,) = load_scorers(["plugged.rules.Loudness"]).values()
    # another version has its own scores
    digest = code_digest(sys.modules["plugged.rules"].Loudness)
    assert (scorer.name, scorer.kind) == (f"loudness@{digest[:8]}", "quality")
    assert scorer(wave, 16_000, np.zeros(3)) == 0.5
    with pytest.raises(ConfigError, match="import plugged.rules.Gone"):
        load_scorers(["plugged.rules.Gone"])
    with pytest.raises(ConfigError, match="'plugged.rules.nothing'"):
        load_scorers(["plugged.rules.nothing"])


def test_a_definition_of_a_notebook_has_a_digest_of_its_own():
    """Its module has no file."""
    notebook = types.ModuleType("notebook_cell")
    sys.modules["notebook_cell"] = notebook
    try:
        digests = []
        for factor in (1, 1, 2):
            exec(f"def mine(x):\n    return {factor} * x", notebook.__dict__)
            digests.append(code_digest(notebook.mine))
    finally:
        del sys.modules["notebook_cell"]
    assert digests[0] == digests[1] != digests[2]
