"""What is typed or pasted is understood or refused in words: hypothesis for parsers. Those of
files: test_files.py.

The default run is of the same examples every time, `-m slow` of FUZZ_EXAMPLES (300) new ones a
parser.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from compare_worker import tiny_policy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_decoders import tiny_decoder

from dcar.config import load_config
from dcar.config.read import dump_yaml, load_yaml, parse_yaml, typed
from dcar.errors import ConfigError, DCARError, TextError
from dcar.methods import MethodSpec, Models, make_methods
from dcar.methods.find import every_method
from dcar.prepare.run import PrepareConfig
from dcar.text.english.inventory import PHONEMES
from dcar.text.english.phonemes import normalize_text, text_to_ids
from dcar.text.english.readings import normalize_transcript, spoken_words
from dcar.text.wer import word_errors
from dcar.train.car import TrainConfig
from eval.compare.config import CompareConfig
from eval.compare.tune import read_samplings
from eval.methods.families import family_of, setting_text

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "300"))
MODELS = Models(tiny_decoder(), tiny_decoder(heads=1, seed=5), {"": tiny_policy()})


def piece(*words: str) -> st.SearchStrategy[str]:
    """Words of a small language, and characters of any, in any order."""
    return st.lists(st.sampled_from(words) | st.text(max_size=3), max_size=6).map("".join)


def refused(action: Callable[[], Any], *errors: type[DCARError]) -> Any:
    """Return what an action returns, or None if it is refused with one of the project's errors, in
    words."""
    try:
        return action()
    except DCARError as error:
        assert str(error) and (not errors or isinstance(error, errors)), error
        return None


def check_text(text: str) -> None:
    spoken = refused(lambda: normalize_text(text), TextError)
    assert spoken is None or re.fullmatch(r"[A-Za-z',.?! ]+", spoken), spoken
    ids = refused(lambda: text_to_ids(text), TextError)
    assert ids is None or (ids and all(0 <= i < len(PHONEMES) for i in ids))


def check_words(pair: tuple[str, str]) -> None:
    reference, heard = pair
    normalize_transcript(reference), spoken_words(heard)
    errors = refused(lambda: word_errors(reference, heard), TextError)  # a reference without a word
    assert (
        errors is None
        or min(errors.substitutions, errors.deletions, errors.insertions, errors.reference_words)
        >= 0
    )


def check_method(name: str) -> None:
    spec = refused(lambda: MethodSpec.parse(name), ConfigError)
    if spec is not None:
        assert MethodSpec.parse(str(spec)) == MethodSpec.from_mapping(spec.to_mapping()) == spec
        assert family_of(spec.to_mapping()).label and isinstance(
            setting_text(spec.to_mapping()), str
        )
    refused(lambda: read_samplings([name]) if name.count("{") < 3 else None, ConfigError)
    refused(lambda: make_methods([name], MODELS) if name.count("{") < 3 else None)


def check_yaml(text: str) -> None:
    refused(lambda: parse_yaml(text), ConfigError)
    refused(lambda: typed(text, True), ConfigError)
    refused(lambda: typed(text, False), ConfigError)


def check_saved(value: Any) -> None:
    assert load_yaml(dump_yaml({"a": value})) == {"a": value}


def check_settings(pairs: list[tuple[str, str]]) -> None:
    arguments = [f"{key}={value}" for key, value in pairs]
    for schema in (PrepareConfig, TrainConfig, CompareConfig):
        refused(partial(load_config, schema, arguments), ConfigError)


signs = "aZé 0123456789.,:;-–/$€£%@#&'\"()+*=<>\u2028²½٣①\n\tIVX"
written = st.text(st.sampled_from(signs) | st.characters(), max_size=60)
KEYS = (
    "out splits speeds limit num_proc filter_seconds model.hidden_size seeds methods learning_rate "
    "sampling.temperature config seed data"
).split()
saved = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
saved |= st.text() | st.text("-+01.:_eox")
methods = piece(
    *every_method(),
    *"-2 -3 @t0.4 @t -k -p0.9 { } , .. : @ 4 ² ٣ tuned draft starter".split(),
    "9" * 400,
    "9" * 5000,
)
yaml_text = piece(
    *"a [ ] { } *a 1e400 << | ' \" 0x .nan 2026-01-01 %YAML ---".split(),
    *(": ", "\n", "- ", "&a ", "!!python/object:os.system ", "9" * 5000, "? ", "\t"),
)
values = st.sampled_from(
    ["", "\x00", *"1 -1 nan 1e400 [] {} null true [1,2] ${x} ${out} /".split()]
) | st.text(max_size=10)
keys = st.sampled_from(KEYS) | st.text(max_size=5)
PARSERS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None]]] = {
    "text": (written, check_text),
    "words": (st.tuples(written, written), check_words),
    "methods": (methods, check_method),
    "yaml": (yaml_text | st.text(), check_yaml),
    "saved": (saved | st.lists(saved) | st.dictionaries(st.text(), saved), check_saved),
    "settings": (st.lists(st.tuples(keys, values), max_size=3), check_settings),
}


@pytest.mark.parametrize("examples", [25, pytest.param(EXAMPLES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PARSERS)
def test_parsers(name: str, examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    strategy, check = PARSERS[name]
    settings(
        max_examples=examples,
        deadline=60_000,
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=examples < EXAMPLES,
    )(given(strategy)(check))()
