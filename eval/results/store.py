"""Records of a comparison, one per (method, seed, utterance), each appended to a file as soon as it
is made.

The work is divided into jobs (seed, batch of utterances, method) that do not depend on the number
of processes; process p of n takes every n-th. Each process appends to its own shard, so an
interruption loses at most the utterance in progress. A resumed run reads all shards, whatever
number of processes wrote them.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dcar.audio import OPUS_RATES, resample, save_audio
from dcar.decoding import DecodeResult
from dcar.errors import DataError, check_format
from dcar.prompts.choose import by_digest
from dcar.prompts.items import PromptItem
from dcar.recognition.base import Recognizer, transcripts
from dcar.storage import digest_of, writing
from dcar.text.wer import NORMALIZER, WordErrors, character_errors, word_errors
from dcar.tokens.alignment import PhonemeAligner
from dcar.vocoder.base import Vocoder
from dcar.vocoder.voicing import voice
from eval.methods.registry import Entry, Models
from eval.scorers.load import Scorer

Key = tuple[str, int, str]  # method, seed, utterance id
Record = dict[str, Any]

RECORDING, RESYNTHESIS = "recording", "ground truth resynthesised"
RECORD_VERSION = 4

logger = logging.getLogger(__name__)


@dataclass
class Tools:
    """Models, data and scorers of a comparison; loaded from a config, or assembled in a notebook
    or test."""

    # name of a set of texts -> prompt seed -> its utterances; the first of both has references,
    # audio and pictures
    sets: Mapping[str, Mapping[int, list[PromptItem]]]
    models: Models
    vocoder: Vocoder
    recognizer: Recognizer
    # utterance id -> waveform, rate in Hz
    recording: Callable[[str], tuple[np.ndarray, int]] | None = None
    identity: dict[str, str] = field(default_factory=dict)  # names and checksums of vocoder, ASR, …
    # description of the data, for the report; `texts`: the lists among its sets of texts
    corpus: dict[str, Any] = field(default_factory=lambda: {"texts": []})
    # by name; every record carries a score of each
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    # [V, P] centroids of the tokenizer, by which renderings are compared
    codebook: np.ndarray | None = None
    aligner: PhonemeAligner | None = None  # lays texts along the tokens, for pictures of samples
    training: str = ""  # sentence on the training of FAR and CAR (eval/results/training.py)

    @property
    def items(self) -> list[PromptItem]:
        """Utterances of the first set of texts with the prompts of the first seed."""
        return next(iter(next(iter(self.sets.values())).values()))


@dataclass(frozen=True)
class Job:
    """One method on one batch of utterances with one seed. The process `owner` modulo the number
    of processes runs it."""

    method: str
    seed: int
    indices: tuple[int, ...]
    owner: int


class RecordStore:
    """JSONL shards in a folder. A line that was cut off by an interruption is dropped."""

    def __init__(self, folder: str | Path, process_index: int = 0):
        self.folder = Path(folder)
        self.shard = self.folder / f"shard-{process_index:04d}.jsonl"

    def read(self) -> list[Record]:
        """Return all complete records of all shards; within a shard they are in order."""
        return [r for path in sorted(self.folder.glob("shard-*.jsonl")) for r in read_jsonl(path)]

    def open(self) -> None:
        """Prepare the shard for appending: after a crash its last line may be incomplete."""
        with writing(self.shard):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.shard.exists():
                os.truncate(self.shard, self.shard.read_bytes().rfind(b"\n") + 1)

    def append(self, record: Record) -> None:
        with writing(self.shard), self.shard.open("a") as file:
            file.write(json.dumps(record) + "\n")


def read_jsonl(
    path: Path, what: str = "record", check: Callable[[Record], Any] = lambda record: None
) -> Iterator[Record]:
    """Return the objects in a file, none if it is missing. Raises DataError for a line that is
    not an object or that `check` rejects (by ValueError, LookupError or TypeError); only the
    last line may be broken, by an interrupted write."""
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"a {type(record).__name__}, not an object")
            check(record)
        except (ValueError, LookupError, TypeError) as error:
            # ValueError: no JSON, or not UTF-8
            if number < len(lines):
                raise DataError(
                    f"{path}:{number}: not a {what} ({error}); delete this line and run again"
                ) from error
            return
        yield record


def by_method(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the records of each method, in order."""
    grouped: dict[str, list[Record]] = {}
    for record in records:
        grouped.setdefault(record["method"], []).append(record)
    return grouped


def chosen_of(items: Sequence[PromptItem], limit: int) -> list[int]:
    """Return the indices of `limit` utterances (0 = all), sorted by id (`by_digest`)."""
    ids = [item.utterance_id for item in items]
    digests = [hashlib.sha256(i.encode()).hexdigest() for i in ids]
    return by_digest(np.array(digests), np.array(ids), limit).tolist()


