"""Prepared corpora with a given number of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from dcar.prepare.prepared import TABLE, _describe_dataset, features, prepared_info, put_in_place

AT_ONCE = 10_000


def write_many(
    out: Path, rows: int, tokens: int = 300, voice: int = 298, speakers: int = 3000, audio: str = ""
) -> Path:
    """Write a prepared corpus of the shipped tokenizer with a training split of `rows` rows and a
    dev split of eight.

    tokens: mean length of the lists `speech`; voice: length of the lists `voice`; audio: recording
    that all rows name.
    """
    info = prepared_info("starter")
    columns = features(info.tokenizer.vocab_size)
    building = out.parent / f".{out.name}.partial" / "building"
    for split, count in (("train", rows), ("dev", 8)):
        (building / split).mkdir(parents=True)
        rng = np.random.default_rng(count)
        with (
            pa.OSFile(str(building / split / TABLE), "wb") as sink,
            pa.ipc.new_stream(sink, columns.arrow_schema) as writer,
        ):
            for first in range(0, count, AT_ONCE):
                writer.write_table(
                    _rows(
                        first,
                        min(AT_ONCE, count - first),
                        columns,
                        rng,
                        tokens,
                        voice,
                        speakers,
                        audio,
                    )
                )
        _describe_dataset(building / split, columns, f"{rows} {split}")
    put_in_place(
        building,
        out,
        ["train", "dev"],
        info.content,
    )
    return out


def _rows(
    first: int,
    count: int,
    columns,
    rng: np.random.Generator,
    tokens: int,
    voice: int,
    speakers: int,
    audio: str,
) -> pa.Table:
    lengths = rng.integers(tokens // 2, tokens + tokens // 2, count)
    names = np.arange(first, first + count)
    strings = {
        "id": [f"u{(n * 7919) % 10_000_019:08}" for n in names],
        "text": ["A red house."] * count,
        "speaker": [f"s{n}" for n in rng.integers(speakers, size=count)],
        "audio": [audio] * count,
        "source": [f"made:{n}" for n in names],
        "prompt_text": [""] * count,
    }
    lists = {
        "text_ids": _lists(rng.integers(1, 60, 40 * count), np.full(count, 40)),
        "speech": _lists(rng.integers(0, 1024, lengths.sum()), lengths),
        "voice": _lists(rng.random(voice * count, np.float32) + 5, np.full(count, voice)),
        **dict.fromkeys(
            ("prompt_speech", "prompt_voice"), _lists(np.zeros(0), np.zeros(count, int))
        ),
    }
    numbers = {"duration": lengths / 50, "speed": np.ones(count)}
    schema = columns.arrow_schema
    made = {**{k: pa.array(v) for k, v in (strings | numbers).items()}, **lists}
    return pa.table({name: made[name] for name in schema.names}).cast(schema)


def _lists(values: np.ndarray, lengths: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), values
    )
