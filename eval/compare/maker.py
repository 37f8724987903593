"""Records of a comparison: decode, synthesise, transcribe, score.

A transcript may depend on the last bits of a waveform, and those on the batch. On a CPU, utterances
are therefore synthesised and transcribed one at a time, and a transcript is a function of tokens
and voice, whatever the method, the batch or an earlier run. On a GPU this is done in batches of
VOICED_TOGETHER utterances, the same ones in every run.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dcar.audio import OPUS_RATES, resample, save_audio
from dcar.decoding import DecodeResult
from dcar.methods import Entry
from dcar.prompts.items import PromptItem
from dcar.recognition.base import transcripts
from dcar.storage import digest_of
from dcar.text.languages import language_of
from dcar.text.wer import character_errors, word_errors
from dcar.vocoder.voicing import voice
from eval.compare.plan import BatchJob, name_of
from eval.compare.tools import Tools
from eval.results.store import RecordStore, described
from eval.results.types import RECORD_VERSION, RECORDING, RESYNTHESIS, Decoded, Record

VOICED_TOGETHER = 16
"""Number of utterances of a job that a GPU synthesises and transcribes together."""


class Maker:
    """Producer of the missing records of jobs."""

    def __init__(self, tools: Tools, out: Path, store: RecordStore):
        self.tools, self.out, self.store = tools, out, store
        on_cpu = next(tools.models.decoder.parameters()).device.type == "cpu"
        self.together = 1 if on_cpu else VOICED_TOGETHER
        self._common = digest_of([RECORD_VERSION, tools.identity, tools.recognizer.name])
        # computed once for each: an utterance is asked for by every method and seed
        self._method = cache(_digest_of_method)
        self._items: dict[int, str] = {}

    def fingerprint(self, row: Entry | str, item: PromptItem) -> str:
        """Return a digest of everything that a record depends on besides its seed and its
        normaliser."""
        if id(item) not in self._items:
            self._items[id(item)] = digest_of(described(item))
        method = row if isinstance(row, str) else self._method(row)
        return digest_of([method, self._items[id(item)], self._common])[:16]

    def audio_path(self, method: str, item: PromptItem, fingerprint: str) -> Path:
        """Return where the audio of a record is kept."""
        slug = "".join(c if c.isalnum() or c in "-@" else "-" for c in method)
        name = hashlib.sha256(item.utterance_id.encode()).hexdigest()[:8]
        return self.out / "audio" / f"{name}-{slug}-{fingerprint}.opus"

    def record(self, row: Entry | str, seed: int, item: PromptItem) -> Record | None:
        """Return the finished record of an utterance, with all scores; None if there is none."""
        record = self.store.records.get((self.fingerprint(row, item), seed))
        if record is None or not self.tools.scorers.keys() <= record.scores.keys():
            return None
        return record

    def _finished(self, job: BatchJob, item: PromptItem) -> bool:
        """Return whether there is a record, and its audio if that is to be kept."""
        record = self.record(job.row, job.seed, item)
        if record is None or not record.duration or item.utterance_id not in job.heard:
            return record is not None
        return self.audio_path(record.method, item, record.fingerprint).exists()

    def run(self, job: BatchJob, progress: Callable[[int], Any]) -> None:
        """Make the job's missing records. progress: called with the number of further records
        that exist."""
        missing = [i for i, item in enumerate(job.items) if not self._finished(job, item)]
        progress(len(job.items) - len(missing))
        if not missing:
            return
        if job.row == RECORDING:
            for i in missing:
                self._transcribe_recording(job, job.items[i])
                progress(1)
            return
        # The whole batch is decoded even if only a part is missing, so that tensors and tokens are
        # always the same.
        tokens, decoded, seconds = self._decode(job)
        for start in range(0, len(job.items), self.together):
            rows = range(len(job.items))[start : start + self.together]
            if not set(rows) & set(missing):
                continue
            waves, texts, spent = self._voice(
                [tokens[row] for row in rows], [job.items[row] for row in rows]
            )
            for row in set(rows) & set(missing):
                self._finish(
                    job,
                    job.items[row],
                    waves[row - start],
                    self.tools.vocoder.sample_rate,
                    texts[row - start],
                    {"decode": seconds, **spent},
                    tokens[row],
                    decoded[row],
                )
                progress(1)

    def _decode(self, job: BatchJob) -> tuple[list[list[int]], Sequence[Decoded | None], float]:
        """Return the tokens of a job's utterances, how they were decoded, and the seconds that this
        took an utterance."""
        if job.row == RESYNTHESIS:
            return [list(i.reference_tokens) for i in job.items], [None] * len(job.items), 0.0
        assert isinstance(job.row, Entry)
        started = time.perf_counter()
        results = job.row.decode(job.items, job.seed, len(job.items))
        seconds = (time.perf_counter() - started) / len(results)
        return [r.tokens for r in results], list(map(_decoded, results)), seconds

    def _voice(
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
        texts = transcripts(
            self.tools.recognizer,
            waves,
            self.tools.vocoder.sample_rate,
            [item.language for item in items],
        )
        seconds = {
            "vocoder": (voiced - started) / len(items),
            "recognizer": (time.perf_counter() - voiced) / len(items),
        }
        return waves, texts, seconds

    def _transcribe_recording(self, job: BatchJob, item: PromptItem) -> None:
        assert self.tools.recording is not None
        wave, rate = self.tools.recording(item.utterance_id)
        started = time.perf_counter()
        [text] = transcripts(self.tools.recognizer, [wave], rate, [item.language])
        seconds = {"recognizer": time.perf_counter() - started}
        self._finish(job, item, wave, rate, text, seconds)

    def _finish(
        self,
        job: BatchJob,
        item: PromptItem,
        wave: np.ndarray,
        rate: int,
        hypothesis: str,
        seconds: dict[str, float],
        tokens: Sequence[int] = (),
        decoded: Decoded | None = None,
    ) -> None:
        """Score a waveform [samples], keep its audio if it is to be heard, and store its record."""
        fingerprint, name = self.fingerprint(job.row, item), name_of(job.row)
        record = Record(
            version=RECORD_VERSION,
            fingerprint=fingerprint,
            method=name,
            spec=None if isinstance(job.row, str) else job.row.settings,
            seed=job.seed,
            id=item.utterance_id,
            text=item.text,
            recognizer=self.tools.recognizer.name,
            hypothesis=hypothesis,
            duration=len(wave) / rate,
            reference_duration=item.duration,
            normalizer=language_of(item.language).normalizer,
            words=word_errors(item.text, hypothesis, item.language),
            characters=character_errors(item.text, hypothesis, item.language),
            language=item.language,
            tokens=list(tokens),
            decoded=decoded,
            scores={
                n: s(wave, rate, item.speaker_embedding) for n, s in self.tools.scorers.items()
            },
            seconds=seconds,
        )
        if item.utterance_id in job.heard and len(wave):
            save_opus(self.audio_path(name, item, fingerprint), wave, rate)
        self.store.append(record)


def _digest_of_method(entry: Entry) -> str:
    return digest_of([entry.name, dict(entry.identity), asdict(entry.sampling)])


def _decoded(result: DecodeResult) -> Decoded:
    return Decoded(
        truncated=bool(result.truncated),
        passes=result.passes,
        draft_passes=result.draft_passes,
        proposed=result.proposed,
        accepted=result.accepted,
        emitted=result.emitted,
        sizes=result.sizes,
    )


def save_opus(path: Path, wave: np.ndarray, rate: int) -> None:
    """Write Ogg Opus, resampled to 24 kHz if Opus does not support the rate."""
    if rate not in OPUS_RATES:
        wave, rate = resample(wave, rate, 24_000), 24_000
    save_audio(path, np.clip(wave, -1.0, 1.0), rate)
