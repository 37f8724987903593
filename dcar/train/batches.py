"""Batches of stage one from a prepared split, in the two layouts of `dcar.prompts.items`; and
replay.

Replay fills a part of every batch with rows of another corpus. The decoder that is fine-tuned has
learned from hours of many voices; minutes of one would teach it their few sentences.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from dcar.errors import ConfigError, DataError
from dcar.model.base import pad
from dcar.model.car import CARConfig, CARDecoder
from dcar.prepare.columns import Split
from dcar.prepare.prepared import load_split, prepared_info
from dcar.prompts.chooser import PromptChooser
from dcar.sources.shipped import resolve

logger = logging.getLogger(__name__)


class SpeechDataset(Dataset):
    """Teacher-forcing examples; items are addressed by (epoch, index), so that resuming needs no
    state."""

    def __init__(self, split: Split, config: CARConfig, prompt_tokens: int, seed: int):
        self.config, self.seed = config, seed
        self.chooser = PromptChooser(split, prompt_tokens)
        self.texts, self.speech, self.prompts = (
            split.rows[name] for name in ("text_ids", "speech", "prompt_speech")
        )
        self.has_prompt, self.lengths = split.columns["has_prompt"], split.columns["speech_tokens"]
        if split.largest_token >= config.speech_vocab_size:
            raise DataError(
                f"the data has speech token {split.largest_token}, but the model's codebook has "
                f"{config.speech_vocab_size}: prepare the corpus with the model's tokenizer"
            )
        if split.largest_text_id >= config.text_vocab_size:
            raise DataError(
                f"the data has text id {split.largest_text_id}, but the model has "
                f"{config.text_vocab_size} "
                "of them: raise model.text_vocab_size, or prepare the corpus with the model's "
                "phoneme "
                "inventory"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, address: tuple[int, int]) -> dict[str, Any]:
        epoch, index = address
        speech = list(self.speech[index])
        prompt_length = 1
        if self.config.bos:
            rng = np.random.default_rng([self.seed, epoch, index])
            source = (
                self.prompts[index]
                if self.has_prompt[index]
                else self.chooser.speech[self.chooser.choose(index, rng)]
            )
            prompt = [*self.chooser.crop(source, rng), self.config.speech_vocab_size + 1]
            speech, prompt_length = prompt + speech, len(prompt)
        return {"text": list(self.texts[index]), "speech": speech, "prompt_length": prompt_length}


class FrozenStates(SpeechDataset):
    """The examples of the first epoch, in every epoch, with the hidden states of a frozen trunk
    (float16, on the CPU).

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
                batch = {
                    name: part.to(device)
                    for name, part in collate([data[0, i] for i in which]).items()
                }
                hidden = model.speech_hidden(**batch)
                for index, row, length in zip(
                    which, hidden, batch["speech_lengths"].tolist(), strict=True
                ):
                    self.states[index] = row[:length].half().cpu()
        model.train(training)
        logger.info("they are kept in %.0f MB", sum(s.nbytes for s in self.states) / 1e6)

    def __getitem__(self, address: tuple[int, int]) -> dict[str, Any]:
        return {**super().__getitem__((0, address[1])), "states": self.states[address[1]]}


def collate(examples: Sequence[dict]) -> dict[str, Tensor]:
    """Pad a batch of examples to the arguments of CARDecoder.forward."""
    text_ids, text_lengths = pad([e["text"] for e in examples], "cpu")
    speech_ids, speech_lengths = pad([e["speech"] for e in examples], "cpu")
    batch = {
        "text_ids": text_ids,
        "text_lengths": text_lengths,
        "speech_ids": speech_ids,
        "speech_lengths": speech_lengths,
        "prompt_lengths": torch.tensor([e["prompt_length"] for e in examples]),
    }
    if "states" in examples[0]:  # of FrozenStates
        batch["states"] = torch.nn.utils.rnn.pad_sequence(
            [e["states"].float() for e in examples], batch_first=True
        )
    return batch


def with_positions(examples: Sequence[dict]) -> dict[str, Tensor]:
    """`collate`, and `positions` [P]: those that carry loss, found here since on a GPU the host
    would wait for them."""
    batch = collate(examples)
    place = torch.arange(batch["speech_ids"].shape[1])
    trained = (place >= batch["prompt_lengths"][:, None] - 1) & (
        place < batch["speech_lengths"][:, None]
    )
    return {**batch, "positions": trained.flatten().nonzero()[:, 0]}


class EpochLoader(DataLoader):
    """A DataLoader that tells its batch sampler the epoch; not for Accelerate to shard: the
    sampler does that."""

    batch_sampler: BucketBatchSampler  # type: ignore[assignment]

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)


