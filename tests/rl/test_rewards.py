"""Rewards: WER, penalties, failures, the ground truth's WER."""

import math
import re
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jiwer
import numpy as np
import pytest
import torch
import toy_world
from toy_world import ToyRecognizer, ToyVocoder, faster, toy_items, toy_token_recognizer

from dcar.decoding import DecodeResult
from dcar.errors import AudioError, ConfigError
from rl.metrics import Metrics, add_decisions, add_rollouts, scalars
from rl.objective import group_advantages
from rl.rewards import (
    CERReward,
    LikelihoodReward,
    RangePenalty,
    TokenLikelihoodReward,
    WERReward,
    ask,
    import_rewards,
    names_of,
    needs_audio,
    needs_sound,
    path_of,
    score,
)
from rl.transcription import GroundTruth, RolloutRecord, synthesise


def record(index: int = 0, tokens=(0, 1, 2), actions=(1,), units: int = 4) -> RolloutRecord:
    item = next(i for i in toy_items(50, name=f"r{index}-") if len(i.text_ids) == units)
    result = DecodeResult(
        item.utterance_id, "dcar", 0, list(tokens), False, len(actions), sizes=list(actions)
    )
    return RolloutRecord(item, index, 0, result)


def perfect(units: int) -> list[int]:
    return [3 * u + k for u in range(units) for k in (0, 1, 2)]


class Scripted:
    """A recogniser that says what it is told, by the first sample of the wave."""

    name = "scripted"

    def __init__(self, texts):
        self.texts, self.calls = texts, 0

    def transcribe(self, waves, sample_rate):
        self.calls += 1
        return [self._one(wave) for wave in waves]

    def _one(self, wave):
        text = self.texts[int(wave[0])]
        if isinstance(text, Exception):
            raise text
        return text


def spoken(texts, references):
    records = [record(i) for i in range(len(texts))]
    for i, (r, reference) in enumerate(zip(records, references, strict=True)):
        r.item = replace(r.item, text=reference)
        r.wave, r.sample_rate = np.full(4, i, np.float32), 50
    return records


def test_wer_reward_agrees_with_jiwer_and_is_capped():
    references = ["the cat sat on the mat", "one two three", "hello world", "good morning"]
    heard = ["the cat sat on mat", "one too three four", "", "a b c d e f g h"]
    records = spoken(heard, references)
    reward = WERReward(Scripted(heard), {records[0].item.utterance_id: 0.5})
    values = ask(reward, records)
    assert values[0] == pytest.approx(0.5 - jiwer.wer(references[0], heard[0]))
    assert values[1] == pytest.approx(-jiwer.wer(references[1], heard[1]))
    assert values[2] == -1  # an empty transcript is all words deleted
    assert records[3].errors.rate > 1 and values[3] == -1  # runaway speech counts as the cap
    assert ask(WERReward(Scripted(heard), cap=3.0), spoken(heard, references))[3] == pytest.approx(
        -3.0
    )


def test_cer_reward_agrees_with_jiwer_is_capped_and_hears_each_rollout_once():
    references = ["the cat sat", "the cat sat", "a red house"]
    heard = ["the cat sat", "the bat sat", "what on earth was all of that about"]
    recognizer = Scripted(heard)
    records = spoken(heard, references)
    wer = ask(WERReward(recognizer), records)
    calls = recognizer.calls
    values = ask(CERReward(recognizer), records)
    assert recognizer.calls == calls  # the transcripts of the other reward serve again
    assert (
        values[:2] == [0.0, pytest.approx(-jiwer.cer("the cat sat", "the bat sat"))]
        and values[2] == -1.0
    )
    assert values[1] > wer[1]
    assert ask(CERReward(Scripted(heard), cap=9.0), spoken(heard, references))[2] == pytest.approx(
        -jiwer.cer(references[2], heard[2])
    )


def test_a_rollout_without_tokens_is_bad_not_missing():
    r = record(tokens=(), actions=(2,))
    synthesise([r], ToyVocoder())
    assert (
        ask(WERReward(ToyRecognizer()), [r]) == [-1.0] and r.transcript == "" and r.failure is None
    )


def test_vocoder_failures_and_bad_samples_are_missing_rewards():
    records = [record(0, perfect(4)), record(1, (0, 2)), record(2, (3,))]
    synthesise(records, ToyVocoder(breaks=lambda tokens: len(tokens) == 2))
    total, _ = score(records, [WERReward(ToyRecognizer())], [1.0])
    assert math.isnan(total[1]) and "toy vocoder broke" in records[1].failure
    assert total[0] == 0 and total[2] == -1

    class Poisoned(ToyVocoder):
        def synthesize(self, token_lists, speaker):
            return [np.full(3, np.nan, np.float32) for _ in token_lists]

    r = record()
    synthesise([r], Poisoned())
    assert (
        math.isnan(score([r], [WERReward(ToyRecognizer())], [1.0])[0][0])
        and "not finite" in r.failure
    )


