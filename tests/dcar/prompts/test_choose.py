"""Rows chosen by columns are the rows that reading everything chooses: published results rest on
them."""

from collections import defaultdict

import numpy as np
import pytest
from tiny_data import counting, tiny_split, write_prepared
from tiny_decoders import tiny_decoder

from dcar.errors import DataError
from dcar.prepare.columns import Split
from dcar.prompts.choose import by_digest, drawn, in_turns
from dcar.prompts.chooser import PromptChooser
from dcar.prompts.items import make_prompts
from dcar.prompts.load import load_prompts
from dcar.prompts.texts import ListedText, text_prompts
from dcar.text.english.inventory import PHONEME_VERSION
from eval.compare.plan import choose_items

SPEAKERS = ["zoë", "Ada", "b", "ada", "é", "alone", "a", "\U0001f600", "￮"]


@pytest.fixture(scope="module")
def rows():
    """Eighty utterances of unevenly many speakers, whose ids are not in order; one speaker has a
    single one."""
    rng = np.random.default_rng(5)
    who = rng.choice(
        [s for s in SPEAKERS if s != "alone"], 80, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.03, 0.02]
    ).tolist()
    who[33] = "alone"
    names = [f"{'é' * (n % 3)}u{n}" for n in rng.permutation(80)]
    seconds = rng.choice(np.float32([0.3, 0.69, 0.7, 0.71, 2]), 80).tolist()
    return tiny_split("train", 80, counting).map(
        lambda row, i: {"speaker": who[i], "id": names[i], "duration": seconds[i]},
        with_indices=True,
    )


@pytest.fixture(scope="module")
def split(rows):
    return Split.of(rows)


class SlowChooser(PromptChooser):
    """As it was when every row was read."""

    def __init__(self, rows):
        self.by_speaker = defaultdict(list)
        self.speakers = list(rows["speaker"])
        for i, speaker in enumerate(self.speakers):
            self.by_speaker[speaker].append(i)

    def choose(self, index, rng):
        others = self.by_speaker[self.speakers[index]]
        if len(others) == 1:
            return index
        other = others[rng.integers(len(others) - 1)]
        return others[-1] if other == index else other


def test_the_chooser_picks_the_same_utterance(rows, split):
    for subset, chosen in (
        (rows, split),
        (rows.select(range(9, 60, 2)), split.select(np.arange(9, 60, 2))),
    ):
        slow, fast = SlowChooser(subset), PromptChooser(chosen, 5)
        for i in range(len(subset)):
            for seed in range(4):
                ours, theirs = (np.random.default_rng([seed, i]) for _ in range(2))
                assert fast.choose(i, ours) == slow.choose(i, theirs)
                assert ours.random() == theirs.random()  # and leaves the generator as it did


@pytest.mark.parametrize("limit", [None, 1, 7, 79, 80, 500])
@pytest.mark.parametrize("min_seconds", [0.0, 0.3, 0.7, 0.71])
@pytest.mark.parametrize("seed", [0, 42])
def test_stage_two_draws_the_same_prompts(split, limit, min_seconds, seed):
    items = [i for i in make_prompts(split, 5, seed) if i.duration >= min_seconds]
    order = np.random.default_rng([seed, 7]).permutation(len(items))
    chosen = make_prompts(split, 5, seed, rows=drawn(split, seed, limit, min_seconds))
    assert list(map(told, chosen)) == [told(items[i]) for i in order[: limit or len(items)]]


def ranks(split):
    return split.columns["digest_rank"], split.columns["id_rank"]


def told(item):
    return {**vars(item), "speaker_embedding": item.speaker_embedding.tolist()}


@pytest.mark.parametrize("limit", [0, 1, 7, 80, 500])
def test_a_comparison_takes_the_same_utterances(split, limit):
    items = make_prompts(split, 5, 3)
    chosen = make_prompts(split, 5, 3, rows=by_digest(*ranks(split), limit))
    assert list(map(told, chosen)) == list(map(told, choose_items(items, limit)))
    assert list(map(told, choose_items(chosen, limit))) == list(map(told, chosen))


@pytest.mark.parametrize("count", [1, 4, 9, 10, 37, 80, 200])
@pytest.mark.parametrize("bos", [True, False])
def test_listed_texts_get_the_same_prompts(split, count, bos):
    texts = [ListedText(f"text-{n}", "a red house", (1, 2, n % 5)) for n in range(count)]
    chosen = make_prompts(split, 5, 1, bos, in_turns(split, count))
    assert len(chosen) == min(count, 80)
    assert list(map(told, text_prompts(texts, chosen))) == list(
        map(told, text_prompts(texts, make_prompts(split, 5, 1, bos)))
    )


def test_equal_ids_are_refused_and_nothing_is_chosen_of_nothing(split):
    twice = Split.of(tiny_split("dev", 6).map(lambda row: {"id": "same"}))
    with pytest.raises(DataError, match=" id"):
        by_digest(*ranks(twice), 2)
    nothing = split.select(np.arange(0))
    assert len(by_digest(*ranks(nothing))) == 0
    assert len(drawn(nothing, seed=0)) == len(in_turns(nothing, count=3)) == 0


def test_a_split_without_long_enough_utterances_is_refused(tmp_path):
    data = write_prepared(tmp_path / "data", train=4, dev=2)
    decoder = tiny_decoder(text_vocab_size=64, tokenizer="tiny@abc", phonemes=PHONEME_VERSION)
    with pytest.raises(DataError, match="data: split train .*9 s"):
        load_prompts(str(data), "train", decoder, 5, 0, min_seconds=9)
