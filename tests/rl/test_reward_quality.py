"""`dcar reward-quality`: correlations by hand, what is refused, and a run on the shipped models, recognisers apart."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import spearmanr

from dcar.config import load_config
from dcar.errors import ConfigError, RewardError
from dcar.sources.shipped import shipped
from rl import reward_quality
from rl.reward_quality import RewardQualityConfig, correlation, make, run, table


def test_correlation_is_the_mean_over_groups_in_which_both_vary():
    errors = np.array([[0, 1, 2, 3], [0, 3, 1, 2], [1, 1, 1, 1], [0, 1, 2, 3]], float)
    values = np.array([[4, 3, 2, 1], [1, 2, 3, 4], [1, 2, 3, 4], [5, 5, 5, 5]], float)
    found = correlation(values, errors)
    second = spearmanr(values[1], -errors[1]).statistic
    assert found["groups"] == 2 and found["rank_correlation"] == pytest.approx((1 + second) / 2)
    assert found["standard_error"] == pytest.approx((1 - second) / 2)
    with pytest.raises(RewardError, match="1 groups in which"):
        correlation(values[:1], errors[:1])


@pytest.mark.parametrize(("name", "words"), [("wer", "unknown reward"), ("wer@moonshine", "judge's own opinion"),
                                             ("speed", "unknown reward"), ("token_likelihood", "unknown reward")])
def test_what_is_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        make([name], "moonshine", "nowhere")


def test_a_run(tmp_path, monkeypatch):
    texts: list[str] = []

    class Hears:
        """Loses words: as many as the place of the wave in its group says."""

        name = "hears"

        def transcribe(self, waves, sample_rate):
            return [" ".join(texts[i // 4].split()[i % 4 :]) for i in range(len(waves))]

    def load_prompts(*arguments):
        items = reward_quality_prompts(*arguments)
        texts.extend(item.text for item in items)
        return items

    reward_quality_prompts = reward_quality.load_prompts
    monkeypatch.setattr(reward_quality, "load_prompts", load_prompts)
    monkeypatch.setattr(reward_quality, "load_recognizer", lambda name, **_: Hears())
    arguments = ["decoder=starter", f"data={shipped('prepared')}", f"out={tmp_path}", "utterances=4",
                 "num_generations=4", "rewards=[wer@other,token_likelihood@starter,token_distance]",
                 "sampling.temperature=0", "sampling.max_tokens=100", "sizes=[3,8]"]
    result = run(load_config(RewardQualityConfig, arguments))
    wer, likelihood, tokens = result["rows"]
    assert -1 <= likelihood["rank_correlation"] <= 1 and 0 < likelihood["seconds"] < wer["seconds"]
    assert wer["reward"] == "wer@other" and wer["rank_correlation"] == pytest.approx(1.0)  # it is the judge's twin
    assert -1 <= tokens["rank_correlation"] <= 1 and 0 < tokens["seconds"] < wer["seconds"]
    assert result["best_of_group"] <= result["wer"] and result["method"] == "random-3-8"
    assert json.loads((tmp_path / "reward_quality.json").read_text())["utterances"] == 4
    assert "token_distance" in table(result) and "4 sentences x 4 rollouts" in table(result)