@pytest.mark.parametrize(
    ("actions", "tokens", "expected"),
    [
        ([1] * 10, 10, 0.1),  # worked rule-based
        ([7] * 10, 70, 0.1 * 4 / 7),
        ([2, 3, 2], 7, 0.0),
        ([1, 2, 5, 7], 15, 0.1 * (1 + 0 + 2 + 4) / 15),
    ],
)
def test_range_penalty(actions, tokens, expected):
    r = record(tokens=range(tokens), actions=actions)
    assert -ask(RangePenalty([2, 3]), [r])[0] == pytest.approx(expected)
    assert -ask(RangePenalty([2, 3], alpha=1.0), [r])[0] == pytest.approx(10 * expected)
    assert ask(RangePenalty([]), [r]) == [0.0]


def test_a_total_is_the_sum_of_the_rewards_that_apply():
    """As in TRL: None is left out. What could not be computed masks the rollout, as does the
    lack of any reward."""
    nan, none = math.nan, None
    cases = [  # one reward, another, total with the weights 2 and 0.5
        (1.0, 4.0, 4.0),
        (none, 4.0, 2.0),
        (1.0, none, 2.0),
        (none, none, nan),
        (nan, 4.0, nan),
        (none, nan, nan),
        (-math.inf, none, nan),
    ]
    records = [record(i) for i in range(len(cases))]
    totals, _ = score(
        records,
        [
            lambda completions, **_: [c[0] for c in cases],
            lambda completions, **_: [c[1] for c in cases],
        ],
        [2.0, 0.5],
    )
    np.testing.assert_array_equal(totals, [c[2] for c in cases])
    assert [bool(r.failure) for r in records] == [math.isnan(c[2]) for c in cases]
    assert "None" in records[3].failure
    assert records[5].failure.startswith("<lambda>_2 ")


def test_a_reward_that_changes_what_it_receives_changes_nothing_else():
    def destructive(completions, audio, chunk_sizes, reference_tokens, **columns):
        for tokens in (*completions, *chunk_sizes, *reference_tokens):
            tokens.clear()
        for wave in audio:
            wave[:] = 0
        return [1.0 for _ in completions]

    def length(completions, audio, **columns):
        return [
            len(tokens) + float(wave.sum()) for tokens, wave in zip(completions, audio, strict=True)
        ]

    one = record()
    one.wave, one.sample_rate = np.ones(4, np.float32), 16_000
    before = list(one.item.reference_tokens)
    total, parts = score([one], [destructive, length], [1.0, 1.0])
    assert total.tolist() == [8.0] and parts.tolist() == [[1.0, 7.0]]
    assert one.result.tokens == [0, 1, 2] and one.result.sizes == [1]
    assert list(one.item.reference_tokens) == before


def test_a_reward_beyond_float32_is_missing():
    """Its group's spread once overflowed, so that all advantages were 0."""
    records = [record(i) for i in range(3)]
    total, _ = score(records, [lambda completions, **_: [1e300, -1e30, 2.0]], [1.0])
    np.testing.assert_array_equal(total, [np.nan, -1e30, 2.0])
    assert "no finite number of float32" in records[0].failure
    values = group_advantages(torch.from_numpy(total), 3).values
    assert values[0] == 0 and values[1] < 0 < values[2]


def test_every_reward_has_a_name_of_its_own_in_the_log():
    class Energy:
        needs_audio = True

        def __call__(self, completions, **columns):
            return [4.0 for _ in completions]

    def energy_2(completions, value=0.0, **columns):
        return [value for _ in completions]

    energy = Energy()
    two, three = partial(energy_2, value=2.0), partial(partial(energy_2), value=3.0)
    rewards = [two, three, Energy(), energy, partial(energy), lambda completions, **columns: [None]]
    names = ["energy_2", "energy_2_2", "Energy", "Energy_2", "Energy_3", "<lambda>"]
    assert names_of(rewards) == names and names_of([faster, faster]) == ["faster", "faster_2"]
    named = [SimpleNamespace(name=name) for name in ("a", "a_2", "a")]
    assert names_of(named) == ["a", "a_2", "a_3"]
    assert needs_audio(partial(energy)) and not needs_audio(two)
    records, metrics = [record()], Metrics()
    totals, parts = score(records, rewards, [1.0] * 6)
    batch = SimpleNamespace(
        records=records, rewards=torch.from_numpy(totals), parts=parts, seconds={}
    )
    add_rollouts(metrics, batch, torch.zeros(1), rewards, [], 4)
    logged = metrics.drain()
    means = [logged.get(f"rewards/{name}/mean") for name in names]
    assert totals.tolist() == [17.0] and means == [2.0, 3.0, 4.0, 4.0, 4.0, None]


