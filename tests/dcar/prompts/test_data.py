"""Prompts for decoding and batches for stage one."""

import datasets
import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from tiny_data import CODES, counting, tiny_split

from dcar.errors import DataError
from dcar.model.car import CARConfig
from dcar.prepare.columns import Split
from dcar.prompts.chooser import PromptChooser, own_prompt, with_prompts
from dcar.prompts.items import make_prompts
from dcar.prompts.load import corpus_recordings
from dcar.sources.shipped import shipped
from dcar.text.english.phonemes import text_to_ids
from dcar.train.batches import BucketBatchSampler, EpochLoader, SpeechDataset

LENGTHS = np.random.default_rng(0).integers(20, 200, 53).tolist()


@pytest.fixture(scope="module")
def rows():
    """Eleven utterances: five of each of two speakers, and one of a speaker without another."""
    split = tiny_split("train", 11, counting)
    return split.map(lambda row, i: {"speaker": "alone"} if i == 10 else {}, with_indices=True)


def batches(**changes) -> list[list[tuple[int, int]]]:
    epoch = changes.pop("epoch", 0)
    sampler = BucketBatchSampler(LENGTHS, **{"batch_size": 8, "seed": 3, **changes})
    sampler.set_epoch(epoch)
    out = list(sampler)
    assert len(out) == len(sampler)
    return out


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", range(3))
def test_every_utterance_once_an_epoch_beside_others_of_its_length(epoch):
    found = batches(epoch=epoch)
    assert {e for batch in found for e, _ in batch} == {epoch}
    assert sorted(i for batch in found for _, i in batch) == list(range(53))
    assert sorted(len(b) for b in found) == [5, 8, 8, 8, 8, 8, 8]
    spread = [max(LENGTHS[i] for _, i in b) - min(LENGTHS[i] for _, i in b) for b in found]
    assert np.mean(spread) < 60 < np.ptp(LENGTHS)
    mixed = np.random.default_rng(epoch).permutation(53)[:48].reshape(6, 8)
    assert np.mean(spread) < 0.5 * np.mean([np.ptp(np.take(LENGTHS, b)) for b in mixed])
    lengths = [np.mean([LENGTHS[i] for _, i in b]) for b in found]
    assert lengths != sorted(lengths)  # but the batches come in random order
    assert [i for b in batches(shuffle=False, epoch=epoch) for _, i in b] == list(range(53))


@pytest.mark.parametrize("processes", [2, 3, 9])
def test_processes_share_an_epoch_evenly(processes):
    """Equally many batches each, so that nobody waits for a partner; what repeats can be told."""
    shares = [batches(rank=r, processes=processes) for r in range(processes)]
    assert len({len(s) for s in shares}) == 1
    assert {i for s in shares for b in s for _, i in b} == set(range(53))
    if processes == 2:  # the batches of one step have similar lengths
        middle = [[np.mean([LENGTHS[i] for _, i in b]) for b in s] for s in shares]
        close = sum(abs(x - y) < 45 for x, y in zip(*middle, strict=True))
        assert close >= len(shares[0]) - 1  # but for the step that was filled up from the beginning
    plain = [
        BucketBatchSampler(LENGTHS, 8, 0, shuffle=False, rank=r, processes=processes)
        for r in range(processes)
    ]
    counted = [
        i for s in plain for step, b in enumerate(s) if not s.is_repeated(step) for _, i in b
    ]
    assert sorted(counted) == list(range(53))


def test_loader_tells_the_epoch_and_survives_skipping():
    """After resuming, Trainer sets the epoch through `.batch_sampler.batch_sampler` of the
    skipping loader."""

    class Addresses(torch.utils.data.Dataset):
        def __getitem__(self, address):
            return address

        def __len__(self):
            return 53

    loader = EpochLoader(
        Addresses(), batch_sampler=BucketBatchSampler(LENGTHS, 8, 3), collate_fn=list
    )
    loader.set_epoch(6)
    assert list(loader) == batches(epoch=6)
    rest = skip_first_batches(loader, 4)
    rest.batch_sampler.batch_sampler.set_epoch(7)
    assert list(rest) == batches(epoch=7)[4:]


