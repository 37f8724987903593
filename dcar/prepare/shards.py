"""Token shards: utterances → checked rows of speech tokens, written whole with a checksum beside them.

A shard is one parquet file and a JSON file of the same stem, written after it, with the SHA-256, size, rows, seconds
and tokens of the parquet file. A shard without its JSON file was interrupted and is made again; one whose bytes do not
give the checksum is refused. Names come from what a shard holds, never from the process that wrote it, so processes on
several nodes need no coordination beyond a shared folder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.corpus.rows import Problem, Utterance
from dcar.errors import AudioError, DataError
from dcar.prepare.prepared import RESUME, copy_name, features, read_json
from dcar.sources.packages import file_sha256
from dcar.storage import replacing
from dcar.text.phonemes import text_to_ids
from dcar.tracking import write_json
from dcar.voices.features import speaker_features

if TYPE_CHECKING:
    import pyarrow as pa

    from dcar.tokens.base import SpeechTokenizer

logger = logging.getLogger(__name__)

EMBEDDING_SIZE = 256


class Encoder(Protocol):
    """A speaker encoder: waveform [samples] at a rate in Hz → [256]."""

    def embed(self, wave: np.ndarray, sample_rate: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Job:
    """One row of the output: an utterance at a speed."""

    utterance: Utterance
    split: str
    speed: float

    @property
    def id(self) -> str:
        return copy_name(self.utterance.id, self.speed)

    @property
    def speaker(self) -> str:
        return copy_name(self.utterance.speaker, self.speed)


class Sound(NamedTuple):
    """A waveform [samples] at its own rate in Hz, as it was recorded."""

    wave: np.ndarray
    rate: int

    def at_speed(self, speed: float) -> Sound:
        """Played `speed` times faster: as if it had been recorded at speed · rate."""
        return self if speed == 1.0 else Sound(resample(self.wave, self.rate * speed, self.rate), self.rate)

    def for_encoders(self) -> Sound:
        """At ENCODER_SAMPLE_RATE; voice features use the recording's own rate."""
        return Sound(resample(self.wave, self.rate, ENCODER_SAMPLE_RATE), ENCODER_SAMPLE_RATE)


class Loaded(NamedTuple):
    """Audio of an utterance: its own and its prompt's, if it names one."""

    sound: Sound
    prompt: Sound | None


class Contents(NamedTuple):
    """What a chunk of the corpus holds: what is to be tokenised, by split, and what was found of its rows."""

    jobs: dict[str, list[Job]]
    loaded: dict[str, Loaded] | None = None  # recordings by `Utterance.source`, where they were decoded already
    problems: Sequence[Problem] = ()
    rows: int = 0
    filtered: int = 0


class Chunk(NamedTuple):
    """A piece of the corpus of which shards are made: name, rows, and its contents, or what reads them."""

    name: str
    rows: int
    contents: Contents | Callable[[ThreadPoolExecutor], Contents]


