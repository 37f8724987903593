"""Files to which every process appends what it has made, one line each, as soon as it is made.

Each process appends to its own shard, so an interruption loses at most the utterance in progress.
A resumed run reads all shards, whatever number of processes wrote them.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dcar.prompts.items import PromptItem
from dcar.storage import finish_last_line, writing
from dcar.text.languages import language_of
from dcar.text.wer import character_errors, word_errors
from eval.results.types import Record, read_records, to_json


class JsonLines:
    """Shard of a folder, to which a process appends."""

    def __init__(self, folder: Path, process: int = 0):
        self.folder, self.path = folder, folder / f"shard-{process:04d}.jsonl"

    def open(self) -> None:
        """Prepare for appending: after a crash the last line may be incomplete."""
        with writing(self.path):
            self.folder.mkdir(parents=True, exist_ok=True)
            finish_last_line(self.path)

    def append(self, value: Any) -> None:
        with writing(self.path), self.path.open("a") as file:
            file.write(to_json(value) + "\n")


class RecordStore:
    """Records of all processes by (fingerprint, seed). `read` has to be called before any process
    appends."""

    def __init__(self, folder: Path, process: int = 0):
        self.lines = JsonLines(folder, process)
        self.records: dict[tuple[str, int], Record] = {}

    def read(self, scores: Iterable[str] = ()) -> None:
        """Read the records of all shards. Of several records of one utterance, the last one with
        all scores counts. Transcripts scored by another normaliser are scored again. Raises
        DataError for a record of another version."""
        for path in sorted(self.lines.folder.glob("shard-*.jsonl")):
            for record in read_records(path):
                key = record.fingerprint, record.seed
                if key not in self.records or set(scores) <= record.scores.keys():
                    self.records[key] = rescored(record)

    def append(self, record: Record) -> None:
        self.lines.append(record)
        self.records[record.fingerprint, record.seed] = record


def rescored(record: Record) -> Record:
    """Return the record with the errors of its transcript by the current normaliser."""
    normalizer = language_of(record.language).normalizer
    if record.normalizer == normalizer:
        return record
    texts = record.text, record.hypothesis, record.language
    return replace(
        record,
        normalizer=normalizer,
        words=word_errors(*texts),
        characters=character_errors(*texts),
    )


def described(item: PromptItem) -> list[Any]:
    """Return everything of an utterance that its speech depends on, for a digest."""
    speaker = hashlib.sha256(
        np.ascontiguousarray(item.speaker_embedding, np.float32).tobytes()
    ).hexdigest()
    return [
        item.utterance_id,
        list(map(int, item.text_ids)),
        list(map(int, item.prompt_ids)),
        item.text,
        speaker,
        list(map(int, item.reference_tokens)),
    ]
