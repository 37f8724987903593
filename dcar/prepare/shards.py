"""Token shards: utterances → checked rows of speech tokens, and a record of every chunk.

A chunk of the corpus gives one parquet file per split, and then a JSON file: the outcome of its
rows, and the sizes of its shards. A chunk without that record, or with shards of other sizes, was
interrupted and is made again. File names depend on the content of a shard, never on the process
that wrote it, so processes on several nodes need only a shared folder.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.corpus.rows import Problem, Utterance
from dcar.corpus.texts import CorpusTexts
from dcar.errors import AudioError, DataError, TextError
from dcar.prepare.prepared import copy_name, features, names_language, read_json
from dcar.storage import file_differences, replacing, writing
from dcar.tokens.base import LayeredTokenizer, SpeechTokenizer, in_batches, input_rate
from dcar.voices.features import prompt_statistics, with_embedding
from dcar.voices.speech import find_speech

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)


class Encoder(Protocol):
    """Speaker encoder whose network input is made by the workers."""

    def windows(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        """Return windows [N, …] of a waveform [samples] at a rate in Hz."""
        ...

    def embed_windows(self, windows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the embeddings [B, 256] of the windows of B waveforms."""
        ...


class UtteranceJob(NamedTuple):
    """One row of the output: an utterance at a speed."""

    utterance: Utterance
    speed: float

    @property
    def id(self) -> str:
        return copy_name(self.utterance.id, self.speed)

    @property
    def speaker(self) -> str:
        return copy_name(self.utterance.speaker, self.speed)


Loaded = tuple[tuple[np.ndarray, int], tuple[np.ndarray, int] | None]
"""Waveform and rate of an utterance, and those of its prompt, if it has one."""


class Contents(NamedTuple):
    """Contents of a chunk of the corpus: rows to tokenise, by split, and the outcome of reading
    it."""

    jobs: dict[str, list[UtteranceJob]]
    # recordings by `Utterance.source`, if they were decoded already
    loaded: dict[str, Loaded] | None = None
    problems: Sequence[Problem] = ()
    rows: int = 0
    filtered: int = 0
    others: Mapping[str, int] = MappingProxyType({})  # rows of other splits
    strange: Sequence[str] = ()  # rows of other languages, see `CorpusTexts.others`


class CorpusPart(NamedTuple):
    """Piece of the corpus from which shards are made: name, number of rows, and its contents or
    a function that reads them."""

    name: str
    rows: int
    contents: Contents | Callable[[ThreadPoolExecutor], Contents]


@dataclass(frozen=True)
class Analysed:
    """Analysis of one recording for models and vocoder; computed in the workers, without any
    model."""

    place: str  # for messages
    wave: np.ndarray  # float32 [samples] at the tokenizer's `input_rate`
    seconds: float
    windows: np.ndarray  # input of the speaker encoder, [N, …]
    statistics: np.ndarray  # float32 [42], `prompt_statistics` of the recording at its own rate

    @classmethod
    def of(
        cls,
        place: str,
        wave: np.ndarray,
        rate: int,
        speed: float,
        input_rate: int,
        encoder: Encoder,
    ) -> Analysed:
        """Analyse a waveform [samples] and its rate in Hz, played `speed` times faster: as if it
        had been recorded at speed · rate. input_rate: of the tokenizer. Raises AudioError that
        names `place`."""
        heard = resample(wave, rate * speed, ENCODER_SAMPLE_RATE)
        tokenized = heard
        if input_rate != ENCODER_SAMPLE_RATE:
            tokenized = resample(wave, rate * speed, input_rate)
        try:
            windows = encoder.windows(heard, ENCODER_SAMPLE_RATE)
            statistics = prompt_statistics(resample(wave, rate * speed, rate), rate)
        except AudioError as error:
            raise AudioError(f"{place}: {error}") from error
        return cls(place, tokenized, len(heard) / ENCODER_SAMPLE_RATE, windows, statistics)


