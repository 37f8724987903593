"""Facts about all rows of a prepared split that commands need, in one memory-mapped file next to
its table.

Reading five million rows takes an hour; mapping a few numbers per row takes no time. `dcar prepare`
writes them to <split>/columns.feather (Arrow IPC, 29 bytes per row), with the columns of `SCHEMA`.
A split without that file, as in the corpus that ships, is read at every start.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

FILE = "columns.feather"
SCHEMA = {
    "speech_tokens": "int32",  # length of `speech`
    "text_units": "int32",  # length of `text_ids`
    # least number of frames that CTC needs for `text_ids` (dcar.recognition.ctc.frames_needed)
    "ctc_frames": "int32",
    "duration": "float32",  # seconds
    "has_prompt": "uint8",  # 1 if the corpus names a prompt
    "speaker": "int32",  # index of the speaker's name among all names in alphabetical order
    # index of the id among all ids in alphabetical order; equal ids have equal ranks
    "id_rank": "int32",
    # the same for the SHA-256 of the ids: an order that looks random and never changes
    "digest_rank": "int32",
}
READ = ["id", "speaker", "text_ids", "speech", "duration", "prompt_speech"]
READ_AT_ONCE = 10_000  # rows


@dataclass(frozen=True)
class Split:
    """Prepared split: its rows on disk, and the columns of `SCHEMA` of all rows, by name.

    largest_token, largest_text_id: the largest ids in the split, -1 if it has none.
    """

    rows: datasets.Dataset
    columns: Mapping[str, np.ndarray]
    largest_token: int
    largest_text_id: int

    @classmethod
    def of(cls, rows: datasets.Dataset, table: pa.Table | None = None) -> Split:
        """Return the split of a data set with the columns of a prepared one. table: the result
        of `scan`, if it is known; otherwise every row is read."""
        table = scan(rows) if table is None else table
        return cls(
            rows,
            {name: table[name].to_numpy() for name in SCHEMA},
            *(int(table.schema.metadata[name]) for name in (b"largest_token", b"largest_text_id")),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: np.ndarray) -> Split:
        """Return the split of some of the rows. Ranks keep their order; the largest ids remain
        those of the whole split."""
        return Split(
            self.rows.select(indices),
            {name: column[indices] for name, column in self.columns.items()},
            self.largest_token,
            self.largest_text_id,
        )

    def followed_by(self, other: Split, rows: datasets.Dataset) -> Split:
        """Return this split followed by another one, for training: without the ranks. Speakers
        with the same name become one. rows: the rows of both."""
        columns = {
            name: np.concatenate([self.columns[name], other.columns[name]])
            for name in SCHEMA
            if name not in ("speaker", "id_rank", "digest_rank")
        }
        ours, theirs = self.speakers(), other.speakers()
        place = {name: i for i, name in enumerate(sorted({*ours[0], *theirs[0]}))}
        columns["speaker"] = np.concatenate(
            [
                np.array([place[name] for name in names], np.int32)[numbers]
                for names, numbers in (ours, theirs)
            ]
        )
        return Split(
            rows,
            columns,
            max(self.largest_token, other.largest_token),
            max(self.largest_text_id, other.largest_text_id),
        )

    def speakers(self) -> tuple[list[str], np.ndarray]:
        """Return the names of the speakers, and for every row the index of its speaker's name.
        Reads one row per speaker."""
        _, first, numbers = np.unique(
            self.columns["speaker"], return_index=True, return_inverse=True
        )
        return self.rows.select(first)["speaker"][:], numbers

    @cached_property
    def _by_id(self) -> np.ndarray:
        return np.argsort(self.columns["id_rank"], kind="stable")

    def find(self, utterance_id: str) -> int | None:
        """Return the index of the first row with an id, None if there is none. Reads about log2
        of the number of rows."""
        ids = self.rows.select_columns("id")
        place = bisect_left(self._by_id, utterance_id, key=lambda row: ids[int(row)]["id"])
        if place == len(self):
            return None
        index = int(self._by_id[place])
        return index if ids[index]["id"] == utterance_id else None


def scan(rows: datasets.Dataset) -> pa.Table:
    """Read every row of a data set once and return the columns of `SCHEMA`, with the largest ids
    in the metadata."""
    import pyarrow as pa

    by_column: dict[str, list[np.ndarray]] = {name: [] for name in SCHEMA}
    ids, speakers, digests = list[pa.Array](), list[pa.Array](), bytearray()
    largest = {"largest_token": -1, "largest_text_id": -1}
    for batch in rows.select_columns(READ).with_format("arrow").iter(READ_AT_ONCE):
        (codes, speech), (units, text), (_, prompt) = map(
            _ragged, (batch[n] for n in ("speech", "text_ids", "prompt_speech"))
        )
        numbers = {
            "speech_tokens": speech,
            "text_units": text,
            "ctc_frames": text + _repeats(units, text),
            "duration": batch["duration"].to_numpy(),
            "has_prompt": prompt > 0,
        }
        for name, values in numbers.items():
            by_column[name].append(values)
        for name, values in (("largest_token", codes), ("largest_text_id", units)):
            largest[name] = max(largest[name], int(values.max(initial=0)) if len(values) else -1)
        ids += batch["id"].chunks
        speakers += batch["speaker"].chunks
        digests += b"".join(
            hashlib.sha256(name.encode()).digest() for name in batch["id"].to_pylist()
        )
    hashed = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(32), len(digests) // 32, [None, pa.py_buffer(digests)]
    )
    by_column["speaker"], by_column["id_rank"] = [_ranks(speakers)], [_ranks(ids)]
    by_column["digest_rank"] = [_ranks([hashed])]
    columns = {
        name: np.concatenate([np.empty(0), *by_column[name]]).astype(kind)
        for name, kind in SCHEMA.items()
    }
    return pa.table(columns).replace_schema_metadata(
        {name: str(value) for name, value in largest.items()}
    )


def _ragged(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a column of lists, one list after the other, and the length of each
    list."""
    import pyarrow.compute as pc

    lists = column.combine_chunks()
    return lists.flatten().to_numpy(), pc.list_value_length(lists).to_numpy()


def _repeats(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return, for each list, the number of values that are equal to the one before them."""
    ends = np.cumsum(lengths)
    same = np.zeros(len(values) + 1, np.int64)  # one more, for the end of the last list
    same[1:-1] = values[1:] == values[:-1]
    same[ends - lengths] = 0  # the first value of a list has no predecessor
    before = np.concatenate([[0], np.cumsum(same)])
    return before[ends] - before[ends - lengths]


def _ranks(parts: list[pa.Array]) -> np.ndarray:
    """Return the rank of every value, from 0; equal values have equal ranks. Strings are ordered
    by code point, as Python sorts them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not parts:
        return np.empty(0)
    return (
        pc.rank(pa.chunked_array(parts), sort_keys="ascending", tiebreaker="dense").to_numpy() - 1
    )


def write_columns(folder: Path, table: pa.Table) -> None:
    """Write the columns of a split into its folder."""
    import pyarrow as pa

    with pa.ipc.new_file(str(folder / FILE), table.schema) as writer:
        writer.write_table(table)  # in one batch, so that each column is one memory-mapped array


def read_columns(folder: Path, rows: datasets.Dataset) -> pa.Table:
    """Return the columns of a split, memory-mapped. If its folder has none, as in the corpus that
    ships, all rows are read."""
    import pyarrow as pa

    if not (folder / FILE).exists():
        return scan(rows)
    with pa.memory_map(str(folder / FILE)) as file:
        return pa.ipc.open_file(file).read_all()
