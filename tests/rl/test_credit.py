"""Credit by decision: rule-based, by statistics, and through the rewards that say where they
were lost."""

from dataclasses import replace

import numpy as np
import pytest
from toy_world import ToyCTC, ToyRecognizer, toy_items, toy_token_recognizer

from dcar.decoding import DecodeResult
from dcar.errors import ConfigError
from dcar.recognition.ctc import Alignment
from rl.credit import Located, decision_advantages, scaled
from rl.rewards import LikelihoodReward, TokenLikelihoodReward, WERReward, ask
from rl.transcription import RolloutRecord


def advantages_of(costs: np.ndarray, starts: list[int], *silent: list) -> list[np.ndarray]:
    """Of rollouts as long as the recording (token i stands for place i), and of silent ones."""
    located = [[Located(row, np.arange(len(row)))] for row in costs]
    decisions = [*[starts] * len(costs), *[[0]] * len(silent)]
    return decision_advantages([*located, *silent], decisions, window=2, shortest=1)


def test_decision_advantages_by_hand():
    costs = np.array([[0.0, 0, 1, 0, 0, 0], [0, 0, 3, 0, 0, 2]])
    first, second = advantages_of(costs, [0, 2, 4])
    # places 1-2, 3-4, 5: the group's means are 1, 0, 1; the second rollout pays 1.5, 0, 2 where the
    # first pays .5, 0, 0
    expected = np.array([0.5, 0.0, 1.0])
    assert first == pytest.approx(expected) and second == pytest.approx(-expected)
    scale = np.concatenate((expected, -expected)).std(ddof=1)
    silent = advantages_of(costs, [0, 2, 4], [])
    for values in (scaled(silent, 3), scaled(silent, 3, [first, second])):
        assert values[0] == pytest.approx(expected / scale)
        assert values[1] == pytest.approx(-expected / scale) and values[2].tolist() == [0.0]
    assert not scaled([np.zeros(3), np.zeros(1)], 2)[0].any()
    for alike in (costs[[0, 0]], costs[:1]):
        assert not any(a.any() for a in advantages_of(alike, [0, 2]))


def test_a_group_that_went_astray_counts_no_more_than_others_and_the_rest_keep_one_rate():
    calm, usual, wild = (np.array([-1.0, 1.0]) * size for size in (0.5, 1.0, 100.0))
    everywhere = [calm, usual, wild]
    sizes = [abs(values).max() for values in scaled(everywhere, 1, everywhere)]
    std = np.concatenate(everywhere).std(ddof=1)
    assert sizes == pytest.approx([0.5 / std, 1.0 / std, 2**-0.5])
    assert [abs(v).max() for v in scaled(everywhere, 1)] == pytest.approx([2**-0.5] * 3)
    # an update divided otherwise is the same
    alone = scaled([wild], 1, everywhere) + scaled([calm, usual], 1, everywhere)
    assert [abs(values).max() for values in alone] == pytest.approx([sizes[2], *sizes[:2]])


# --- where rewards were lost ----------------------------------------------------------------------

RED, BLUE, GREEN, BLACK = ([3 * u, 3 * u + 1, 3 * u + 2] for u in range(4))
WRONG = [21, 22, 23]  # yellow


def rollouts(*spoken: list[int]) -> list[RolloutRecord]:
    """Of one sentence, "red blue green black"; already voiced."""
    item = next(i for i in toy_items(50) if len(i.text_ids) == 4)
    return [
        RolloutRecord(
            item,
            g,
            0,
            DecodeResult(item.utterance_id, "dcar", 0, tokens, False, 4),
            np.asarray(tokens, np.float32),
            50,
        )
        for g, tokens in enumerate(spoken)
    ]


def rewards() -> list[LikelihoodReward | TokenLikelihoodReward]:
    return [
        LikelihoodReward(ToyCTC(), locate=True),
        TokenLikelihoodReward(toy_token_recognizer(), locate=True),
    ]


def credit(records, reward, starts, window=2) -> list[np.ndarray]:
    located = [[r.located[reward]] for r in records]
    found = decision_advantages(located, starts, window, shortest=1)
    return scaled(found, len(found))


