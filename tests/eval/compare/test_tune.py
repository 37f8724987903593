"""Own samplings, replicates by prompts and `dcar tune`, end to end on a random tiny decoder."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from compare_worker import (
    SHORT,
    LevelJudge,
    records_of,
    spoken,
    tiny_config,
    tiny_items,
    tiny_policy,
    tiny_tools,
    transcribed,
)
from tiny_data import tiny_split
from tiny_decoders import tiny_decoder

from dcar.config import load_config
from dcar.decoding import FixedChunk, decode
from dcar.errors import CheckpointError, ConfigError, DataError
from dcar.methods import Models
from dcar.prepare.columns import Split
from dcar.sampling import SamplingConfig
from eval.compare.run import run
from eval.compare.tools import Tools
from eval.compare.tune import TuneConfig, main, table, tune
from eval.compare.tuned import load_tuned
from eval.results.types import RECORDING, RESYNTHESIS, read_result

WARM = replace(SHORT, temperature=0.9)


def other_voices(count: int = 6, shift: int = 1) -> list:
    """The tiny utterances with other prompts."""
    return [
        replace(item, prompt_ids=tuple((t + shift) % 12 for t in item.prompt_ids))
        for item in tiny_items(count)
    ]


def of_split(others: list) -> dict:
    """The tiny utterances, and those with the prompts of seed 7."""
    return {"split": {0: tiny_items(), 7: others}}


def replicated() -> Tools:
    codebook = np.random.default_rng(0).normal(size=(12, 4))
    return replace(tiny_tools(), sets=of_split(other_voices()), codebook=codebook)


def tiny_tune(out: Path | str, **changes) -> TuneConfig:
    settings = {
        "methods": ["car-1", "car-3"],
        "samplings": ["t{0,0.5,1}", "t1-k2"],
        "batch_size": 3,
        "resamples": 200,
        "sampling": replace(SHORT, top_k=5),
        "device": "cpu",
        "out": str(out),
        **changes,
    }
    return TuneConfig(**settings)


def test_records_of_samplings_are_never_mixed(tmp_path):
    result = spoken(tmp_path, methods=["car-2", "car-2@t0.5", "car-2@t0"], sampling=WARM)
    tools = tiny_tools()
    prompts = tools.items
    prints = {}
    for name, temperature in (("car-2", 0.9), ("car-2@t0.5", 0.5), ("car-2@t0", 0.0)):
        sampling = SamplingConfig(temperature, max_tokens=20, max_tokens_per_text_unit=4)
        direct = decode(tools.models.decoder, prompts, FixedChunk(2), sampling, seed=0)
        mine = [r for r in records_of(tmp_path) if r.method == name]
        assert {r.id: r.tokens for r in mine} == {r.utterance_id: r.tokens for r in direct}
        prints[name] = {r.fingerprint for r in mine}
    assert sum(map(len, prints.values())) == len(set().union(*prints.values())) == 3 * 6
    rows = {row.method: row for row in result.first.rows}
    assert [rows[m].sampling.temperature for m in prints] == [0.9, 0.5, 0.0]
    assert rows["car-2@t0.5"].family.label == "CAR-k (T 0.5)"
    assert result.methods["car-2@t0"] == result.methods["car-2"]
    assert (tmp_path / "compare.txt").read_text().split()[:2] == ["method", "T"]


def test_prompts_replicate_where_seeds_are_one(tmp_path):
    asked = dict(
        methods=["car-2@t0", "car-2"],
        seeds=[0, 1],
        references=True,
        report=True,
        audio_utterances=2,
    )
    result = spoken(tmp_path, replicated(), prompt_seeds=[0, 7], **asked)
    records = records_of(tmp_path)
    counted = Counter((r.method, r.seed, r.prompt_seed) for r in records)
    assert counted == {
        (RECORDING, 0, 0): 6,
        (RESYNTHESIS, 0, 0): 6,
        **{(m, s, p): 6 for m in ("car-2@t0", "car-2") for s in (0, 1) for p in (0, 7)},
    }
    said = {(r.seed, r.prompt_seed, r.id): r.tokens for r in records if r.method == "car-2@t0"}
    ids = [i.utterance_id for i in tiny_items()]
    assert all(said[0, p, i] == said[1, p, i] for p in (0, 7) for i in ids)  # seeds are one
    assert any(said[0, 0, i] != said[0, 7, i] for i in ids)  # prompts are not
    direct = decode(
        tiny_tools().models.decoder,
        other_voices(),
        FixedChunk(2),
        SamplingConfig(0.0, max_tokens=20, max_tokens_per_text_unit=4),
    )
    assert {r.utterance_id: r.tokens for r in direct} == {i: said[0, 7, i] for i in ids}
    row = next(row for row in result.first.rows if row.method == "car-2@t0")
    # intervals: 6 utterances, not 24
    assert (row.n, row.seeds, row.prompts, row.records) == (6, 2, 2, 24)
    assert row.variety.distance.value > 0 and result.prompt_seeds == [0, 7]
    assert "prompts of seeds 0, 7" in (tmp_path / "compare.txt").read_text()
    assert "<h2>Variety</h2>" in (tmp_path / "report.html").read_text()
    assert transcribed(tmp_path, replicated(), prompt_seeds=[0, 7], **asked) == 0
    assert transcribed(tmp_path, **asked) == 0  # the prompts of today are the first of two


def test_replicates_of_an_utterance_stay_together(tmp_path):
    """Repeating every utterance with the same outcome must not narrow an interval."""
    (one,) = spoken(tmp_path, methods=["car-2@t0"]).first.rows
    # the first prompts alone
    (three,) = spoken(tmp_path, replicated(), methods=["car-2@t0"], seeds=[0, 1, 2]).first.rows
    assert three.records == 18 and three.wer.ends == one.wer.ends
    assert three.variety.distance.value == 0 and three.variety.distance.ends == [0, 0]
    assert "Identical in all renderings" in (tmp_path / "compare.txt").read_text()


def test_an_utterance_with_the_same_prompt_again_is_spoken_once(tmp_path):
    alone, asked = LevelJudge(), dict(methods=["car-2"], prompt_seeds=[0, 7])
    others = [*tiny_items()[:3], *other_voices()[3:]]
    spoken(tmp_path, replace(tiny_tools(), sets=of_split(others)), **asked)
    (shard,) = (tmp_path / "records").glob("*.jsonl")
    assert len(shard.read_text().splitlines()) == 6 + 3 and len(records_of(tmp_path)) == 12
    with pytest.raises(ConfigError, match="prompt_seeds: 7 "):
        spoken(tmp_path, replace(tiny_tools(alone), sets=of_split(tiny_items())), **asked)
    assert alone.calls == 0


def test_prompt_seeds_are_checked_and_loaded(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"prompt_seeds .*\[1, 1\]"):
        tiny_config(tmp_path, prompt_seeds=[1, 1])
    with pytest.raises(ConfigError, match="methods, texts, seeds and prompt_seeds"):
        tiny_config(tmp_path, prompt_seeds=[])
    asked = []

    def spy(split, prompt_tokens, seed, *rest):
        # test1 is its speaker's only utterance, so it would be its own prompt
        assert split.rows["id"] == ["test0", "test2"]
        asked.append(seed)
        if len(asked) == 2:
            raise DataError("far enough")
        return []

    monkeypatch.setattr("eval.compare.tools.load_models", lambda *a, **o: Models(tiny_decoder()))
    monkeypatch.setattr("eval.compare.tools.prepared_info", lambda path: {})
    monkeypatch.setattr("eval.compare.tools.split_for", lambda *a: Split.of(tiny_split("test", 3)))
    monkeypatch.setattr("eval.compare.tools.make_prompts", spy)
    with pytest.raises(DataError, match="far enough"):
        run(tiny_config(tmp_path, prompt_seeds=[5, 2]))
    assert asked == [5, 2]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    out = tmp_path_factory.mktemp("tune")
    return out, tune(tiny_tune(out, methods=[], prompt_seeds=[0, 7]), replicated())


def test_tune_speaks_the_grid_and_keeps_the_best(tuned):
    out, found = tuned
    assert load_tuned(out / "tuned.json").search == found
    assert list(found.methods) == ["car-1", "car-2", "car-3", "car-4", "dcar"]
    rows = {row.method: row for row in read_result(out).first.rows}
    decoder = tiny_tools().models.decoder.checksum()
    for method, of in found.methods.items():
        assert [(p.name, p.temperature, p.top_k) for p in of.grid] == [
            ("t0", 0, 5),
            ("t0.5", 0.5, 5),
            ("t1", 1, 5),
            ("t1-k2", 1, 2),
        ]
        assert all(p.wer == rows[f"{method}@{p.name}"].wer for p in of.grid)
        assert of.point.wer.value == min(p.wer.value for p in of.grid)
        assert of.point.difference == 0 and of.point.not_worse
        assert of.identity["decoder"] == decoder
        for point in of.grid:
            low, high = point.wer.ends
            assert point.variety.distance is not None and low <= point.wer.value <= high
    assert "policy" in found.methods["dcar"].identity
    assert (found.common.top_k, found.seeds, found.prompt_seeds) == (5, [0], [0, 7])
    text = table(found)
    assert text.count("*") == 5 + 1 and "t1-k2" in text.splitlines()[0]
    assert load_config(TuneConfig, ["--config", str(out / "tune.yaml")]).samplings == [
        "t{0,0.5,1}",
        "t1-k2",
    ]


def test_a_grown_grid_speaks_what_is_missing(tmp_path):
    """The records are those of a comparison, which continues where it was interrupted."""
    judge = LevelJudge()
    whole = tune(tiny_tune(tmp_path), tiny_tools(judge))
    asked = judge.calls
    assert tune(tiny_tune(tmp_path), tiny_tools(judge)).methods == whole.methods
    for shard in (tmp_path / "records").glob("*.jsonl"):  # as another normaliser scored them
        other = re.sub(
            r'"normalizer":"[^"]+","words":{"substitutions":\d+',
            '"normalizer":"x","words":{"substitutions":7',
            shard.read_text(),
        )
        assert other.count('"x"') and shard.write_text(other)
    assert tune(tiny_tune(tmp_path), tiny_tools(judge)).methods == whole.methods
    assert judge.calls == asked
    more = tune(tiny_tune(tmp_path, samplings=["t{0,0.5,0.7,1}", "t1-k2"]), tiny_tools(judge))
    assert 0 < judge.calls - asked <= 2 * 6 and len(more.methods["car-1"].grid) == 5


def test_at_equal_errors_the_livelier_sampling_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(LevelJudge, "transcribe", lambda self, waves, rate: ["ash"] * len(waves))
    found = tune(tiny_tune(tmp_path, samplings=["t{0.5,1,0}"]), tiny_tools())
    assert {of.best for of in found.methods.values()} == {"t1"}
    assert all(point.not_worse for of in found.methods.values() for point in of.grid)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"samplings": []}, "samplings"),
        ({"samplings": ["t0.4", "t0.40"]}, r"samplings .*\['t0.4', 't0.4'\]"),
        ({"samplings": ["0.4"]}, "'0.4'"),
        ({"methods": ["car-1@t0"]}, "without"),
        ({"tuned": "x"}, "^tuned "),
        ({"texts": ["hard"]}, "^texts "),
        ({"limit": -1}, "limit"),
        ({"samplings": ["t{0"]}, "brace"),
    ],
)
def test_bad_searches_are_refused(bad, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        tiny_tune(tmp_path, **bad)


def test_the_command(tmp_path):
    with pytest.raises(ConfigError, match="'t-1'"):
        main(["samplings=[t-1]"])
    with pytest.raises(DataError, match="nowhere: .*`dcar prepare`"):
        main([f"data={tmp_path}/nowhere", f"out={tmp_path}"])
    config = load_config(TuneConfig, ["--config", "tune_starter"])
    assert (config.split, config.sampling.top_k, config.methods) == ("dev", 10, [])


def test_a_comparison_sets_every_method_beside_its_best(tuned, tmp_path):
    source, found = tuned
    result = spoken(
        tmp_path,
        methods=["far", "car-{1,3}", "car-3@t0", "dcar"],
        tuned=str(source / "tuned.json"),
        sampling=WARM,
        report=True,
    )
    rows = {row.method: row for row in result.first.rows}
    assert list(rows) == "far car-1 car-1@tuned car-3 car-3@tuned car-3@t0 dcar dcar@tuned".split()
    for method in ("car-1", "car-3", "dcar"):
        best, own = found.methods[method].point, rows[f"{method}@tuned"].sampling
        assert (own.temperature, own.top_k, own.top_p) == (best.temperature, best.top_k, best.top_p)
        assert rows[method].sampling.temperature == 0.9
    assert rows["dcar@tuned"].tests["best_car"].baseline in ("car-1@tuned", "car-3@tuned")
    about = result.tuned
    assert about["missing"] == ["far"] and about["split"] == "dev" and not about["same_split"]
    assert "only: far." in (tmp_path / "compare.txt").read_text()
    assert "CAR-k (own best)" in (tmp_path / "report.html").read_text()
    same = spoken(tmp_path, methods=["car-1"], tuned=str(source / "tuned.json"), split="dev")
    assert same.tuned["same_split"]


def test_tuned_of_other_models_is_refused(tuned, tmp_path):
    source = str(tuned[0] / "tuned.json")
    tools = tiny_tools()
    other = tiny_decoder(seed=9)
    decoder = replace(
        tools, models=Models(other, policies={"": tiny_policy(base=other.checksum())})
    )
    with pytest.raises(CheckpointError, match="tuned.json: 'car-1' .*decoder"):
        spoken(tmp_path, decoder, methods=["car-1"], tuned=source)
    base = tools.models.decoder
    policy = replace(tools, models=Models(base, policies={"": tiny_policy(3, base.checksum())}))
    with pytest.raises(CheckpointError, match="tuned.json: 'dcar' .*policy"):
        spoken(tmp_path, policy, methods=["car-1", "dcar"], tuned=source)
    with pytest.raises(ConfigError, match="tuned.json .*car-1, car-2, car-3"):
        spoken(tmp_path, methods=["far"], tuned=source)
    assert not (tmp_path / "records").exists()  # before anything was spoken


@pytest.mark.parametrize(
    "content", ["nonsense", '{"format_version": 1}', '{"format_version": 2, "methods": {}}']
)
def test_broken_tuned_files_are_named(tmp_path, content):
    with pytest.raises(DataError, match="tuned.json.*dcar tune"):
        load_tuned(tmp_path / "tuned.json")
    (tmp_path / "tuned.json").write_text(content)
    with pytest.raises(DataError, match="tuned.json.*dcar tune"):
        load_tuned(tmp_path / "tuned.json")