def tokenise(jobs: Sequence[Job], tokenizer: SpeechTokenizer, speaker_encoder: Encoder, max_seconds: float,
             batch_seconds: float, pool: ThreadPoolExecutor, bar: Any,
             loaded: Mapping[str, Loaded] | None = None) -> pa.Table:
    """The rows of one shard, in the order of `jobs`; audio goes through the tokenizer in batches of similar length.

    loaded: recordings by `Utterance.source`, where they were decoded already; else they are read here.
    """
    import pyarrow as pa

    def sounds_of(job: Job) -> tuple[Sound, np.ndarray]:
        """The recording at the job's speed, and its waveform [samples] for encoders."""
        sound = Sound(*job.utterance.load()) if loaded is None else loaded[job.utterance.source].sound
        return sound.at_speed(job.speed), sound.for_encoders().at_speed(job.speed).wave

    def prompt_of(job: Job) -> Sound | None:
        if loaded is not None:
            return loaded[job.utterance.source].prompt
        prompt = job.utterance.load_prompt()
        return None if prompt is None else Sound(*prompt)

    sounds, waves = map(list, zip(*pool.map(sounds_of, jobs), strict=True))
    # a slowed copy may be longer than the limit that its original keeps: it is left out
    longest = max_seconds * ENCODER_SAMPLE_RATE
    fits = [j.speed == 1.0 or len(w) <= longest for j, w in zip(jobs, waves, strict=True)]
    if not all(fits):
        logger.info("%d slowed copies are longer than %g s and left out", fits.count(False), max_seconds)
        bar.update(fits.count(False))
        waves = [w for w, fit in zip(waves, fits, strict=True) if fit]
        sounds = [sound for sound, fit in zip(sounds, fits, strict=True) if fit]
        jobs = [j for j, fit in zip(jobs, fits, strict=True) if fit]
    prompts = list(pool.map(prompt_of, jobs))
    speech = _encode(waves, [_place(j) for j in jobs], tokenizer, batch_seconds, bar)
    prompted = [i for i, p in enumerate(prompts) if p is not None]
    prompt_waves = [p.for_encoders().wave for p in prompts if p is not None]
    prompt_speech = dict(
        zip(prompted, _encode(prompt_waves, [_place(jobs[i]) + " (prompt)" for i in prompted], tokenizer,
                              batch_seconds), strict=True)
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for i, (job, sound, wave, prompt) in enumerate(zip(jobs, sounds, waves, prompts, strict=True)):
        u = job.utterance
        voice = _voice(speaker_encoder, sound, wave, _place(job))
        prompt_voice: Any = [] if prompt is None else _voice(
            speaker_encoder, prompt, prompt.for_encoders().wave, _place(job) + " (prompt)")
        rows.append(
            {
                "id": job.id, "text": u.text, "speaker": job.speaker, "text_ids": text_to_ids(u.text),
                "speech": speech[i], "voice": voice, "duration": len(wave) / ENCODER_SAMPLE_RATE, "speed": job.speed,
                "audio": u.audio if isinstance(u.audio, str) else "", "source": u.source,
                "prompt_text": u.prompt_text or "", "prompt_speech": prompt_speech.get(i, []),
                "prompt_voice": prompt_voice,
            }
        )
    return pa.Table.from_pylist(rows, schema=features(tokenizer.vocab_size).arrow_schema)


def _place(job: Job) -> str:
    return f"{job.utterance.source}: utterance {job.id}"


def _encode(waves: list[np.ndarray], places: list[str], tokenizer: SpeechTokenizer, batch_seconds: float,
            bar: Any = None) -> list[np.ndarray]:
    """Tokens of every waveform, checked, in the given order."""
    out: list[np.ndarray] = [np.empty(0, np.int64)] * len(waves)
    order = sorted(range(len(waves)), key=lambda i: len(waves[i]))
    batch: list[int] = []
    for n, i in enumerate(order):
        batch.append(i)
        last = n + 1 == len(order)
        if last or (len(batch) + 1) * len(waves[order[n + 1]]) > batch_seconds * ENCODER_SAMPLE_RATE:
            encoded = tokenizer.encode([waves[j] for j in batch], ENCODER_SAMPLE_RATE)
            if len(encoded) != len(batch):
                raise DataError(f"tokenizer {tokenizer.name} gave {len(encoded)} results for {len(batch)} waveforms")
            for j, tokens in zip(batch, encoded, strict=True):
                out[j] = check_tokens(tokens, len(waves[j]) / ENCODER_SAMPLE_RATE, tokenizer, places[j])
            if bar is not None:
                bar.update(len(batch))
            batch = []
    return out


def check_tokens(tokens: np.ndarray, seconds: float, tokenizer: SpeechTokenizer, where: str) -> np.ndarray:
    """`tokens` [T] as int64, or DataError: none, outside 0…vocab_size−1, or far from seconds · rate_hz in number.

    The last finds a tokenizer that cuts long audio or was given the wrong sample rate.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(f"{where}: tokenizer {tokenizer.name} gave {tokens.dtype} {tokens.shape}, not integers [T]")
    if len(tokens) == 0:
        raise DataError(f"{where}: tokenizer {tokenizer.name} gave no token for {seconds:.2f} s of audio")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= tokenizer.vocab_size:
        raise DataError(
            f"{where}: tokens {low}…{high} are outside the vocabulary 0…{tokenizer.vocab_size - 1} of {tokenizer.name}"
        )
    expected = seconds * tokenizer.rate_hz
    if abs(len(tokens) - expected) > 5 + 0.1 * expected:
        raise DataError(f"{where}: {len(tokens)} tokens for {seconds:.2f} s, expected about {expected:.0f} at "
                        f"{tokenizer.rate_hz:g} Hz; does {tokenizer.name} cut long audio? lower max_seconds")
    return tokens.astype(np.int64)


def _voice(speaker_encoder: Encoder, sound: Sound, wave: np.ndarray, where: str) -> np.ndarray:
    """The vocoder's voice features [298] of all that was recorded; they begin with the speaker embedding [256] of the
    waveform at ENCODER_SAMPLE_RATE."""
    embedding = np.asarray(speaker_encoder.embed(wave, ENCODER_SAMPLE_RATE), dtype=np.float32)
    if embedding.shape != (EMBEDDING_SIZE,) or not np.isfinite(embedding).all():
        raise DataError(f"{where}: speaker embedding {embedding.shape}, expected {EMBEDDING_SIZE} finite numbers")
    try:
        return speaker_features(*sound, embedding)
    except AudioError as error:
        raise AudioError(f"{where}: {error}") from error


# ------------------------------------------------------------------------------------------------------------ on disk


def write_shard(table: pa.Table, file: Path) -> dict[str, Any]:
    """Write a parquet file and then its JSON file; returns what that holds."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with replacing(file) as part:
            pq.write_table(table, part)
    except OSError as error:
        raise DataError(f"{file}: cannot be written ({error}); {RESUME}") from error
    record = {
        "file": file.name, "sha256": file_sha256(file), "bytes": file.stat().st_size, "rows": table.num_rows,
        "seconds": pc.sum(table["duration"]).as_py() or 0.0,
        "tokens": pc.sum(pc.list_value_length(table["speech"])).as_py() or 0,
    }
    write_json(file.with_suffix(".json"), record)
    return record


def shard_is_there(file: Path) -> bool:
    """Whether a shard was written whole: its JSON file is there and the parquet file has the size that it says."""
    record = read_json(file.with_suffix(".json"))
    return record is not None and file.is_file() and file.stat().st_size == record.get("bytes")


def check_shard(file: Path) -> dict[str, Any]:
    """What the shard's JSON file says; DataError, and the shard is removed, where its bytes are not those written."""
    record = read_json(file.with_suffix(".json"))
    if record is None or not file.is_file() or file_sha256(file) != record.get("sha256"):
        file.with_suffix(".json").unlink(missing_ok=True)
        raise DataError(f"{file}: the shard is damaged (its SHA-256 differs) and was discarded; run again, only this "
                        "shard is made anew")  # fmt: skip
    return record