def choose_items(items: Sequence[PromptItem], limit: int) -> list[PromptItem]:
    """Return `limit` utterances (0 = all), sorted by id (`by_digest`)."""
    return [items[i] for i in chosen_of(items, limit)]


def plan(
    items: Sequence[PromptItem],
    entries: Sequence[Entry],
    seeds: Sequence[int],
    batch_size: int,
    references: Sequence[str],
) -> list[Job]:
    """Return the jobs in the order in which they are run; in a partial run, all methods of one
    limit have seen the same utterances.

    Batches contain utterances of similar text length, and are the same for every number of
    processes.
    """
    jobs = []
    for limit in sorted({0, *(e.limit for e in entries)}):
        order = sorted(
            chosen_of(items, limit), key=lambda i: (len(items[i].text_ids), items[i].utterance_id)
        )
        batches = [tuple(order[i : i + batch_size]) for i in range(0, len(order), batch_size)]
        alike = [e.name for e in entries if e.limit == limit]
        for s, seed in enumerate(seeds):
            methods = [*(references if s == limit == 0 else ()), *alike]
            for b, batch in enumerate(batches):
                # shifted by batch, so that a slow method is not always run by the same process
                jobs += [Job(method, seed, batch, s + b + m) for m, method in enumerate(methods)]
    return jobs


VOICED_TOGETHER = 16
"""Number of utterances of a job that a GPU synthesises and transcribes together."""


