"""The swap test: what is drawn in the place of a token, and the analysis end to end on a tiny
decoder."""

import json

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_data import tiny_vocoder, write_prepared
from tiny_decoders import tiny_decoder
from tiny_verifiers import FALSE_ALARM

from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig, utterance_keys
from dcar.text.inventory import PHONEME_VERSION, TEXT_VOCAB_SIZE
from eval.analysis.swap import SwapConfig, own_groups, run, swap, table


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


class Judge:
    """Transcribes by loudness, and counts how often."""

    name, heard = "toy", 0

    def transcribe(self, waves, sample_rate):
        Judge.heard += len(waves)
        return ["a red house" if np.abs(wave).sum() % 1 < 0.5 else "a red mouse" for wave in waves]


@pytest.fixture
def analysis(tmp_path, monkeypatch):
    """Settings of an analysis, whose recogniser and similarity are stand-ins."""
    write_prepared(tmp_path / "data", train=2, dev=4)
    tiny_decoder(
        text_vocab_size=TEXT_VOCAB_SIZE, tokenizer="tiny@abc", phonemes=PHONEME_VERSION
    ).save_pretrained(tmp_path / "decoder")
    for name, stand_in in (
        ("load_recognizer", lambda name, device: Judge()),
        ("corpus_recordings", lambda data: print),
        ("vocoder_for", lambda *given: tiny_vocoder()),
        ("load_similarity", lambda *given: lambda wave, rate, speaker: float(np.abs(wave).mean())),
    ):
        monkeypatch.setattr(f"eval.analysis.swap.{name}", stand_in)
    return dict(
        decoder=str(tmp_path / "decoder"),
        data=str(tmp_path / "data"),
        split="dev",
        prompt_tokens=5,
        theta=[1.0, -0.2],
        seeds=[0, 1],
        out=str(tmp_path / "out"),
    )


def test_analysis_end_to_end_and_resumed(analysis, tmp_path):
    config = SwapConfig(**analysis, sampling=SamplingConfig(min_tokens=20, max_tokens=30))
    result = run(config)
    plain, alone, together = result["rows"]
    assert [row["method"] for row in result["rows"]] == ["car-1", "pcg-1", "pcg--0.2"]
    assert plain["tokens_per_pass"] <= 1 and "swap" not in plain
    # nothing is like another code: the same speech
    assert (alone["group_size"], alone["swapped"]) == (1, 0)
    assert alone["swap"]["wer_change"] == alone["swap"]["similarity_change"] == 0
    assert (
        together["group_size"] > 2
        and together["swapped"] > 0.5
        and together["swap"]["similarity_change"] != 0
    )
    assert together["tokens_per_pass"] > alone["tokens_per_pass"] > 1
    assert json.loads((tmp_path / "out" / "swap.json").read_text())["n"] == 4
    assert "pcg--0.2" in table(result) and "swapped:" in table(result)

    heard = Judge.heard  # not the swap at theta 1, which changes nothing
    assert heard <= 4 * 2 * 4
    shard = next((tmp_path / "out" / "records").iterdir())
    # a kill while writing
    shard.write_text("\n".join(shard.read_text().splitlines()[:-1]) + '\n{"key": "cut o')
    again = run(config)
    assert again["rows"] == result["rows"] and Judge.heard == heard + 1


def test_wrong_settings(analysis):
    with pytest.raises(ConfigError, match="seeds .*theta_mel"):
        SwapConfig(**{**analysis, "theta": []})
    with pytest.raises(ConfigError, match="'pcg-mel-0.9' .*`dcar fit-verifiers`"):
        run(SwapConfig(**{**analysis, "theta_mel": [0.9]}))
