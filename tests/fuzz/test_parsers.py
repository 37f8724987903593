"""Whatever is typed, pasted or written by another program is understood or refused in words: hypothesis for parsers.

The default run is of the same few hundred examples every time, `-m slow` of FUZZ_EXAMPLES (300) new ones a parser.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_worker import tiny_policy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_decoders import tiny_decoder

from dcar.config import load_config
from dcar.config.read import parse_yaml, typed
from dcar.corpus.cuts import _AudioRoots, _row
from dcar.corpus.layouts import _jsonl_row
from dcar.corpus.read import Problem, Utterance
from dcar.errors import ConfigError, DCARError, TextError
from dcar.model.load import load_decoder_config, load_policy
from dcar.prepare.run import PrepareConfig
from dcar.text.phonemes import PHONEMES, normalize_text, text_to_ids
from dcar.text.wer import normalize_transcript, spoken_words, word_errors
from dcar.train.car import TrainConfig
from eval.compare.run import CompareConfig
from eval.compare.sweeps import expand_names
from eval.compare.tuned import load_tuned
from eval.methods.registry import METHODS, Models, make_methods
from eval.methods.samplings import parse_sampling, split_label, split_sampling
from eval.results.store import read_jsonl
from rl.config import DCPOConfig
from rl.policies import guidance_range

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "300"))
MODELS = Models(tiny_decoder(), tiny_decoder(heads=1, seed=5), {"": tiny_policy()})

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["\ud800", "\0", 10**30, -1]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8)
"""What json.loads can return, lone surrogates and huge numbers too."""

signs = "aZé 0123456789.,:;-–/$€£%@#&'\"()+*=<>\u2028²½٣①\n\tIVX"
written = st.text(st.sampled_from(signs) | st.characters(), max_size=60)


def like(good: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """`good` with some of its values replaced, some keys gone and some added."""
    changed = st.dictionaries(st.sampled_from([*good, "other"]), json_values, max_size=2)
    gone = st.sets(st.sampled_from(list(good)), max_size=1)
    return st.builds(lambda c, g: {k: v for k, v in {**good, **c}.items() if k not in g or k in c}, changed, gone)


def piece(*words: str) -> st.SearchStrategy[str]:
    """Words of a small language, and characters of any, in any order."""
    return st.lists(st.sampled_from(words) | st.text(max_size=3), max_size=6).map("".join)


def refused(action: Callable[[], Any], *errors: type[DCARError]) -> Any:
    """What an action returns, or None where it is refused with one of the project's errors, in words."""
    try:
        return action()
    except DCARError as error:
        assert str(error) and (not errors or isinstance(error, errors)), error
        return None


# ----------------------------------------------------------------------------------------------------------- parsers


def check_text(text: str) -> None:
    spoken = refused(lambda: normalize_text(text), TextError)
    assert spoken is None or re.fullmatch(r"[A-Za-z',.?! ]+", spoken), spoken
    ids = refused(lambda: text_to_ids(text), TextError)
    assert ids is None or (ids and all(0 <= i < len(PHONEMES) for i in ids))


def check_words(pair: tuple[str, str]) -> None:
    reference, heard = pair
    normalize_transcript(reference), spoken_words(heard)
    errors = refused(lambda: word_errors(reference, heard), TextError)  # a reference without a word
    assert errors is None or min(errors.substitutions, errors.deletions, errors.insertions, errors.reference_words) >= 0


def check_jsonl(row: Any) -> None:
    text = row if isinstance(row, str) else json.dumps(row)
    assert isinstance(_jsonl_row(Path("m.jsonl"), 1, text, None, None), Utterance | Problem)


def check_cut(row: Any) -> None:
    roots = _AudioRoots(Path("cuts.jsonl"), None)
    assert isinstance(_row(json.loads(json.dumps(row)), "cuts.jsonl:1", None, roots), Utterance | Problem)


def check_method(name: str) -> None:
    refused(lambda: split_label(name)), refused(lambda: split_sampling(name), ConfigError)
    refused(lambda: parse_sampling(name), ConfigError)
    refused(lambda: make_methods([name], MODELS))
    refused(lambda: make_methods(expand_names([name]), MODELS) if name.count("{") < 3 else None)


def check_yaml(text: str) -> None:
    refused(lambda: parse_yaml(text), ConfigError)
    refused(lambda: typed(text, True), ConfigError)
    refused(lambda: typed(text, False), ConfigError)


def check_settings(pairs: list[tuple[str, str]]) -> None:
    arguments = [f"{key}={value}" for key, value in pairs]
    for schema in (PrepareConfig, TrainConfig, CompareConfig):
        refused(partial(load_config, schema, arguments), ConfigError)


def check_files(folder: Path, name: str, read: Callable[[], Any]) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
        refused(read)

    return check


