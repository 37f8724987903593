"""Prompts of stage two: as a `datasets.Dataset`, and in the order in which a run reads them."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler

from dcar.errors import ConfigError, DataError
from dcar.model.draft import AnyDecoder
from dcar.prompts.items import PromptItem
from dcar.prompts.load import load_prompts
from rl.config import DCPOConfig, required

COLUMNS = (
    "utterance_id text_ids prompt_ids text speaker speaker_embedding reference_tokens "
    "prompt_utterance_id duration prompt_text_units language"
).split()


def load_dataset(
    data: str,
    decoder: AnyDecoder,
    split: str = "train",
    prompt_tokens: int = 50,
    seed: int = 42,
    limit: int | None = None,
    min_seconds: float = 0.0,
) -> Dataset:
    """Return the prompts of a prepared corpus as a data set with the columns `COLUMNS`, one row per
    prompt. Columns that are added to it reach the reward functions by their names.

    data: folder written by `dcar prepare`; prompt_tokens: length of the speech prompt; limit:
    largest number of prompts, chosen by seed; min_seconds: shortest recording used.
    """
    items = load_prompts(data, split, decoder, prompt_tokens, seed, limit, min_seconds)
    return Dataset.from_list([{name: getattr(item, name) for name in COLUMNS} for item in items])


def items_of(dataset: Sequence[PromptItem] | Dataset) -> list[PromptItem]:
    """Return the prompts of a data set made by `load_dataset`, or a list of prompts as it is.
    Raises DataError if the data set lacks columns."""
    if not isinstance(dataset, Dataset):
        return list(dataset)
    if missing := [name for name in COLUMNS if name not in dataset.column_names]:
        raise DataError(
            f"the data set has no column {', '.join(missing)}; make it with rl.data.load_dataset"
        )
    return [
        PromptItem(
            **{name: row.pop(name) for name in COLUMNS if name != "speaker_embedding"},
            speaker_embedding=np.asarray(row.pop("speaker_embedding"), np.float32),
            columns=row,
        )
        for row in dataset
    ]


def prompts_of(
    args: DCPOConfig,
    decoder: AnyDecoder,
    train: Sequence[PromptItem] | Dataset | None,
    evaluated: Sequence[PromptItem] | Dataset | None,
) -> tuple[list[PromptItem], list[PromptItem] | None]:
    """Return the training prompts of a run and its evaluation prompts, or None for these if it
    has no evaluations: the given data sets, or else the splits train and dev of `args.data`."""
    load = partial(load_prompts, base=decoder, prompt_tokens=args.prompt_tokens, seed=args.seed)
    if train is None:
        train = load(
            required(args, "data"), "train", limit=args.limit, min_seconds=args.min_seconds
        )
    if evaluated is None and args.eval_strategy != "no":
        evaluated = load(required(args, "data"), "dev", limit=args.eval_limit)
    return items_of(train), None if evaluated is None else items_of(evaluated)


Address = tuple[int, int, list[list[int]]]
"""Epoch, position of the micro-batch in it, and indices of the prompts of every micro-batch of its
window."""


class Prompts(TorchDataset):
    """Windows of prompts, by their addresses."""

    def __init__(self, items: Sequence[PromptItem]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, address: Address) -> dict[str, Any]:
        epoch, position, indices = address
        window = [[self.items[i] for i in batch] for batch in indices]
        return {"epoch": epoch, "position": position, "indices": indices, "items": window}


class PromptBatches(Sampler[list[Address]]):
    """Prompts of this process for every micro-batch, as a pure function of (seed, epoch).

    A window of `accumulation` micro-batches is repeated `iterations` times, for the inner updates
    on the same rollouts; each of its micro-batches has the prompts of all, because their rollouts
    are made together. The last window of an epoch is filled up from the beginning of the
    permutation.
    """

    def __init__(
        self,
        size: int,
        prompts: int,
        accumulation: int,
        iterations: int,
        seed: int,
        rank: int = 0,
        processes: int = 1,
    ):
        self.size, self.seed, self.rank = size, seed, rank
        self.shape = accumulation, processes, prompts
        self.repeats = accumulation * iterations
        self.epoch = 0
        per_window = math.prod(self.shape)
        if size < per_window:
            raise ConfigError(
                f"{size} training prompts are fewer than the {per_window} that one update "
                f"needs ({prompts} prompts x {processes} processes x {accumulation} accumulated): "
                "lower per_device_train_batch_size, or give more prompts"
            )
        self.windows = math.ceil(size / per_window)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.windows * self.repeats

    def __iter__(self) -> Iterator[list[Address]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.size)
        windows = np.resize(order, (self.windows, *self.shape))[:, :, self.rank]
        for position in range(len(self)):
            yield [(self.epoch, position, windows[position // self.repeats].tolist())]