class AnalysedJob(NamedTuple):
    """Row of the output before the models have read it; speech is None if the row is left out."""

    job: UtteranceJob
    text_ids: list[int]
    speech: Analysed | None
    prompt: Analysed | None


def analyse(
    jobs: Sequence[UtteranceJob],
    encoder: Encoder,
    rate: int,
    max_seconds: float,
    pool: ThreadPoolExecutor,
    texts: CorpusTexts,
    loaded: Mapping[str, Loaded] | None = None,
    problems: list[Problem] | None = None,
) -> list[AnalysedJob]:
    """Read and analyse the recordings of a shard in the workers, in the order of `jobs`.

    A slowed copy of more than `max_seconds`, or with such a prompt, is left out. rate: the
    tokenizer's `input_rate`. texts: rules by which texts are read. loaded: recordings by
    `Utterance.source`, if they were decoded already. problems: list to which rows that cannot be
    analysed (speech without a voice, for example) are added, to be left out; without it, they
    raise AudioError or TextError with the row's name.
    """

    def one(job: UtteranceJob) -> AnalysedJob:
        try:
            return whole(job)
        except (AudioError, TextError) as error:
            if problems is None:
                raise
            problems.append(Problem(job.utterance.id, job.utterance.source, str(error)))
            return AnalysedJob(job, [], None, None)

    def whole(job: UtteranceJob) -> AnalysedJob:
        u = job.utterance
        place = f"{u.source}: utterance {job.id}"
        audio, prompt = (u.load(), u.load_prompt()) if loaded is None else loaded[u.source]
        speech, voice = Analysed.of(place, *audio, job.speed, rate, encoder), None
        if prompt is not None:  # at the same speed: the voice of a copy is that of another speaker
            said = find_speech(*prompt).cut(*prompt)
            voice = Analysed.of(f"{place} (prompt)", said, prompt[1], job.speed, rate, encoder)
        longest = max(speech.seconds, voice.seconds if voice else 0)
        if job.speed != 1.0 and longest > max_seconds:
            return AnalysedJob(job, [], None, None)
        return AnalysedJob(job, texts.ids(u.text), speech, voice)

    return list(pool.map(one, jobs))


def tokenise(
    analysed: Sequence[AnalysedJob],
    tokenizer: SpeechTokenizer,
    encoder: Encoder,
    batch_seconds: float,
    texts: CorpusTexts,
    residual: bool = False,
) -> pa.Table:
    """Return the rows of one shard, in the order of `analysed`; the tokenizer reads audio in
    batches of similar length.

    residual: also store the layers after the first, from a `LayeredTokenizer`. Raises DataError for
    invalid tokens or embeddings.
    """
    import pyarrow as pa

    readable = [(row, row.speech) for row in analysed if row.speech is not None]
    if left_out := len(analysed) - len(readable):
        logger.info("%d bad rows and copies longer than max_seconds are left out", left_out)
    speech = _encode([sound for _, sound in readable], tokenizer, batch_seconds, residual)
    voices = _voices([sound for _, sound in readable], encoder)
    prompts = [row.prompt for row, _ in readable if row.prompt is not None]
    prompt_speech = iter(_encode(prompts, tokenizer, batch_seconds, residual))
    prompt_voices = iter(_voices(prompts, encoder))
    rows: list[dict[str, Any]] = []
    for (row, sound), codes, voice in zip(readable, speech, voices, strict=True):
        job, u = row.job, row.job.utterance
        prompt_codes = np.empty((1, 0), np.int64) if row.prompt is None else next(prompt_speech)
        rows.append(
            {
                "id": job.id,
                "text": u.text,
                "speaker": job.speaker,
                "text_ids": row.text_ids,
                "speech": codes[0],
                "voice": voice,
                "duration": sound.seconds,
                "speed": job.speed,
                "audio": os.path.abspath(u.audio) if isinstance(u.audio, str) else "",
                "source": u.source,
                "prompt_text": u.prompt_text or "",
                "prompt_speech": prompt_codes[0],
                "prompt_voice": [] if row.prompt is None else next(prompt_voices),
                "language": u.language or texts.language,
                "prompt_text_ids": texts.ids(u.prompt_text) if u.prompt_text else [],
                "residual": codes[1:].ravel(),
                "prompt_residual": prompt_codes[1:].ravel(),
            }
        )
    columns = features(tokenizer.vocab_size, texts.size, residual, names_language(texts.units))
    return pa.Table.from_pylist(rows, schema=columns.arrow_schema)


