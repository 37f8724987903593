"""Batches of stage one from a prepared split, in the two layouts of `dcar.prompts.items`; and
replay.

Replay fills a share of every batch with rows of another corpus. A decoder that has learned from
hours of many voices would otherwise overfit the few sentences of minutes of one voice when it is
fine-tuned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from dcar.errors import ConfigError, DataError
from dcar.model.batch import SpeechBatch, speech_batch
from dcar.model.car import CARConfig, CARDecoder
from dcar.prepare.columns import Split
from dcar.prepare.prepared import (
    PreparedInfo,
    load_split,
    note_equal_speakers,
    prepared_info,
    with_recorded,
)
from dcar.prompts.chooser import PromptChooser, own_prompt
from dcar.sources.shipped import resolve

logger = logging.getLogger(__name__)

NO_PROMPT = (
    "%d of %d utterances have no prompt in training: their speakers have no other utterance, and "
    "an utterance must not be its own prompt"
)


class SpeechDataset(Dataset):
    """Teacher-forcing examples; items are addressed by (epoch, index), so that resuming needs no
    state. Utterances that could only be their own prompts have none: the decoder would learn to
    copy. Raises DataError if the data exceeds the vocabularies of `config`."""

    def __init__(self, split: Split, config: CARConfig, prompt_tokens: int, seed: int):
        self.config, self.seed = config, seed
        self.longest_prompt = prompt_tokens + 1 if config.bos else 0  # with BOS
        self.chooser = PromptChooser(split, prompt_tokens)
        self.texts, self.speech, self.prompts = (
            split.rows[name] for name in ("text_ids", "speech", "prompt_speech")
        )
        self.has_prompt, self.lengths = split.columns["has_prompt"], split.columns["speech_tokens"]
        self.own_prompt = own_prompt(split)
        if config.bos and self.own_prompt.any():
            logger.warning(NO_PROMPT, self.own_prompt.sum(), len(self.own_prompt))
        if split.largest_token >= config.speech_vocab_size:
            raise DataError(
                f"the data has speech token {split.largest_token}, but the model's codebook has "
                f"{config.speech_vocab_size}: prepare the corpus with the model's tokenizer"
            )
        if split.largest_text_id >= config.text_vocab_size:
            raise DataError(
                f"the data has text id {split.largest_text_id}, but the model has only "
                f"{config.text_vocab_size} text ids: raise model.text_vocab_size, or prepare the "
                "corpus with the model's phoneme inventory"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, address: tuple[int, int]) -> dict[str, Any]:
        epoch, index = address
        speech = list(self.speech[index])
        prompt_length = 1
        if self.config.bos:
            rng = np.random.default_rng([self.seed, epoch, index])
            if self.has_prompt[index]:
                source = self.prompts[index]
            elif self.own_prompt[index]:
                source = []
            else:
                source = self.chooser.speech[self.chooser.choose(index, rng)]
            prompt = [*self.chooser.crop(source, rng), self.config.speech_vocab_size + 1]
            speech, prompt_length = prompt + speech, len(prompt)
        return {"text": list(self.texts[index]), "speech": speech, "prompt_length": prompt_length}


class FrozenStates(SpeechDataset):
    """Examples of the first epoch, repeated in every epoch, with the hidden states of a frozen
    trunk (float16, on the CPU).

    They are computed once, in batches that do not depend on the order of training, so a resumed run
    repeats itself.
    """

    def __init__(self, data: SpeechDataset, model: CARDecoder, batch_size: int):
        vars(self).update(vars(data))
        self.states: list[torch.Tensor] = [torch.empty(0)] * len(data)
        device, training = model.norm.weight.device, model.training
        model.eval()
        order = np.argsort(self.lengths, kind="stable")
        logger.info("computing the hidden states of %d utterances", len(order))
        with torch.no_grad():
            for start in range(0, len(order), batch_size):
                which = [int(i) for i in order[start : start + batch_size]]
                examples = [data[0, i] for i in which]
                hidden = model.speech_hidden(collate(examples, device))
                for index, row, example in zip(which, hidden, examples, strict=True):
                    self.states[index] = row[: len(example["speech"])].half().cpu()
        model.train(training)
        logger.info(
            "keeping the hidden states in %.0f MB of memory",
            sum(s.nbytes for s in self.states) / 1e6,
        )

    def __getitem__(self, address: tuple[int, int]) -> dict[str, Any]:
        return {**super().__getitem__((0, address[1])), "states": self.states[address[1]]}


def collate(examples: Sequence[dict], device: torch.device | str = "cpu") -> SpeechBatch:
    """Return the padded batch of these examples."""
    batch = speech_batch(
        [e["text"] for e in examples],
        [e["speech"] for e in examples],
        [e["prompt_length"] for e in examples],
        device,
    )
    if "states" in examples[0]:  # examples of FrozenStates
        batch["states"] = torch.nn.utils.rnn.pad_sequence(
            [e["states"].float() for e in examples], batch_first=True
        )
    return batch


class EpochLoader(DataLoader):
    """DataLoader that passes the epoch to its batch sampler. Accelerate must not shard it: the
    sampler does that."""

    batch_sampler: BucketBatchSampler  # type: ignore[assignment]

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)


class BucketBatchSampler(Sampler[list[tuple[int, int]]]):
    """Sampler of one process's batches of utterances of similar length, in random order, as a pure
    function of (seed, epoch).

    All processes have the same number of batches, of similar length at every step. If the number of
    batches is not a multiple of the number of processes, the last step repeats batches from the
    beginning (`is_repeated`). Accelerate's sharding would drop a full batch next to a short one,
    and would not know the epoch after resuming.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        rank: int = 0,
        processes: int = 1,
    ):
        self.lengths = np.asarray(lengths)
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.rank, self.processes = rank, processes
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def batches(self) -> int:
        """Number of batches of all processes together, without repeated ones."""
        return -(-len(self.lengths) // self.batch_size)

    def __len__(self) -> int:
        return -(-self.batches // self.processes)

    def is_repeated(self, step: int) -> bool:
        """Return whether this process's batch at `step` (not shuffled) belongs to another
        process too."""
        return step * self.processes + self.rank >= self.batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        if not self.shuffle:
            order, steps = np.arange(len(self.lengths)), np.arange(len(self))
        else:
            rng = np.random.default_rng([self.seed, self.epoch])
            # noise gives utterances other neighbours in every epoch
            noisy = self.lengths * rng.uniform(0.9, 1.1, len(self.lengths))
            order, steps = np.argsort(noisy, kind="stable"), rng.permutation(len(self))
        for step in steps:
            batch = (step * self.processes + self.rank) % self.batches
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield [(self.epoch, int(i)) for i in chosen]


class TokenBatchSampler(BucketBatchSampler):
    """Batches of up to `max_tokens` tokens, padding and prompts included; all processes have the
    same number of batches, of the same size at every step.

    Utterances are divided by length, from the longest, into buckets of the same batch size. The
    shortest of a bucket has at least `ALIKE` of the tokens of the longest, unless there are too few
    for one step. An epoch shuffles each bucket and the order of the steps. The last step, of the
    shortest utterances, may contain repeated ones. `longest_prompt` tokens are counted for the
    prompt of every utterance, since prompts are drawn anew in every epoch. Raises ConfigError if an
    utterance has more than max_tokens tokens.
    """

    ALIKE = 0.95

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        seed: int,
        rank: int = 0,
        processes: int = 1,
        longest_prompt: int = 0,
    ):
        super().__init__(np.asarray(lengths) + longest_prompt, 1, seed, True, rank, processes)
        if (longest := int(self.lengths.max())) > max_tokens:
            raise ConfigError(
                f"per_device_train_batch_tokens={max_tokens} is less than the longest training "
                f"utterance, which has {longest} speech tokens with its prompt: raise it, or "
                "prepare the corpus with a lower max_seconds"
            )
        self.order = np.argsort(-self.lengths, kind="stable")
        # start and end in `order`, and the batch size per process
        self.buckets: list[tuple[int, int, int]] = []
        sizes, start = self.lengths[self.order], 0
        while start < len(sizes):
            rows = max_tokens // int(sizes[start])
            step = rows * processes
            alike = int(np.searchsorted(-sizes, -self.ALIKE * sizes[start], side="right")) - start
            end = min(start + max(1, alike // step) * step, len(sizes))
            self.buckets.append((start, end, min(rows, -(-(end - start) // processes))))
            start = end

    def __len__(self) -> int:
        return sum(
            -(-(end - start) // (rows * self.processes)) for start, end, rows in self.buckets
        )

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        batches = []
        for start, end, rows in self.buckets:
            shuffled = rng.permutation(self.order[start:end])
            whole = np.resize(
                shuffled, (-(-len(shuffled) // (rows * self.processes)), self.processes, rows)
            )
            batches += list(whole[:, self.rank])
        for step in rng.permutation(len(batches)):
            yield [(self.epoch, int(i)) for i in batches[step]]


def with_replay(train: Split, replay: str, prepared: PreparedInfo) -> Split:
    """Return the training rows, followed by those of the prepared corpus `replay` ("starter": the
    shipped one).

    prepared: the corpus of the training rows. Raises DataError if tokenizer or phonemes of the
    other one differ.
    """
    import datasets

    folder = resolve(replay, "prepared")
    info = prepared_info(folder)
    made, wanted = info.tokenizer.checksum, prepared.tokenizer.checksum
    if made != wanted or info.phonemes != prepared.phonemes:
        raise DataError(
            f"replay {folder}: has tokens of {info.tokenizer.name} ({made[:12]}) and "
            f"phonemes {info.phonemes}, but the training data has tokens of "
            f"{wanted[:12]} and phonemes {prepared.phonemes}; prepare both in the same way, or "
            "omit replay"
        )
    replayed = load_split(folder, "train")
    names = [train.speakers()[0], replayed.speakers()[0]]
    note_equal_speakers([prepared.corpus, info.corpus], names)
    own, other = train.rows, replayed.rows
    # if one corpus has recorded prompts, those of the other must be recordings too
    if "recorded" in own.column_names:
        other = with_recorded(other)
    shared = [name for name in own.column_names if name in other.column_names]
    rows = datasets.concatenate_datasets([own.select_columns(shared), other.select_columns(shared)])
    return train.followed_by(replayed, rows)


class ReplayBatchSampler(BucketBatchSampler):
    """Batches of the first `own` rows, of `batch_size` less a share, filled with later rows of
    similar length.

    An epoch is one pass over the own rows. The choice of replayed rows is a pure function of (seed,
    epoch, rank, batch).
    """

    def __init__(
        self,
        lengths: Sequence[int],
        own: int,
        batch_size: int,
        share: float,
        seed: int,
        rank: int = 0,
        processes: int = 1,
    ):
        self.replayed = min(batch_size - 1, max(1, round(share * batch_size)))
        super().__init__(lengths[:own], batch_size - self.replayed, seed, True, rank, processes)
        self.others = own + np.argsort(np.asarray(lengths[own:]), kind="stable")  # by length
        self.other_lengths = np.asarray(lengths)[self.others]

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for number, batch in enumerate(super().__iter__()):
            rng = np.random.default_rng([self.seed, self.epoch, self.rank, number])
            middle = np.searchsorted(
                self.other_lengths, np.median([self.lengths[i] for _, i in batch])
            )
            near = max(self.replayed, len(self.others) // 4)  # the quarter with the nearest lengths
            start = int(np.clip(middle - near // 2, 0, max(0, len(self.others) - near)))
            drawn = rng.choice(
                self.others[start : start + near], self.replayed, replace=near < self.replayed
            )
            yield [*batch, *((self.epoch, int(i)) for i in drawn)]