class Maker:
    """Producer of the missing records of jobs: it decodes, synthesises, transcribes and scores.

    A transcript may depend on the last bits of a waveform, and those on the batch. On a CPU,
    utterances are therefore synthesised and transcribed one at a time, and a transcript is a
    function of tokens and voice, whatever the method, the batch or an earlier run. On a GPU this
    is done in batches of `together` utterances, the same ones in every run.
    """

    def __init__(
        self,
        tools: Tools,
        items: Sequence[PromptItem],
        entries: Sequence[Entry],
        seeds: Sequence[int],
        audio: Collection[int],
        out: Path,
        store: RecordStore,
        done: Iterable[Record],
    ):
        """Adopt existing records. audio: indices into items of the utterances whose audio is
        kept, for the first seed."""
        self.tools, self.items, self.audio = tools, items, audio
        self.out, self.store = out, store
        self.entries = {e.name: e for e in entries}
        self.first_seed = seeds[0]
        on_cpu = next(tools.models.decoder.parameters()).device.type == "cpu"
        self.together = 1 if on_cpu else VOICED_TOGETHER
        self._items = [digest_of(described(item)) for item in items]
        self._methods = {
            name: digest_of([name, e.identity, asdict(e.sampling)])
            for name, e in self.entries.items()
        }
        self._common = digest_of([RECORD_VERSION, tools.identity, tools.recognizer.name])
        self._index = {item.utterance_id: i for i, item in enumerate(items)}
        self.done: dict[Key, Record] = {}
        self.adopt(done)

    def adopt(self, records: Iterable[Record]) -> None:
        """Adopt records made elsewhere that belong to this comparison, one per (method, seed,
        utterance). Transcripts scored with another normaliser are scored again.

        Raises DataError for a record of another version.
        """
        for record in records:
            check_format(
                self.out / "records",
                record.get("version"),
                RECORD_VERSION,
                DataError,
                "choose another `out`, or remove this folder: its utterances will be decoded again",
            )
            index = self._index.get(record["id"])
            if index is None or record["fingerprint"] != self.fingerprint(record["method"], index):
                continue
            if not self.finished(record["method"], record["seed"], index):
                self.done[record["method"], record["seed"], record["id"]] = scored(record)

    def fingerprint(self, method: str, index: int) -> str:
        """Return a digest of everything that a record depends on besides its seed and its
        normaliser."""
        return digest_of([self._methods.get(method, method), self._items[index], self._common])[:16]

    def audio_path(self, method: str, index: int) -> Path:
        slug = "".join(c if c.isalnum() or c in "-@" else "-" for c in method)
        name = hashlib.sha256(self.items[index].utterance_id.encode()).hexdigest()[:8]
        return self.out / "audio" / f"{name}-{slug}-{self.fingerprint(method, index)}.opus"

    def keeps_audio(self, seed: int, index: int) -> bool:
        return seed == self.first_seed and index in self.audio

    def finished(self, method: str, seed: int, index: int) -> bool:
        """Return True if a record exists with all scores and, if it is to be kept, the audio."""
        record = self.done.get((method, seed, self.items[index].utterance_id))
        if record is None:
            return False
        if not self.tools.scorers.keys() <= record.get("scores", {}).keys():
            return False
        if record["duration"] == 0 or not self.keeps_audio(seed, index):
            return True
        return self.audio_path(method, index).exists()

    def run(self, job: Job, progress: Callable[[int], Any]) -> None:
        """Make the job's missing records. progress: called with the number of further records
        that exist."""
        missing = [i for i in job.indices if not self.finished(job.method, job.seed, i)]
        progress(len(job.indices) - len(missing))
        if not missing:
            return
        items = [self.items[i] for i in job.indices]
        if job.method == RECORDING:
            assert self.tools.recording is not None
            for i in missing:
                wave, rate = self.tools.recording(self.items[i].utterance_id)
                started = time.perf_counter()
                [text] = transcripts(self.tools.recognizer, [wave], rate)
                seconds = {"recognizer": time.perf_counter() - started}
                self._finish(job, i, wave, rate, {"hypothesis": text, "seconds": seconds})
                progress(1)
            return
        # The whole batch is decoded even if only a part is missing, so that tensors and tokens are
        # always the same.
        started = time.perf_counter()
        results: list[DecodeResult] | None = None
        if job.method == RESYNTHESIS:
            tokens = [list(item.reference_tokens) for item in items]
        else:
            results = self.entries[job.method].decode(items, job.seed, len(items))
            tokens = [r.tokens for r in results]
        decode_seconds = (time.perf_counter() - started) / len(items)
        for start in range(0, len(items), self.together):
            rows = range(len(items))[start : start + self.together]
            needed = [row for row in rows if job.indices[row] in missing]
            if not needed:
                continue
            waves, texts, seconds = self._voiced(
                [tokens[row] for row in rows], [items[row] for row in rows]
            )
            for row in needed:
                facts: Record = {
                    "hypothesis": texts[row - start],
                    "tokens": tokens[row],
                    "seconds": {"decode": decode_seconds, **seconds},
                }
                if results is not None:
                    facts |= _facts(results[row])
                wave, rate = waves[row - start], self.tools.vocoder.sample_rate
                self._finish(job, job.indices[row], wave, rate, facts)
                progress(1)

    def _voiced(
        self, tokens: Sequence[Sequence[int]], items: Sequence[PromptItem]
    ) -> tuple[list[np.ndarray], list[str], dict[str, float]]:
        """Return waveforms and transcripts of tokens, and the seconds that both took an
        utterance."""
        started = time.perf_counter()
        waves = voice(
            self.tools.vocoder,
            tokens,
            [item.speaker_embedding for item in items],
            [item.text for item in items],
            self.together,
        )
        voiced = time.perf_counter()
        texts = transcripts(self.tools.recognizer, waves, self.tools.vocoder.sample_rate)
        seconds = {
            "vocoder": (voiced - started) / len(items),
            "recognizer": (time.perf_counter() - voiced) / len(items),
        }
        return waves, texts, seconds

    def _finish(self, job: Job, index: int, wave: np.ndarray, rate: int, facts: Record) -> None:
        """Score a waveform [samples] and store its record. facts: its transcript and everything
        else that is known of it."""
        item = self.items[index]
        record: Record = {
            "version": RECORD_VERSION,
            "method": job.method,
            "settings": self.entries[job.method].settings if job.method in self.entries else None,
            "seed": job.seed,
            "id": item.utterance_id,
            "fingerprint": self.fingerprint(job.method, index),
            "text": item.text,
            "recognizer": self.tools.recognizer.name,
            "duration": len(wave) / rate,
            "reference_duration": item.duration,
            **facts,
        }
        record = scored(record)
        if self.tools.scorers:
            record["scores"] = {
                n: s(wave, rate, item.speaker_embedding) for n, s in self.tools.scorers.items()
            }
        if self.keeps_audio(job.seed, index) and len(wave):
            save_opus(self.audio_path(job.method, index), wave, rate)
        self.store.append(record)
        self.done[job.method, job.seed, item.utterance_id] = record


def _facts(result: DecodeResult) -> Record:
    """Return what a record keeps of decoding."""
    return {
        "truncated": result.truncated,
        "passes": result.passes,
        "draft_passes": result.draft_passes,
        "proposed": result.proposed,
        "accepted": result.accepted,
        "emitted": result.emitted,
        "sizes": result.sizes,
    }


def save_opus(path: Path, wave: np.ndarray, rate: int) -> None:
    """Write Ogg Opus, resampled to 24 kHz if Opus does not support the rate."""
    if rate not in OPUS_RATES:
        wave, rate = resample(wave, rate, 24_000), 24_000
    save_audio(path, np.clip(wave, -1.0, 1.0), rate)


def scored(record: Record) -> Record:
    """Return the record with the errors of its transcript by the current normaliser; unchanged
    if it has them already."""
    if record.get("normalizer") == NORMALIZER:
        return record
    text, hypothesis = record["text"], record["hypothesis"]
    return {
        **record,
        "normalizer": NORMALIZER,
        "words": list(astuple(word_errors(text, hypothesis))[:4]),
        "characters": list(astuple(character_errors(text, hypothesis))[:4]),
    }


def errors_of(record: Record, of: str = "words") -> WordErrors:
    """Return the errors of a record, of its words or its characters."""
    return WordErrors(*record[of])


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