@pytest.mark.parametrize("reward", rewards(), ids=lambda r: r.name)
def test_credit_lands_on_the_decision_whose_word_was_lost(reward):
    """The second of three rollouts loses the third word, and the third one lingers on the
    second: the decision before the lost word answers for it alone, at its place in each rollout."""
    slow = [*RED, 3, 4, 4, 4, 5, *GREEN, *BLACK]
    records = rollouts([*RED, *BLUE, *GREEN, *BLACK], [*RED, *BLUE, *WRONG, *BLACK], slow)
    ask(reward, records)
    good, bad, lingering = credit(records, reward, [[0, 3, 6, 9], [0, 3, 6, 9], [0, 3, 8, 11]])
    assert bad[2] < -1.5 and bad[2] < 5 * min(bad[0], bad[1], bad[3])
    for other in (good, lingering):
        assert other[2] > 0.5 and abs(other[[0, 1, 3]]).max() < 0.25 * other[2]


@pytest.mark.parametrize("kind", [LikelihoodReward, TokenLikelihoodReward])
def test_likelihood_is_lost_where_the_alignment_says(kind):
    """Every token is at the unit that the alignment says; costs are the path's, at most the
    floor each."""
    recognizer = ToyCTC() if kind is LikelihoodReward else toy_token_recognizer()
    reward, bounded = (
        kind(recognizer, scale=0.5, floor=floor, locate=True) for floor in (-50.0, -9.0)
    )
    records = rollouts(
        [*RED, *BLUE, *GREEN, *BLACK], [*RED, *BLUE, *WRONG, *BLACK], [0, 2, *BLUE, *GREEN, *BLACK]
    )
    values = ask(reward, records)
    assert values == ask(kind(recognizer, scale=0.5), records) and values[1] < values[0] - 0.5
    if kind is LikelihoodReward:
        alignments = [r.alignments[recognizer] for r in records]
        # of one path
        assert [r.located[reward].costs.mean() for r in records] == pytest.approx(
            [-v for v in values]
        )
    else:
        alignments = recognizer.align([r.result.tokens for r in records], [(1, 2, 3, 4)] * 3)
    for record, alignment in zip(records, alignments, strict=True):
        one = record.located[reward]
        assert one.places.tolist() == alignment.units.tolist() and one.rate == 4 / 12
        assert one.costs == pytest.approx(0.5 * alignment.costs)
    assert records[0].located[reward].places.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert records[2].located[reward].places.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    ask(bounded, records)
    assert records[1].located[bounded].costs == pytest.approx(
        np.minimum(records[1].located[reward].costs, 4.5)
    )
    assert records[1].located[reward].costs.max() > 4.5