def _encode(
    recordings: Sequence[Analysed], tokenizer: SpeechTokenizer, batch_seconds: float, residual: bool
) -> list[np.ndarray]:
    """Return tokens [1, T] of every waveform, or with `residual` codes [layers, T]; checked, in
    the given order."""
    rate = input_rate(tokenizer)

    def read(rows: list[int]) -> Iterator[np.ndarray]:
        batch = [recordings[i] for i in rows]
        waves = [sound.wave for sound in batch]
        if residual:
            assert isinstance(tokenizer, LayeredTokenizer)
            encoded = tokenizer.encode_layers(waves, rate)
        else:
            encoded = [tokens[None] for tokens in tokenizer.encode(waves, rate)]
        for sound, layers in zip(batch, encoded, strict=True):
            seconds = len(sound.wave) / rate
            yield np.stack([check_tokens(c, seconds, tokenizer, sound.place) for c in layers])

    return in_batches([len(sound.wave) for sound in recordings], batch_seconds * rate, read)


def check_tokens(
    tokens: np.ndarray, seconds: float, tokenizer: SpeechTokenizer, where: str
) -> np.ndarray:
    """Return `tokens` [T] as int64. Raises DataError if there are none, if they are outside
    0…vocab_size−1, or if their number is far from seconds · rate_hz.

    The last check detects a tokenizer that cuts long audio or was given the wrong sample rate.
    """
    tokens = np.asarray(tokens)
    if len(tokens) == 0:
        raise DataError(
            f"{where}: tokenizer {tokenizer.name} returned no token for {seconds:.2f} s of audio; "
            "remove the utterance or check the tokenizer"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= tokenizer.vocab_size:
        raise DataError(
            f"{where}: tokens {low}…{high} are outside the vocabulary 0…{tokenizer.vocab_size - 1} "
            f"of {tokenizer.name}; correct its vocab_size"
        )
    expected = seconds * tokenizer.rate_hz
    if abs(len(tokens) - expected) > 5 + 0.1 * expected:
        raise DataError(
            f"{where}: {len(tokens)} tokens for {seconds:.2f} s, expected about {expected:.0f} at "
            f"{tokenizer.rate_hz:g} Hz; if {tokenizer.name} cuts long audio, lower max_seconds"
        )
    return tokens.astype(np.int64)


def _voices(recordings: Sequence[Analysed], encoder: Encoder) -> list[np.ndarray]:
    """Return the vocoder's voice features [298] of every recording; they begin with the speaker
    embedding [256]."""
    if not recordings:
        return []
    embeddings = np.asarray(
        encoder.embed_windows([h.windows for h in recordings]), dtype=np.float32
    )
    return [with_embedding(e, h.statistics) for e, h in zip(embeddings, recordings, strict=True)]


def write_shard(table: pa.Table, file: Path) -> dict[str, Any]:
    """Write a parquet file and return its size in bytes, for the chunk's record. Raises
    StorageError if it cannot be written."""
    import pyarrow.parquet as pq

    with writing(file), replacing(file) as part:
        pq.write_table(table, part)
    return {"size": file.stat().st_size}


def read_chunk(work: Path, name: str) -> dict[str, Any] | None:
    """Return the record of a chunk, or None if the record or one of its shards is missing or
    incomplete."""
    record = read_json(work / f"chunk-{name}.json")
    if record is None or file_differences(work, record["files"], lambda path: None):
        return None
    return record