# --- prompts --------------------------------------------------------------------------------------


def test_prompt_is_another_utterance_of_the_speaker(rows):
    chooser, rng = PromptChooser(Split.of(rows), 5), np.random.default_rng(0)
    for i in range(10):
        chosen = {chooser.choose(i, rng) for _ in range(80)}
        assert chosen == {j for j in range(i % 2, 10, 2)} - {i}  # every other one, never itself
    assert chooser.choose(10, rng) == 10  # alone, which callers look for


def test_utterances_that_could_only_be_their_own_prompts_are_left_out(rows, caplog):
    split = Split.of(rows)
    assert own_prompt(split).tolist() == [False] * 10 + [True]
    left = with_prompts(split, "runs/prepared: split test")
    assert left.rows["id"] == rows["id"][:10]
    assert "runs/prepared: split test: 1 of 11 utterances are left out" in caplog.text
    assert with_prompts(left, "") is left
    with pytest.raises(DataError, match="split test: no speaker has two .*prompt_audio"):
        with_prompts(split.select(np.array([0, 1, 10])), "split test")
    named = rows.map(lambda row: {"prompt_speech": [3, 1, 4]} if row["speaker"] == "alone" else {})
    assert not own_prompt(Split.of(named)).any()  # the corpus names its prompt


def test_crops_are_consecutive_tokens(rows):
    chooser, rng = PromptChooser(Split.of(rows), 5), np.random.default_rng(0)
    tokens = rows[0]["speech"]
    crops = [chooser.crop(tokens, rng) for _ in range(200)]
    windows = [tokens[i : i + 5] for i in range(len(tokens) - 4)]
    assert all(c in windows for c in crops)
    assert windows[0] in crops and windows[-1] in crops
    assert PromptChooser(Split.of(rows), 100).crop(tokens, rng) == tokens


def test_crops_are_speech(rows):
    """Silence is few codes, at the start, within or at the end; other crops are drawn as without
    it."""
    chooser, rng = PromptChooser(Split.of(rows), 50), np.random.default_rng(0)
    speech, silence = list(range(100, 220)), rng.integers(0, 4, 200).tolist()
    for tokens in (
        silence + speech,
        speech + silence,
        speech + silence + speech,
        silence + speech[:30] + silence,
    ):
        crops = [chooser.crop(tokens, rng) for _ in range(300)]
        windows = {tuple(tokens[i : i + 50]) for i in range(len(tokens) - 49)}
        most = max(len(set(window)) for window in windows)
        assert all(tuple(crop) in windows and len(set(crop)) >= 0.4 * most for crop in crops)
    plain, same = np.random.default_rng(1), np.random.default_rng(1)
    starts = [same.integers(71) for _ in range(50)]
    assert [chooser.crop(speech, plain)[0] for _ in starts] == [100 + start for start in starts]
    assert len(chooser.crop(silence, rng)) == 50  # where there is nothing else


@pytest.mark.parametrize("bos", [True, False])
def test_prompts_are_the_same_for_every_method(rows, bos):
    items = make_prompts(Split.of(rows), 5, seed=1, bos=bos)
    again, other = (make_prompts(Split.of(rows), 5, seed=s, bos=bos) for s in (1, 2))
    assert items == again != other
    by_id = {r["id"]: r for r in rows}
    for item, row in zip(items, rows, strict=True):
        source = by_id[item.prompt_utterance_id]
        assert item.utterance_id == row["id"]
        assert item.speaker == row["speaker"] == source["speaker"]
        assert (source["id"] == row["id"]) == (row["speaker"] == "alone")
        np.testing.assert_array_equal(
            item.speaker_embedding, np.asarray(source["voice"], np.float32)
        )
        assert item.reference_tokens == row["speech"] and item.duration == pytest.approx(
            len(row["speech"]) / 50
        )
        if bos:
            assert item.text_ids == (1, 2, 3, 4) and len(item.prompt_ids) == 5
            assert " ".join(map(str, item.prompt_ids)) in " ".join(map(str, source["speech"]))
        else:  # the prompt is the beginning of the same stream, with its text
            assert item.text_ids == (1, 2, 3, 4, 1, 2, 3, 4)
            assert list(item.prompt_ids) == source["speech"]


