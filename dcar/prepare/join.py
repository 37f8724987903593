"""`dcar prepare mode=join`: merge prepared corpora and concatenate utterances, to train a decoder
on long texts.

    dcar prepare mode=join data=[runs/distilled] out=runs/distilled_joined
    dcar prepare mode=join data=[starter,runs/more] share=0 out=runs/both

A decoder trained on single sentences loses its place in longer texts. A share of each speaker's
training utterances is joined, two to `MOST` at a time; the others and the other splits stay
unchanged. Between two sentences the full stop may become a comma, so that the data contain long
sentences as well as several short ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dcar.config import check, load_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError, DataError
from dcar.prepare.prepared import (
    COLUMNS,
    LANGUAGE_COLUMNS,
    RESIDUAL_COLUMNS,
    check_out_dir,
    load_prepared,
    note_equal_speakers,
    prepared_info,
    residual_of,
    save_splits,
    with_recorded,
)
from dcar.process import run_claimed
from dcar.text.common import FIRST, WORD_BOUNDARY
from dcar.text.languages import DEFAULT, language_of
from dcar.text.units import TEXT_TOKENIZER

if TYPE_CHECKING:
    from datasets import Dataset

SPACE, COMMA, STOP = map(FIRST.index, (WORD_BOUNDARY, ",", "."))
MOST = 3  # largest number of utterances joined into one
COMMAS = 0.6  # share of the full stops within a joined utterance that become commas


@dataclass
class JoinConfig:
    """Settings of `dcar prepare mode=join`."""

    data: list[str] = setting(
        ["runs/prepared"],
        "Folders written by `dcar prepare` or `dcar distil`: the training utterances of all of "
        "them, the other splits of the first.",
    )
    out: str = setting("runs/joined", "Prepared corpus to write.", place="folder")
    share: float = setting(
        0.55, "Share of a speaker's training utterances that are joined.", minimum=0, maximum=1
    )
    max_seconds: float = setting(28.0, "Longest joined utterance, in seconds.", above=0)
    seed: int = seed_setting(0, "Random seed for the choice of utterances that are joined.")

    def __post_init__(self) -> None:
        check(self)
        if not self.data:
            raise ConfigError(
                "data is empty: name at least one prepared corpus, for example data=[runs/prepared]"
            )


def groups(
    speakers: Sequence[str], seconds: Sequence[float], config: JoinConfig
) -> list[list[int]]:
    """Return groups of rows to join: every row once, alone or with others of its speaker. Groups
    are in the order of their first rows."""
    rng = np.random.default_rng(config.seed)
    rows: dict[str, list[int]] = defaultdict(list)
    for row, speaker in enumerate(speakers):
        rows[speaker].append(row)
    grouped: list[list[int]] = []
    for own in rows.values():
        order = rng.permutation(own).tolist()
        alone = round(len(order) * (1 - config.share))
        grouped += [[row] for row in order[:alone]]
        group: list[int] = []
        size = int(rng.integers(2, MOST + 1))
        for row in order[alone:]:
            if len(group) == size or (
                group and sum(seconds[i] for i in [*group, row]) > config.max_seconds
            ):
                grouped.append(group)
                group, size = [], int(rng.integers(2, MOST + 1))
            group.append(row)
        if group:
            grouped.append(group)
    return sorted(grouped)


def joined(
    rows: Sequence[dict[str, Any]], rng: np.random.Generator, commas: float = COMMAS
) -> dict[str, Any]:
    """Return rows of a prepared corpus joined into one, with the voice and the prompt of the
    first and no recording. A single row is returned unchanged. commas: probability that a full
    stop within becomes a comma."""
    if len(rows) == 1:
        return rows[0]
    texts, ids, speech = [], list[int](), list[int]()
    between = language_of(rows[0].get("language", DEFAULT)).separator
    for place, row in enumerate(rows, 1):
        text, text_ids = row["text"].rstrip(), list(row["text_ids"])
        if place < len(rows) and text_ids[-1:] == [STOP] and rng.random() < commas:
            text, text_ids[-1] = text.removesuffix(".") + ",", COMMA
        texts.append(text)
        ids += [SPACE, *text_ids] if ids and between else text_ids
        speech += row["speech"]
    columns = {
        **rows[0],
        "id": "+".join(row["id"] for row in rows),
        "text": between.join(texts),
        "text_ids": ids,
        "speech": speech,
        "duration": sum(row["duration"] for row in rows),
        "audio": "",
    }
    if "recorded" in columns:
        columns["recorded"] = [token for row in rows for token in row["recorded"]]
    if "residual" in columns:
        codes = np.concatenate([residual_of(row) for row in rows], axis=1)
        columns["residual"] = codes.ravel().tolist()
    return columns


def join(config: JoinConfig) -> Path:
    """Write the joined corpus and return its folder. Raises ConfigError, DataError."""
    from datasets import concatenate_datasets

    out, infos = Path(config.out), [prepared_info(folder) for folder in config.data]
    layers = infos[0].tokenizer.layers
    for folder, info in zip(config.data, infos, strict=True):
        check_out_dir(out, read=folder)
        if info.phonemes.startswith(TEXT_TOKENIZER):
            raise ConfigError(
                f"data: {folder} has text ids of a language model; join the corpus that it was "
                "made from, then run mode=retokenize"
            )
        if info.phonemes != infos[0].phonemes:
            raise DataError(
                f"{folder}: has text ids of {info.phonemes}, but {config.data[0]} has those of "
                f"{infos[0].phonemes}; prepare both in the same language and units"
            )
        if info.tokenizer.identity != infos[0].tokenizer.identity:
            raise DataError(
                f"{folder}: has tokens of {info.tokenizer.identity}, but {config.data[0]} has "
                f"tokens of {infos[0].tokenizer.identity}; prepare it again with that tokenizer"
            )
        if info.tokenizer.layers != layers:
            raise DataError(
                f"{folder}: has {info.tokenizer.layers or 1} layers of codes, but "
                f"{config.data[0]} has {layers or 1}; prepare it again with the same residual and "
                "tokenizer"
            )
    train = [load_prepared(folder, "train") for folder in config.data]
    names = [rows.unique("speaker") for rows in train]
    note_equal_speakers([info.corpus for info in infos], names)
    columns = [*COLUMNS, *(RESIDUAL_COLUMNS if layers else ())]
    columns += [name for name in LANGUAGE_COLUMNS if name in train[0].column_names]
    kept = columns
    if any("recorded" in rows.column_names for rows in train):
        train, kept = list(map(with_recorded, train)), [*columns, "recorded"]

    def made(split: str) -> Dataset:
        if split != "train":
            return load_prepared(config.data[0], split).select_columns(columns)
        rows = concatenate_datasets([rows.select_columns(kept) for rows in train])
        if twice := [name for name, times in Counter(rows["id"]).items() if times > 1]:
            raise DataError(
                f"data: {len(twice)} training utterances repeat the id of another, the first is "
                f"{twice[0]}; give folders of different corpora"
            )
        return _join_rows(rows, config)

    splits = ((split, made(split)) for split in infos[0].counts)
    joined = {"from": config.data, "settings": asdict(config)}
    save_splits(out, splits, {**infos[0].content, "joined": joined})
    return out


def _join_rows(rows: Dataset, config: JoinConfig) -> Dataset:
    from datasets import Dataset

    if config.share == 0:
        return rows
    rng = np.random.default_rng(config.seed + 1)
    sentences = [
        joined([rows[i] for i in group], rng)
        for group in groups(rows["speaker"], rows["duration"], config)
    ]
    return Dataset.from_list(sentences, features=rows.features)


CONFIG = JoinConfig


def main(arguments: Sequence[str] | None = None) -> None:
    print(f"written to {run_claimed(join, load_config(CONFIG, arguments))}")