def test_log_likelihood_is_scaled_and_has_a_floor():
    class CTC(Scripted):
        def log_likelihood(self, waves, sample_rate, texts):
            return [float(self.texts[int(w[0])]) for w in waves]

    records = spoken([-0.5, -float("inf"), 0], ["a b", "c", "d"])
    records[2].wave = None
    values = ask(LikelihoodReward(CTC([-0.5, -float("inf"), 0])), records)
    assert values[:2] == pytest.approx([-0.05, -1.0]) and math.isnan(values[2])
    with pytest.raises(ConfigError, match="log_likelihood: .*scripted"):
        LikelihoodReward(Scripted([]))


def test_token_likelihood_needs_no_wave_is_scaled_and_has_a_floor():
    recognizer = toy_token_recognizer()
    right, wrong, short, silent = (
        record(i, tokens)
        for i, tokens in enumerate((perfect(4), [*perfect(2), *perfect(2)], (0, 3), ()))
    )
    values = ask(TokenLikelihoodReward(recognizer, scale=0.5), [right, wrong, short, silent])
    told = recognizer.log_likelihood([right.result.tokens, wrong.result.tokens], [(1, 2, 3, 4)] * 2)
    assert values[:2] == pytest.approx([0.5 * t for t in told]) and values[1] < values[0] < 0
    assert (
        values[2:] == [-5.0, -5.0]
        and right.wave is None
        and not any(r.failure for r in (right, short, silent))
    )
    assert ask(TokenLikelihoodReward(recognizer, floor=-0.1), [wrong]) == [pytest.approx(-0.02)]


def test_token_likelihood_is_of_what_was_to_be_spoken_alone():
    """In the continuation layout the prompt's own text stands before the sentence's."""
    recognizer, plain = toy_token_recognizer(), record(0, perfect(4))
    text_ids, prompt_ids = (7, 8, *plain.item.text_ids), (18, 19, 21, 23)
    item = replace(plain.item, text_ids=text_ids, prompt_ids=prompt_ids, prompt_text_units=2)
    longer = RolloutRecord(item, 0, 0, plain.result)
    assert item.target_text_ids == plain.item.target_text_ids == (1, 2, 3, 4)
    assert ask(TokenLikelihoodReward(recognizer), [longer]) == ask(
        TokenLikelihoodReward(recognizer), [plain]
    )


def test_ground_truth_is_measured_once_and_kept(tmp_path):
    items = toy_items(9)
    items[3] = broken = replace(items[3], reference_tokens=items[3].reference_tokens[:-1])
    path = tmp_path / "ground_truth.json"
    truth = GroundTruth(path, "toy", items)
    shares = [truth.missing(rank, 2) for rank in range(2)]
    assert sorted(i.utterance_id for s in shares for i in s) == sorted(
        i.utterance_id for i in items
    )
    truth.measure(ToyVocoder(), ToyRecognizer())
    units = len(broken.text_ids)
    assert truth.rates()[broken.utterance_id] == pytest.approx(1 / units)
    assert truth.corpus() == pytest.approx(1 / sum(len(i.text_ids) for i in items))
    again = GroundTruth(path, "toy", items)
    assert again.missing() == [] and again.rates() == truth.rates()
    assert len(GroundTruth(path, "another recogniser", items).missing()) == 9


def test_meter_takes_means_once_at_the_end():
    metrics = Metrics()
    metrics.add("wer", 1, 10)
    metrics.add("wer", 3, 10)
    metrics.add_values("reward", [1.0, float("nan"), 3.0])
    metrics.add_values("reward_forced", [float("nan")])
    metrics.add_max("ratio_max", 1.2)
    metrics.add_max("ratio_max", 1.1)
    metrics.add_counts("actions", [1, 3])
    metrics.add_counts("actions", [0, 4])
    assert metrics.drain() == {
        "wer": 0.2,
        "reward": 2.0,
        "ratio_max": 1.2,
        "actions": [0.125, 0.875],
    }
    assert metrics.drain() == {}
    # as trackers take them
    assert scalars({"a": 1.0, "b": [0.25, 0.75]}) == {"a": 1.0, "b/1": 0.25, "b/2": 0.75}


def test_a_process_without_prompts_has_no_decisions_to_add():
    metrics = Metrics()
    add_decisions(metrics, [], [2, 3], 4)
    metrics.add_counts("action_histogram", [1, 0, 3, 0])  # of another process
    assert metrics.drain()["action_histogram"] == [0.25, 0, 0.75, 0]


