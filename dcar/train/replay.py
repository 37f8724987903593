"""Rows of another corpus in every batch (replay): what a small corpus of one voice does not say is not forgotten.

    dcar train --config launch/recipes/finetune_starter.yaml data=runs/voice/prepared out=runs/voice/car

The decoder that is fine-tuned has learned from hours of many voices; minutes of one would teach it their few sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dcar.errors import DataError
from dcar.prepare.prepared import load_prepared, prepared_info
from dcar.sources.shipped import resolve
from dcar.train.batches import BucketBatchSampler


def with_replay(train: Any, replay: str, identity: dict[str, Any]) -> Any:
    """The training rows, and behind them those of the prepared corpus `replay` ("starter": the shipped one).

    identity: vocabulary, tokenizer and phonemes of the training rows. DataError where the other corpus has other ones.
    """
    import datasets

    folder = resolve(replay, "prepared")
    info = prepared_info(folder)
    made, wanted = info["tokenizer"]["checksum"], identity["tokenizer"].rpartition("@")[2]
    if made != wanted or info["phonemes"]["version"] != identity["phonemes"]:
        raise DataError(f"replay {folder}: has tokens of {info['tokenizer']['name']} ({made[:12]}) and phonemes "
                        f"{info['phonemes']['version']}, the training data tokens of {wanted[:12]} and phonemes "
                        f"{identity['phonemes']}; prepare one of them like the other, or leave replay out")
    other = load_prepared(folder, "train")
    if "recorded" in train.column_names and "recorded" not in other.column_names:  # prompts of both stay recordings
        other = other.add_column("recorded", other.data.column("speech"), feature=other.features["speech"])
    shared = [name for name in train.column_names if name in other.column_names]
    return datasets.concatenate_datasets([train.select_columns(shared), other.select_columns(shared)])


class ReplayBatchSampler(BucketBatchSampler):
    """Batches of the first `own` rows, of `batch_size` less a share, filled with rows behind them of similar length.

    An epoch is one of the own rows. Which rows are replayed is a pure function of (seed, epoch, batch).
    """

    def __init__(self, lengths: Sequence[int], own: int, batch_size: int, share: float, seed: int, rank: int = 0,
                 processes: int = 1):
        self.replayed = min(batch_size - 1, max(1, round(share * batch_size)))
        super().__init__(lengths[:own], batch_size - self.replayed, seed, True, rank, processes)
        self.others = own + np.argsort(np.asarray(lengths[own:]), kind="stable")  # by length
        self.other_lengths = np.asarray(lengths)[self.others]

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for number, batch in enumerate(super().__iter__()):
            rng = np.random.default_rng([self.seed, self.epoch, self.rank, number])
            middle = np.searchsorted(self.other_lengths, np.median([self.lengths[i] for _, i in batch]))
            near = max(self.replayed, len(self.others) // 4)  # the quarter of the nearest lengths
            start = int(np.clip(middle - near // 2, 0, max(0, len(self.others) - near)))
            found = rng.choice(self.others[start : start + near], self.replayed, replace=near < self.replayed)
            yield [*batch, *((self.epoch, int(i)) for i in found)]
