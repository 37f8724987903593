"""From prepared datasets to prompts for decoding and batches for stage one.

Two layouts, chosen by the decoder's `bos`:

- speaker prompt (bos): text of the target only; the speech prompt is a crop of another utterance of the same
  speaker, without its text, closed by BOS. Short, and no alignment of the prompt is needed.
- continuation (no bos; the papers'): another utterance of the speaker is the beginning of the same stream, its text
  stands before the target's text, and its tokens before the target's tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from dcar.decoding.loop import pad
from dcar.decoding.records import Prompt
from dcar.errors import DataError
from dcar.model import CARConfig
from dcar.text import text_to_ids


@dataclass(frozen=True)
class PromptItem:
    """One utterance to speak, with what is needed to voice it and to judge it."""

    prompt: Prompt
    text: str
    speaker: str
    speaker_embedding: np.ndarray  # [F] voice features of the prompt utterance, for the vocoder
    reference_tokens: list[int]  # of the recording of this text
    prompt_utterance_id: str
    duration: float  # seconds of the recording


class PromptChooser:
    """Picks, for every utterance, another utterance of the same speaker and a crop of it."""

    def __init__(self, dataset, prompt_tokens: int):
        self.speech = dataset["speech"]
        self.prompt_tokens = prompt_tokens
        self.speakers = list(dataset["speaker"])
        self.by_speaker: dict[str, list[int]] = defaultdict(list)
        for i, speaker in enumerate(self.speakers):
            self.by_speaker[speaker].append(i)

    def choose(self, index: int, rng: np.random.Generator) -> int:
        """Index of the prompt utterance; the utterance itself only if its speaker has no other."""
        others = self.by_speaker[self.speakers[index]]
        if len(others) == 1:
            return index
        other = others[rng.integers(len(others) - 1)]
        return others[-1] if other == index else other

    def crop(self, tokens: Sequence[int], rng: np.random.Generator) -> list[int]:
        """At most `prompt_tokens` consecutive tokens."""
        tokens = list(tokens)
        start = int(rng.integers(max(1, len(tokens) - self.prompt_tokens + 1)))
        return tokens[start : start + self.prompt_tokens]


def make_prompts(dataset, prompt_tokens: int, seed: int, bos: bool = True) -> list[PromptItem]:
    """A prompt for every utterance of a prepared split, the same for every method and run with this seed.

    A prompt that the corpus names (`prompt_audio`, `prompt_text` of a manifest) is taken; otherwise another utterance
    of the speaker. prompt_tokens: length of the crop in the speaker-prompt layout (`bos`); the continuation layout
    takes the prompt whole, and DataError where a named prompt lacks the text that this layout needs.
    """
    chooser = PromptChooser(dataset, prompt_tokens)
    items = []
    for i, row in enumerate(dataset):
        rng = np.random.default_rng([seed, i])
        if row["prompt_speech"]:
            if not bos and not row["prompt_text"]:
                raise DataError(f"{row['source']}: utterance {row['id']} has a prompt without prompt_text, which a "
                                "decoder without BOS needs; add it to the manifest")
            name, speech, voice = f"{row['id']} (prompt)", row["prompt_speech"], row["prompt_voice"]
            # a retokenized corpus brings the prompt's text ids along
            prompt_text_ids = [] if bos else row.get("prompt_text_ids") or text_to_ids(row["prompt_text"])
        else:
            source = dataset[chooser.choose(i, rng)]
            name, speech, voice = source["id"], source["speech"], source["voice"]
            prompt_text_ids = [] if bos else source["text_ids"]
        text_ids = [*prompt_text_ids, *row["text_ids"]]
        prompt_ids = chooser.crop(speech, rng) if bos else list(speech)
        items.append(PromptItem(
            Prompt(row["id"], tuple(text_ids), tuple(prompt_ids)), row["text"], row["speaker"],
            np.asarray(voice, np.float32), list(row["speech"]), name, row["duration"],
        ))
    return items


class SpeechDataset(Dataset):
    """Teacher-forcing examples; items are addressed by (epoch, index), so that resuming needs no state."""

    def __init__(self, dataset, config: CARConfig, prompt_tokens: int, seed: int):
        self.dataset, self.config, self.seed = dataset, config, seed
        self.chooser = PromptChooser(dataset, prompt_tokens)
        self.texts, self.speech = dataset["text_ids"], dataset["speech"]
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

    def __getitem__(self, address: tuple[int, int]) -> dict[str, list[int] | int]:
        epoch, index = address
        speech = list(self.speech[index])
        prompt_length = 1
        if self.config.bos:
            rng = np.random.default_rng([self.seed, epoch, index])
            source = self.speech[self.chooser.choose(index, rng)]
            prompt = [*self.chooser.crop(source, rng), self.config.speech_vocab_size + 1]
            speech, prompt_length = prompt + speech, len(prompt)
        return {"text": list(self.texts[index]), "speech": speech, "prompt_length": prompt_length}


def collate(examples: Sequence[dict]) -> dict[str, Tensor]:
    """Pad a batch of examples to the arguments of CARDecoder.forward."""
    text_ids, text_lengths = pad([e["text"] for e in examples], "cpu")
    speech_ids, speech_lengths = pad([e["speech"] for e in examples], "cpu")
    return {
        "text_ids": text_ids, "text_lengths": text_lengths, "speech_ids": speech_ids,
        "speech_lengths": speech_lengths, "prompt_lengths": torch.tensor([e["prompt_length"] for e in examples]),
    }


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