# --- rewards of a user's own ----------------------------------------------------------------------


def loudness(completions, audio, sample_rate, transcripts, emotion, **columns):
    """Names sound, transcripts, and a column of the data set."""
    assert sample_rate == 50 and emotion == ["calm", "calm"] and columns["trainer_state"] == "state"
    assert columns["completion_ids"] == completions
    assert columns["prompts"] == columns["text"]
    return [
        None if wave is None or heard is None else float(len(heard.split())) + len(wave)
        for wave, heard in zip(audio, transcripts, strict=True)
    ]


def test_a_function_gets_the_columns_that_it_names_and_none_is_missing():
    records = [record(0, perfect(4)), record(1, (3, 4))]
    for r in records:
        r.item = replace(r.item, columns={"emotion": "calm"})
    synthesise(records, ToyVocoder(lambda tokens: len(tokens) == 2))
    totals, parts = score(
        records, [loudness, faster], [1.0, 0.0], ToyRecognizer(), trainer_state="state"
    )
    assert (
        totals[0] == 4 + 12 and math.isnan(totals[1]) and "toy vocoder broke" in records[1].failure
    )
    assert parts[1, 1] > 0  # the other reward could be computed

    def few(completions, **columns):
        return [1.0]

    def voiceless(completions, **columns):
        return [0.0 for _ in columns["audio"]]

    for reward, why in ((few, "few: ValueError: "), (voiceless, "KeyError: 'audio'")):
        silent = [record(0), record(1)]
        assert np.isnan(score(silent, [reward], [1.0])[0]).all() and why in silent[0].failure
    assert needs_audio(loudness) and not needs_audio(faster)
    assert needs_sound([faster, loudness]) and not needs_sound([faster])
    assert names_of([loudness, WERReward(ToyRecognizer())]) == ["loudness", "wer"]


def test_dotted_paths_name_functions(tmp_path, monkeypatch):
    own = "def energy(completions, audio, **columns):\n    return [0.0] * len(audio)\n"
    (tmp_path / "mine_here.py").write_text(own)
    monkeypatch.chdir(tmp_path)  # a module in the folder that the command is started in
    monkeypatch.setattr("sys.path", list(sys.path))
    found = import_rewards(["wer", "toy_world.faster", faster, "mine_here.energy"])
    assert found[:3] == ["wer", toy_world.faster, faster] and needs_audio(found[3])
    assert [path_of(r) for r in found] == [
        "wer",
        "toy_world.faster",
        "toy_world.faster",
        "mine_here.energy",
    ]
    for wrong, why in (
        ("mos", "reward_funcs: .*'mos'.* wer"),
        ("toy_world.none", "reward_funcs: .*toy_world.none"),
        ("no_such_module.f", "reward_funcs: .*'no_such_module'"),
        ("toy_world.UNITS", "reward_funcs: .*'red'"),
    ):
        with pytest.raises(ConfigError, match=why):
            import_rewards([wrong])


# --- recognisers that fail ------------------------------------------------------------------------


class Faulty:
    """A recogniser that answers by a list of what happens at each call; the last goes on for
    ever."""

    name = "faulty"

    def __init__(self, *calls):
        self.calls, self.asked = list(calls), 0

    def transcribe(self, waves, sample_rate):
        call = self.calls[min(self.asked, len(self.calls) - 1)]
        self.asked += 1
        if isinstance(call, Exception):
            raise call
        return call(waves)


def good(waves):
    return ["red"] * len(waves)


CRASH = RuntimeError("CUDA error: an illegal memory access")


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([CRASH], "RuntimeError: CUDA error"),
        ([lambda waves: ["red"] * (len(waves) + 1)], "2 results for 1"),
        ([lambda waves: []], "0 results"),
        ([TimeoutError("no answer within a minute")], "no answer"),
    ],
)
def test_what_a_recogniser_cannot_answer_is_masked_and_counted(calls, message):
    recognizer = Faulty(*calls)
    records = [replace(record(i), wave=np.ones(3, np.float32), sample_rate=50) for i in range(3)]
    totals, _ = score(records, [WERReward(recognizer), faster], [1.0, 1.0])
    assert np.isnan(totals).all()
    assert all(re.search(message, r.failure) for r in records), records[0].failure


def test_one_bad_wave_costs_one_reward():
    texts = ["a", AudioError("the wave holds NaN"), "c"]
    records, recognizer = spoken(texts, ["a", "b", "c"]), Scripted(texts)
    total, _ = score(records, [WERReward(recognizer)], [1.0])
    assert total[0] == 0 and total[2] == 0 and math.isnan(total[1])
    assert records[1].failure == "AudioError: the wave holds NaN" and records[0].failure is None