class BucketBatchSampler(Sampler[list[tuple[int, int]]]):
    """This process's batches of utterances of similar length, in random order, as a pure function
    of (seed, epoch).

    All processes get equally many batches, at every step of similar length; where their number does
    not divide, the last step repeats batches from the beginning (`is_repeated`). Accelerate's
    sharding would lose a full batch beside a short one, and would not hear of the epoch after
    resuming.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        rank: int = 0,
        processes: int = 1,
    ):
        self.lengths, self.batch_size, self.seed, self.shuffle = (
            np.asarray(lengths),
            batch_size,
            seed,
            shuffle,
        )
        self.rank, self.processes = rank, processes
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def batches(self) -> int:
        """Batches of all processes together, repeated ones left out."""
        return -(-len(self.lengths) // self.batch_size)

    def __len__(self) -> int:
        return -(-self.batches // self.processes)

    def is_repeated(self, step: int) -> bool:
        """Whether this process's batch at `step` (not shuffled) is one that another process has,
        too."""
        return step * self.processes + self.rank >= self.batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        if not self.shuffle:
            order, steps = np.arange(len(self.lengths)), np.arange(len(self))
        else:
            rng = np.random.default_rng([self.seed, self.epoch])
            # other neighbours in every epoch
            noisy = self.lengths * rng.uniform(0.9, 1.1, len(self.lengths))
            order, steps = np.argsort(noisy, kind="stable"), rng.permutation(len(self))
        for step in steps:
            batch = (step * self.processes + self.rank) % self.batches
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield [(self.epoch, int(i)) for i in chosen]


class TokenBatchSampler(BucketBatchSampler):
    """Batches of up to `max_tokens` tokens, padding included; all processes get equally many of the
    same size.

    By length, from the longest, utterances are divided into buckets of the same batch size. The
    shortest of a bucket has at least `ALIKE` of the tokens of the longest, unless there are too few
    for one step. An epoch shuffles each bucket and the order of the steps. The last step, of the
    shortest utterances, may have repeated ones.
    """

    ALIKE = 0.95

    def __init__(
        self, lengths: Sequence[int], max_tokens: int, seed: int, rank: int = 0, processes: int = 1
    ):
        super().__init__(lengths, 1, seed, True, rank, processes)
        if (longest := int(self.lengths.max())) > max_tokens:
            raise ConfigError(
                f"max_tokens={max_tokens} is less than the longest training utterance, which has "
                f"{longest} speech tokens: raise it, or prepare the corpus with a lower max_seconds"
            )
        self.order = np.argsort(-self.lengths, kind="stable")
        # start and end in `order`, and the batch size of a process
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


def with_replay(train: Split, replay: str, identity: dict[str, Any]) -> Split:
    """The training rows, followed by those of the prepared corpus `replay` ("starter": the shipped
    one).

    identity: vocabulary, tokenizer and phonemes of the training rows. DataError where the other
    corpus has other ones.
    """
    import datasets

    folder = resolve(replay, "prepared")
    info = prepared_info(folder)
    made, wanted = info["tokenizer"]["checksum"], identity["tokenizer"].rpartition("@")[2]
    if made != wanted or info["phonemes"]["version"] != identity["phonemes"]:
        raise DataError(
            f"replay {folder}: has tokens of {info['tokenizer']['name']} ({made[:12]}) and "
            "phonemes "
            f"{info['phonemes']['version']}, the training data tokens of {wanted[:12]} and "
            "phonemes "
            f"{identity['phonemes']}; prepare one of them like the other, or leave replay out"
        )
    replayed = load_split(folder, "train")
    own, other = train.rows, replayed.rows
    # prompts of both stay recordings
    if "recorded" in own.column_names and "recorded" not in other.column_names:
        other = other.add_column(
            "recorded", other.data.column("speech"), feature=other.features["speech"]
        )
    shared = [name for name in own.column_names if name in other.column_names]
    rows = datasets.concatenate_datasets([own.select_columns(shared), other.select_columns(shared)])
    return train.followed_by(replayed, rows)


class ReplayBatchSampler(BucketBatchSampler):
    """Batches of the first `own` rows, of `batch_size` less a share, filled with rows behind them
    of similar length.

    An epoch is one of the own rows. Which rows are replayed is a pure function of (seed, epoch,
    batch).
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
            near = max(self.replayed, len(self.others) // 4)  # the quarter of the nearest lengths
            start = int(np.clip(middle - near // 2, 0, max(0, len(self.others) - near)))
            found = rng.choice(
                self.others[start : start + near], self.replayed, replace=near < self.replayed
            )
            yield [*batch, *((self.epoch, int(i)) for i in found)]