# --- examples -------------------------------------------------------------------------------------


def test_examples_begin_with_a_prompt_closed_by_bos(rows):
    config = CARConfig(text_vocab_size=5, speech_vocab_size=CODES, bos=True)
    dataset = SpeechDataset(Split.of(rows), config, prompt_tokens=5, seed=0)
    assert len(dataset) == 11 and dataset.lengths.tolist() == [len(s) for s in rows["speech"]]
    for i, row in enumerate(rows):
        example = dataset[0, i]
        # an utterance that is alone must not be its own prompt: the decoder would learn to copy
        prompt = 5 if row["speaker"] != "alone" else 0
        assert example["prompt_length"] == prompt + 1 and example["text"] == row["text_ids"]
        assert example["speech"][prompt] == CODES + 1
        assert example["speech"][prompt + 1 :] == row["speech"]
        assert CODES + 1 not in example["speech"][:prompt] + example["speech"][prompt + 1 :]
        assert example == dataset[0, i]
    # other prompts in other epochs
    assert len({str(dataset[epoch, 0]["speech"][:5]) for epoch in range(20)}) > 5
    assert dataset[0, 0] != SpeechDataset(Split.of(rows), config, 5, seed=1)[0, 0]


def test_without_bos_the_whole_stream_is_the_target_and_unknown_ids_are_refused(rows):
    dataset = SpeechDataset(
        Split.of(rows), CARConfig(text_vocab_size=5, speech_vocab_size=CODES), 5, seed=0
    )
    assert dataset[3, 2] == {"text": [1, 2, 3, 4], "speech": rows[2]["speech"], "prompt_length": 1}
    for text, speech, message in (
        (5, CODES - 1, "speech token 11.* 11"),
        (4, CODES, "text id 4.* 4"),
    ):
        with pytest.raises(DataError, match=message):
            SpeechDataset(
                Split.of(rows), CARConfig(text_vocab_size=text, speech_vocab_size=speech), 5, 0
            )


def test_a_prompt_that_the_corpus_names_is_taken(rows):
    """Rows of a manifest with prompt_audio: its tokens, voice and text, instead of another
    utterance's."""
    named = dict(rows[0], prompt_speech=[3, 1, 4], prompt_text="Oh no.", prompt_voice=[0.5] * 298)
    dataset = datasets.Dataset.from_list(
        [named, *(dict(r) for r in rows.select(range(1, len(rows))))], features=rows.features
    )
    item = make_prompts(Split.of(dataset), 5, 0, bos=True)[0]
    assert item.prompt_ids == (3, 1, 4) and item.prompt_utterance_id.endswith("(prompt)")
    assert item.speaker_embedding.tolist() == [0.5] * 298
    item = make_prompts(Split.of(dataset), 5, 0, bos=False)[0]
    assert item.prompt_ids == (3, 1, 4)
    assert list(item.text_ids) == [*text_to_ids("Oh no."), *rows[0]["text_ids"]]
    assert list(item.target_text_ids) == rows[0]["text_ids"]
    assert all(i.target_text_ids == i.text_ids for i in make_prompts(Split.of(dataset), 5, 0))
    silent = datasets.Dataset.from_list(
        [dict(named, prompt_text=""), dict(rows[1])], features=rows.features
    )
    with pytest.raises(DataError, match="train0 .*prompt_text"):
        make_prompts(Split.of(silent), 5, 0, bos=False)


def test_a_row_of_tokens_alone_has_no_recording():
    recording = corpus_recordings(str(shipped("prepared")))
    wave, rate = recording("am_puck_0216")
    assert rate == 24_000 and len(wave) > rate / 2
    with pytest.raises(DataError, match=r"af_heart_more_0000 .*split=dev or split=test"):
        recording("af_heart_more_0000")
