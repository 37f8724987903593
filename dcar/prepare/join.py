"""`dcar prepare mode=join`: utterances put behind each other, to train a decoder on long texts.

    dcar prepare mode=join data=runs/distilled out=runs/distilled_joined

A decoder that has only heard single sentences loses its place in longer ones. Here a share of the training utterances
of every speaker is joined, two to `MOST` at a time; the others stay as they are, and so do the other splits. Between
two sentences the full stop may become a comma, so that long sentences are heard as well as several short ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dcar.config import check, load_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError
from dcar.prepare.prepared import (
    COLUMNS,
    check_out_dir,
    load_prepared,
    prepared_info,
    save_splits,
)
from dcar.text.phonemes import PHONEME_VERSION, WORD_BOUNDARY, encode_phonemes

if TYPE_CHECKING:
    from datasets import Dataset

SPACE, COMMA, STOP = encode_phonemes([WORD_BOUNDARY, ",", "."])
MOST = 3  # utterances joined; each joined one has at least two
COMMAS = 0.6  # share of the full stops within a joined one that become commas


@dataclass
class JoinConfig:
    """Settings of `dcar prepare mode=join`."""

    data: str = setting("runs/prepared", "Folder written by `dcar prepare` or `dcar distil`.", place="folder")
    out: str = setting("runs/joined", "Prepared corpus to write.", place="folder")
    share: float = setting(0.55, "Of the training utterances of a speaker, how many are joined.", above=0, maximum=1)
    max_seconds: float = setting(28.0, "A joined utterance is not longer.", above=0)
    seed: int = seed_setting(0, "Of who is joined with whom.")

    def __post_init__(self) -> None:
        check(self)


def groups(speakers: Sequence[str], seconds: Sequence[float], config: JoinConfig) -> list[list[int]]:
    """Which rows stand behind each other: every row once, alone or with others of its speaker. In the order of their
    first rows."""
    rng = np.random.default_rng(config.seed)
    rows: dict[str, list[int]] = defaultdict(list)
    for row, speaker in enumerate(speakers):
        rows[speaker].append(row)
    found: list[list[int]] = []
    for own in rows.values():
        order = rng.permutation(own).tolist()
        alone = round(len(order) * (1 - config.share))
        found += [[row] for row in order[:alone]]
        group: list[int] = []
        size = int(rng.integers(2, MOST + 1))
        for row in order[alone:]:
            if len(group) == size or (group and sum(seconds[i] for i in [*group, row]) > config.max_seconds):
                found.append(group)
                group, size = [], int(rng.integers(2, MOST + 1))
            group.append(row)
        found += [group] if group else []
    return sorted(found)


def joined(rows: Sequence[dict[str, Any]], rng: np.random.Generator, commas: float = COMMAS) -> dict[str, Any]:
    """Rows of a prepared corpus as one, with the voice and the prompt of the first and no recording. A row alone stays
    as it is."""
    if len(rows) == 1:
        return rows[0]
    texts, ids, speech = [], list[int](), list[int]()
    for place, row in enumerate(rows, 1):
        text, text_ids = row["text"].rstrip(), list(row["text_ids"])
        if place < len(rows) and text_ids[-1:] == [STOP] and rng.random() < commas:
            text, text_ids[-1] = text.removesuffix(".") + ",", COMMA
        texts.append(text)
        ids += [SPACE, *text_ids] if ids else text_ids
        speech += row["speech"]
    return {**rows[0], "id": "+".join(row["id"] for row in rows), "text": " ".join(texts), "text_ids": ids,
            "speech": speech, "duration": sum(row["duration"] for row in rows), "audio": ""}


def join(config: JoinConfig) -> Path:
    """Write the corpus. ConfigError, DataError."""
    out, info = Path(config.out), prepared_info(config.data)
    check_out_dir(out, read=config.data)
    if info["phonemes"]["version"] != PHONEME_VERSION:
        raise ConfigError(f"{config.data} has text tokens of a language model; join the corpus that it was made from, "
                          "then use mode=retokenize")

    def made(split: str) -> Dataset:
        rows = load_prepared(config.data, split).select_columns(list(COLUMNS))
        return _join_rows(rows, config) if split == "train" else rows

    splits = ((split, made(split)) for split in info["counts"])
    save_splits(out, splits, {**info, "joined": {"from": config.data, "settings": asdict(config)}})
    return out


def _join_rows(rows: Dataset, config: JoinConfig) -> Dataset:
    from datasets import Dataset

    rng = np.random.default_rng(config.seed + 1)
    made = [joined([rows[i] for i in group], rng)
            for group in groups(rows["speaker"], rows["duration"], config)]
    return Dataset.from_list(made, features=rows.features)


def main(arguments: Sequence[str] | None = None) -> None:
    print(f"written to {join(load_config(JoinConfig, arguments))}")
