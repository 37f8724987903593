"""The swap test: what is drawn in the place of a token, and the analysis end to end on a tiny
decoder."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from compare_worker import LevelJudge, loudness, tiny_tools
from scipy import stats
from tiny_verifiers import FALSE_ALARM

from dcar.config import load_config
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig, utterance_keys
from eval.compare.swap import SwapConfig, SwapResult, own_groups, run, swap, table
from eval.compare.tools import Tools
from eval.results.types import from_json, read_records
from eval.scorers.load import Scorer
from eval.verifiers.pcg import code_vectors


def test_members_of_the_own_group_are_drawn_alike_and_singletons_stay():
    groups = [[0, 1, 3], [0, 1], [2], [0, 3]]
    tokens = [0, 1, 2, 3] * 5000
    (key,) = utterance_keys(0, ["a"])
    swapped = torch.tensor(swap(tokens, groups, key)).view(-1, 4)
    assert stats.chisquare(swapped[:, 0].bincount(minlength=4)[[1, 3]]).pvalue > FALSE_ALARM
    assert set(swapped[:, 0].tolist()) == {1, 3}
    assert (swapped[:, 1] == 0).all() and (swapped[:, 2] == 2).all() and (swapped[:, 3] == 0).all()
    # an address, not a stream
    assert swap(tokens[:40], groups, key) == swapped.flatten()[:40].tolist()
    assert swap(tokens, groups, utterance_keys(1, ["a"])[0]) != swapped.flatten().tolist()
    assert swap([], groups, key) == []


def test_own_groups_are_the_neighbourhoods_of_each_code():
    unit = torch.tensor([[1.0, 0], [0.8, 0.6], [0.0, 1], [torch.nan, 0]])
    assert own_groups(unit, 0.7) == [[0, 1], [0, 1], [2], [3]]
    assert own_groups(unit, 0.5) == [[0, 1], [0, 1, 2], [1, 2], [3]]


@pytest.fixture
def config(tmp_path) -> SwapConfig:
    return SwapConfig(
        theta=[1.0, -0.2],
        seeds=[0, 1],
        batch_size=3,
        sampling=SamplingConfig(min_tokens=20, max_tokens=30),
        device="cpu",
        out=str(tmp_path / "out"),
    )


def tools_of(config: SwapConfig, judge: LevelJudge | None = None) -> Tools:
    scorer = Scorer("loudness", "similarity", config.similarity, loudness)
    return replace(tiny_tools(judge), scorers={scorer.name: scorer})


def test_analysis_end_to_end_and_resumed(config, tmp_path):
    judge = LevelJudge()
    result = run(config, tools_of(config, judge))
    plain, alone, together = result.rows
    assert [row.method for row in result.rows] == ["car-1", "pcg-1", "pcg--0.2"]
    assert plain.tokens_per_pass <= 1 and plain.swap is None
    # nothing is like another code: the same speech
    assert (alone.group_size, alone.swapped) == (1, 0)
    assert alone.swap.wer_change.difference == alone.swap.similarity_change == 0
    assert together.group_size > 2 and together.swapped > 0.5
    assert together.swap.similarity_change != 0
    assert together.tokens_per_pass > alone.tokens_per_pass > 1
    assert from_json(SwapResult, (tmp_path / "out" / "swap.json").read_text()) == result
    assert "pcg--0.2" in table(result) and "swapped:" in table(result)
    assert load_config(SwapConfig, ["--config", str(tmp_path / "out" / "swap.yaml")]) == config

    records = read_records(tmp_path / "out" / "records.jsonl")
    plain_records, swapped_records = (
        [r for r in records if r.method == name] for name in ("car-1", "pcg--0.2 swapped")
    )
    groups = own_groups(code_vectors(tiny_tools().models.decoder), -0.2)
    both = list(zip(plain_records, swapped_records, strict=True))
    for record, other in both:
        assert (record.id, record.seed) == (other.id, other.seed)
        (key,) = utterance_keys(record.seed, [record.id])
        assert other.tokens == swap(record.tokens, groups, key)
    scores = [(a.scores["loudness"], b.scores["loudness"]) for a, b in both]
    changes = [b - a for a, b in scores if None not in (a, b)]
    assert 0 < len(changes) < 12  # where one has no similarity, there is no change
    assert together.swap.similarity_change == pytest.approx(np.mean(changes))

    asked = judge.calls
    assert run(config, tools_of(config, judge)).rows == result.rows and judge.calls == asked


def test_wrong_settings(config):
    with pytest.raises(ConfigError, match="seeds .*theta_mel"):
        replace(config, theta=[])
    with pytest.raises(ConfigError, match="'pcg-mel-0.9': .*`dcar fit-verifiers`"):
        run(replace(config, theta_mel=[0.9]), tools_of(config))