ROW = {"id": "u", "audio": "a.wav", "text": "Hi.", "speaker": "s", "split": "dev", "prompt_audio": "b.wav",
       "prompt_text": "Oh."}
CUT: dict[str, Any] = {"id": "c", "start": 0.0, "duration": 1.0, "channel": 0, "type": "MonoCut",
       "supervisions": [{"start": 0, "text": "Hi.", "speaker": "s"}],
       "recording": {"sampling_rate": 16_000, "duration": 1.0, "sources": [
           {"type": "file", "channels": [0], "source": "a.wav"}]}}  # fmt: skip
KEYS = ("out", "splits", "speeds", "limit", "num_proc", "filter_seconds", "model.hidden_size", "seeds",
        "methods", "learning_rate", "sampling.temperature", "config", "seed", "data")  # fmt: skip
CONFIG = {"model_type": "dcar-decoder", "hidden_size": 32, "num_layers": 2, "dropout": 0.1, "bos": True}
POLICY = {"model_type": "dcar-chunk-policy", "hidden_size": 32, "num_actions": 4, "width": 16,
          "num_attention_heads": 2, "chunk_range": [2, 3]}
BEST = {"identity": {}, "sampling": {"temperature": 0.5, "top_k": 3, "top_p": 1.0}}
TUNED: dict[str, Any] = {"format_version": 1, "split": "dev", "utterances": 6, "seeds": [0], "prompt_seeds": [0],
                         "asr": "j", "methods": {"car-1": BEST}}
PROFILE = {"range": [2, 3], "base_checksum": "abc", "rows": []}


def _guidance(folder: Path) -> None:
    config = DCPOConfig(output_dir=str(folder), guidance=str(folder / "profile.json"))
    found = guidance_range(config, "abc")
    assert found and all(k >= 1 for k in found)


def parsers(folder: Path) -> dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None]]]:
    """What is parsed, and what has to hold of it."""
    methods = piece(*METHODS, "-2", "-3", "@t0.4", "@t", "-k", "-p0.9", "{", "}", ",", "..", ":", "@", "4", "²",
                    "٣", "9" * 400, "9" * 5000, "tuned", "draft", "starter")
    yaml_text = piece("a", ": ", "\n", "- ", "[", "]", "{", "}", "&a ", "*a", "!!python/object:os.system ",
                      "1e400", "<<", "|", "'", '"', "0x", "9" * 5000, ".nan", "2026-01-01", "? ", "\t", "%YAML", "---")
    values = st.sampled_from(["", "1", "-1", "nan", "1e400", "[]", "{}", "null", "true", "[1,2]", "${x}", "${out}",
                              "\0", "9" * 5000, "/", "x" * 5000]) | st.text(max_size=10)
    keys = st.sampled_from(KEYS) | st.text(max_size=5)
    cuts = st.one_of(
        like(CUT), json_values, like(CUT).map(lambda cut: {**CUT, "recording": cut}),
        like(CUT["recording"]).map(lambda found: {**CUT, "recording": found}),
        like(CUT["supervisions"][0]).map(lambda found: {**CUT, "supervisions": [found]}))
    tuned = like(TUNED) | like(BEST).map(lambda found: {**TUNED, "methods": {"car-1": found}})
    return {
        "text": (written, check_text),
        "words": (st.tuples(written, written), check_words),
        "jsonl": (like(ROW) | json_values | st.text(), check_jsonl),
        "lhotse": (cuts, check_cut),
        "methods": (methods, check_method),
        "yaml": (yaml_text | st.text(), check_yaml),
        "settings": (st.lists(st.tuples(keys, values), max_size=3), check_settings),
        "config.json": (like(CONFIG) | json_values,
                        check_files(folder, "config.json", lambda: load_decoder_config(folder))),
        "policy": (like(POLICY), check_files(folder, "config.json", lambda: load_policy(folder))),
        "tuned.json": (tuned,
                       check_files(folder, "tuned.json", lambda: load_tuned(folder / "tuned.json").beside(
                           make_methods(["car-1"], MODELS)))),
        "profile.json": (like(PROFILE) | json_values, check_files(folder, "profile.json", lambda: _guidance(folder))),
        "records": (json_values, check_files(folder, "records.jsonl", lambda: [
            record.get("id") for record in read_jsonl(folder / "records.jsonl")])),
    }  # fmt: skip


NAMES = list(parsers(Path()))


def run(name: str, folder: Path, examples: int) -> None:
    strategy, check = parsers(folder)[name]
    suppressed = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    settings(max_examples=examples, deadline=60_000, database=None, suppress_health_check=suppressed,
             derandomize=examples < EXAMPLES)(given(strategy)(check))()


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", NAMES)
def test_parsers(name: str, tmp_path: Path) -> None:
    run(name, tmp_path / "files", 25)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_parsers_at_length(name: str, tmp_path: Path) -> None:
    run(name, tmp_path / "files", EXAMPLES)
