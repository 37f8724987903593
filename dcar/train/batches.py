"""Batches of stage one from a prepared split, in the two layouts of `dcar.prompts.items`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from dcar.decoding.batch import pad
from dcar.errors import DataError
from dcar.model.car import CARConfig
from dcar.prompts.items import PromptChooser


class SpeechDataset(Dataset):
    """Teacher-forcing examples; items are addressed by (epoch, index), so that resuming needs no state."""

    def __init__(self, dataset, config: CARConfig, prompt_tokens: int, seed: int):
        self.dataset, self.config, self.seed = dataset, config, seed
        self.chooser = PromptChooser(dataset, prompt_tokens)
        self.texts, self.speech, self.named = dataset["text_ids"], dataset["speech"], dataset["prompt_speech"]
        largest = max(max(tokens) for tokens in self.speech)
        if largest >= config.speech_vocab_size:
            raise DataError(f"the data has speech token {largest}, but the model's codebook has "
                            f"{config.speech_vocab_size}: prepare the corpus with the model's tokenizer")
        largest = max(max(ids) for ids in self.texts)
        if largest >= config.text_vocab_size:
            raise DataError(f"the data has text id {largest}, but the model has {config.text_vocab_size} of them: "
                            "raise model.text_vocab_size, or prepare the corpus with the model's phoneme inventory")
        self.lengths = [len(s) for s in self.speech]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, address: tuple[int, int]) -> dict[str, Any]:
        epoch, index = address
        speech = list(self.speech[index])
        prompt_length = 1
        if self.config.bos:
            rng = np.random.default_rng([self.seed, epoch, index])
            source = self.named[index] or self.chooser.speech[self.chooser.choose(index, rng)]
            prompt = [*self.chooser.crop(source, rng), self.config.speech_vocab_size + 1]
            speech, prompt_length = prompt + speech, len(prompt)
        return {"text": list(self.texts[index]), "speech": speech, "prompt_length": prompt_length}


def collate(examples: Sequence[dict]) -> dict[str, Tensor]:
    """Pad a batch of examples to the arguments of CARDecoder.forward."""
    text_ids, text_lengths = pad([e["text"] for e in examples], "cpu")
    speech_ids, speech_lengths = pad([e["speech"] for e in examples], "cpu")
    batch = {
        "text_ids": text_ids, "text_lengths": text_lengths, "speech_ids": speech_ids,
        "speech_lengths": speech_lengths, "prompt_lengths": torch.tensor([e["prompt_length"] for e in examples]),
    }
    if "states" in examples[0]:  # dcar.train.frozen.FrozenStates
        batch["states"] = torch.nn.utils.rnn.pad_sequence([e["states"].float() for e in examples], batch_first=True)
    return batch


class EpochLoader(DataLoader):
    """A DataLoader that tells its batch sampler the epoch; not for Accelerate to shard: the sampler does that."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


class BucketBatchSampler(Sampler[list[tuple[int, int]]]):
    """This process's batches of utterances of similar length, in random order, as a pure function of (seed, epoch).

    All processes get equally many batches, at every step of similar length; where their number does not divide, the
    last step repeats batches from the beginning (`is_repeated`). Accelerate's sharding would lose a full batch beside
    a short one, and would not hear of the epoch after resuming.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, shuffle: bool = True, rank: int = 0,
                 processes: int = 1):
        self.lengths, self.batch_size, self.seed, self.shuffle = np.asarray(lengths), batch_size, seed, shuffle
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
        """Whether this process's batch at `step` (not shuffled) is one that another process has, too."""
        return step * self.processes + self.rank >= self.batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        if not self.shuffle:
            order, steps = np.arange(len(self.lengths)), np.arange(len(self))
        else:
            rng = np.random.default_rng([self.seed, self.epoch])
            noisy = self.lengths * rng.uniform(0.9, 1.1, len(self.lengths))  # other neighbours in every epoch
            order, steps = np.argsort(noisy, kind="stable"), rng.permutation(len(self))
        for step in steps:
            batch = (step * self.processes + self.rank) % self.batches
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield [(self.epoch, int(i)) for i in chosen]