class Hears(ToyCTC):
    """Reads scripted words beside the toy's alignment; its units are the characters of the text,
    evenly spoken."""

    def __init__(self, *heard: str):
        super().__init__()
        self.heard = list(heard)

    def align(self, waves, sample_rate, texts):
        size = len(texts[0])
        return [
            Alignment(np.ones(size), np.arange(len(wave)) * size // len(wave), -1.0, size, heard)
            for wave, heard in zip(waves, self.heard, strict=True)
        ]


def test_word_errors_are_lost_where_the_words_are():
    """Of "red blue green black" in twelve tokens: the words begin at characters 0, 4, 9 and 15
    of 20."""
    heard = [
        "red blue green black",
        "red blue yellow black",
        "red red blue black",
        "",
        "x x x x x x x x x x",
    ]
    records = rollouts(*[[*RED, *BLUE, *GREEN, *BLACK]] * 5)
    reward = WERReward(Hears(*heard), cap=1.0, locate=True)
    values = ask(reward, records)
    assert values == pytest.approx([0, -0.25, -0.5, -1, -1])
    assert [r.transcript for r in records] == heard and [r.errors.errors for r in records] == [
        0,
        1,
        2,
        4,
        10,
    ]
    costs = [r.located[reward].costs for r in records]
    # the mean over the places is the reward
    assert [c.mean() for c in costs] == pytest.approx([-v for v in values])
    # green
    assert costs[1].nonzero()[0].tolist() == list(range(9, 14)) and np.ptp(costs[1][9:14]) == 0
    # red twice, green never: behind red, and green
    assert set(costs[2].nonzero()[0]) == {2, *range(9, 14)}
    assert records[1].located[reward].places.tolist() == [0, 1, 3, 5, 6, 8, 10, 11, 13, 15, 16, 18]
    assert records[1].located[reward].rate == 20 / 12
    found = credit(records[:2], reward, [[0, 2, 5, 9], [0, 2, 5, 9]])
    assert found[0].argmax() == 2 and found[1].argmin() == 2


def test_frames_and_tokens_divide_the_same_wave():
    """Two tokens a frame, and two frames a token; subwords of more than one character."""

    class Coarse(ToyCTC):
        def align(self, waves, sample_rate, texts):
            found = super().align([self.frames(w) for w in waves], sample_rate, texts)
            return [replace(a, characters=10) for a in found]

    for frames in (lambda w: w[::2], lambda w: w.repeat(2)):
        recognizer = Coarse()
        recognizer.frames = frames
        reward = LikelihoodReward(recognizer, scale=1.0, locate=True)
        records = rollouts([0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11])
        ask(reward, records)
        one = records[0].located[reward]
        alone = recognizer.align([records[0].wave], 50, [records[0].item.text])[0]
        assert one.places.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
        assert one.costs.mean() == pytest.approx(alone.costs.sum() / 10)  # nats per character


@pytest.mark.parametrize("reward", rewards(), ids=lambda r: r.name)
def test_rollouts_that_are_too_short_for_their_text_are_at_the_floor_everywhere(reward):
    records = rollouts([*RED, *BLUE, *GREEN, *BLACK], [0, 3, 6], [])
    floor = reward.scale * reward.floor
    values = ask(reward, records)
    assert values[1:] == [floor, floor] and values[0] > 0.5 * floor
    short = records[1].located[reward]
    assert short.costs.tolist() == [-floor] * 4 and short.places.tolist() == [0, 1, 2]
    assert reward not in records[2].located  # nothing was spoken, so no place is anywhere
    good, bad = credit(records[:2], reward, [[0, 3, 6, 9], [0, 1]])
    assert (good > 0.5).all() and (bad < -0.5).all()


def test_windows_are_of_the_recordings_seconds():
    """Twelve tokens and four words: three tokens are a word, one token is a word at least,
    thirty are what is left."""
    costs = np.array([[0.0, 2, 0, 1], [1, 0, 3, 0]])
    places = np.array([0, 0, 0, 1, 1, 2, 3])
    for window, expected in (
        (1, [0.5, -1, 1.5, -0.5]),
        (3, [0.5, -1, 1.5, -0.5]),
        (6, [-0.25, 0.25, 0.5, -0.5]),
        (30, [0.125, 0, 0.5, -0.5]),
    ):
        located = [[Located(row, places, 4 / 12)] for row in costs]
        first, second = decision_advantages(located, [[0, 3, 5, 6]] * 2, window, shortest=0)
        assert first == pytest.approx(np.array(expected)) and second == pytest.approx(-first)


def test_rewards_are_added_in_their_units():
    """Each over its own places, which need not be as many."""
    rng = np.random.default_rng(0)
    words = [Located(row, np.arange(12) // 3, 1 / 3) for row in rng.random((4, 4))]
    tokens = [Located(row, np.arange(12)) for row in rng.random((4, 12))]
    starts = [0, 3, 6, 9]

    def values(*located):
        group = list(zip(*located, strict=True))
        found = decision_advantages(group, [starts] * len(group), 3, 0)
        return np.array(scaled(found, len(group)))

    def times(located, weight):
        return [one.times(weight) for one in located]

    # a word's cost at each of its tokens
    spread = [Located(one.costs.repeat(3), np.arange(12)) for one in words]
    both = [Located(a.costs + 0.5 * b.costs, a.places) for a, b in zip(spread, tokens, strict=True)]
    assert values(words, times(tokens, 0.5)) == pytest.approx(values(both))
    assert values(words, times(tokens, 1e-9)) == pytest.approx(values(words), abs=1e-6)
    assert values(times(words, 7.0)) == pytest.approx(values(words))


def test_a_recogniser_that_does_not_align_is_named():
    class Scores(ToyRecognizer):
        def log_likelihood(self, waves, sample_rate, texts):
            return [0.0] * len(waves)

    LikelihoodReward(Scores())
    with pytest.raises(ConfigError, match=" toy .*credit=utterance"):
        LikelihoodReward(Scores(), locate=True)
