"""`dcar analyse what=vocoder`: measure the words and voices that tokens and vocoder lose, before
any decoder adds errors of its own.

    dcar analyse what=vocoder data=runs/prepared vocoder=runs/vocoder/export \\
        split=test out=runs/vocoder_quality

The split's recordings are transcribed (`limit` of them, drawn by `seed`), and so are their own
tokens, synthesised by the vocoder in the voice of another utterance of the speaker. A resynthesis
has the right voice if its speaker embedding is nearest to that voice's mean embedding over its
recordings: among the voices of this split, and among all voices of the corpus. The shipped voices
of the test split are in no training data, so there the first is the share of unseen voices that are
reproduced.

The vocoder gets the voice from the same encoder, and may have been trained to please it
(`voice_weight`): then these shares flatter it.

If there is only one voice to choose from, as in a corpus of one speaker, the right one cannot be
missed: those shares are null (– in the table), and only the similarity to the voice's mean
embedding remains.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dcar.config import load_config, save_config
from dcar.config.commands import PromptSettings, RunSettings, SeedSettings, SpeechSettings
from dcar.errors import DataError
from dcar.prepare.prepared import load_prepared, load_split, prepared_info
from dcar.process import own_device, run_claimed
from dcar.progress import Progress
from dcar.prompts.choose import drawn
from dcar.prompts.chooser import with_prompts
from dcar.prompts.items import make_prompts
from dcar.prompts.load import corpus_recordings
from dcar.recognition.base import transcripts
from dcar.recognition.load import load_recognizer
from dcar.text.bootstrap import corpus_interval
from dcar.text.wer import character_errors, corpus_wer, word_errors
from dcar.tracking import provenance, write_json
from dcar.vocoder.base import check_speaks
from dcar.vocoder.load import load_vocoder
from dcar.vocoder.voicing import voice
from dcar.voices.encoder import SpeakerEncoder
from dcar.voices.features import EMBEDDING_DIM


@dataclass
class VocoderQualityConfig(SeedSettings, RunSettings, SpeechSettings, PromptSettings):
    """Settings of `dcar analyse what=vocoder`."""

    out: str = "runs/vocoder_quality"


@dataclass
class Heard:
    """Transcript of a waveform, None without one, and its wrong words."""

    transcript: str | None
    errors: int


@dataclass
class Quality:
    """Rates of all waveforms of one kind. wer_ci: None for few utterances; right_voice: share that
    is nearest to its own voice of those in this split, None if there is one; right_voice_of_corpus:
    of all voices; similarity: mean cosine with the own voice."""

    wer: float
    wer_ci: list[float] | None
    cer: float
    right_voice: float | None
    right_voice_of_corpus: float | None
    similarity: float


@dataclass
class HeardUtterance:
    id: str
    text: str
    recording: Heard
    resynthesised: Heard


@dataclass
class VocoderQuality:
    """The content of vocoder_quality.json. voices: speakers of the n utterances."""

    n: int
    voices: int
    voices_of_corpus: int
    recording: Quality
    resynthesised: Quality
    recognizer: str
    utterances: list[HeardUtterance]


def nearest_voice(
    embeddings: np.ndarray, voices: dict[str, np.ndarray], names: Sequence[str]
) -> list[str]:
    """Return the name whose mean embedding in `voices` has the largest cosine, for each of the
    unit-norm embeddings [N, D]."""
    means = np.stack([voices[name] / np.linalg.norm(voices[name]) for name in names])
    return [names[i] for i in (embeddings @ means.T).argmax(1)]


def _voices(data: str) -> dict[str, np.ndarray]:
    """Return the mean embedding of every speaker over its recordings in all splits."""
    by_speaker: dict[str, list[Any]] = {}
    for split in prepared_info(data).counts:
        rows = load_prepared(data, split)
        for name, features in zip(rows["speaker"], rows["voice"], strict=True):
            by_speaker.setdefault(name, []).append(features[:EMBEDDING_DIM])
    return {
        name: np.mean(np.asarray(rows, np.float64), axis=0) for name, rows in by_speaker.items()
    }


def run(config: VocoderQualityConfig) -> VocoderQuality:
    """Measure and write vocoder_quality.json and config.yaml into `config.out`. Raises DataError
    for an empty split."""
    split = load_split(config.data, config.split)
    split = with_prompts(split, f"{config.data}: split {config.split}")
    rows = np.sort(drawn(split, config.seed, config.limit))
    items = make_prompts(split, config.prompt_tokens, config.seed, rows=rows)
    if not items:
        raise DataError(f"{config.data}: split {config.split} has no utterances")
    recording, device = corpus_recordings(config.data), own_device(config.device)
    recognizer, encoder = load_recognizer(config.recognizer, device), SpeakerEncoder(device)
    vocoder = load_vocoder(config.vocoder, device)
    check_speaks(vocoder, prepared_info(config.data).tokenizer)
    texts = [item.text for item in items]
    voices = _voices(config.data)
    here = sorted({item.speaker for item in items})
    own = np.stack([voices[item.speaker] / np.linalg.norm(voices[item.speaker]) for item in items])
    size = config.batch_size

    def measure(name: str, waves: list[np.ndarray], rate: int) -> tuple[list[Heard], Quality]:
        languages = [item.language for item in items]
        heard = transcripts(recognizer, waves, rate, languages)
        errors = [word_errors(*pair) for pair in zip(texts, heard, languages, strict=True)]
        characters = [character_errors(*pair) for pair in zip(texts, heard, languages, strict=True)]
        embeddings = np.concatenate(
            [
                encoder.embed_all(batch := waves[start : start + size], [rate] * len(batch))
                for start in Progress(range(0, len(waves), size), desc=f"voices of {name}")
            ]
        )

        def right(names: list[str]) -> float | None:
            nearest = nearest_voice(embeddings, voices, names)
            hits = [name == item.speaker for name, item in zip(nearest, items, strict=True)]
            return float(np.mean(hits)) if len(names) > 1 else None

        interval = corpus_interval([e.errors for e in errors], [e.reference_words for e in errors])
        measured = [Heard(words, e.errors) for words, e in zip(heard, errors, strict=True)]
        return measured, Quality(
            wer=corpus_wer(errors).wer,
            wer_ci=interval.ends,
            cer=corpus_wer(characters).wer,
            right_voice=right(here),
            right_voice_of_corpus=right(sorted(voices)),
            similarity=float((embeddings * own).sum(1).mean()),
        )

    recordings = [recording(item.utterance_id) for item in items]
    if len({rate for _, rate in recordings}) != 1:
        raise DataError(
            f"{config.data}: recordings of several rates; prepare a corpus of one rate to measure "
            "against"
        )
    heard, recorded = measure("recording", [wave for wave, _ in recordings], recordings[0][1])
    spoken = voice(
        vocoder,
        [item.reference_tokens for item in items],
        [item.speaker_embedding for item in items],
        texts,
        size,
        f"synthesise with {config.vocoder}",
    )
    heard_again, resynthesised = measure("resynthesised", spoken, int(vocoder.sample_rate))
    result = VocoderQuality(
        n=len(items),
        voices=len(here),
        voices_of_corpus=len(voices),
        recording=recorded,
        resynthesised=resynthesised,
        recognizer=config.recognizer,
        utterances=[
            HeardUtterance(item.utterance_id, item.text, *pair)
            for item, *pair in zip(items, heard, heard_again, strict=True)
        ],
    )
    about = provenance(vocoder=config.vocoder, data=config.data, split=config.split)
    out = Path(config.out)
    write_json(out / "vocoder_quality.json", {**asdict(result), "provenance": about})
    save_config(config, out / "config.yaml")
    return result


def table(result: VocoderQuality) -> str:
    lines = [
        f"{result.n} utterances, {result.voices} voices; recogniser {result.recognizer}",
        f"{'':14} {'WER %':>6} {'95 %':>11} {'CER %':>6} {'right voice %: here':>20} {'of all':>7} "
        f"{'similarity':>11}",
    ]
    for name, row in (("recording", result.recording), ("resynthesised", result.resynthesised)):
        ends = "–".join(f"{100 * end:.1f}" for end in row.wer_ci or ())
        here, of_all = (
            "–" if share is None else f"{100 * share:.1f}"
            for share in (row.right_voice, row.right_voice_of_corpus)
        )
        lines.append(
            f"{name:14} {100 * row.wer:6.1f} {ends or '–':>11} {100 * row.cer:6.1f} {here:>20} "
            f"{of_all:>7} {row.similarity:11.3f}"
        )
    return "\n".join(lines)


CONFIG = VocoderQualityConfig


def main(arguments: Sequence[str] | None = None) -> None:
    print(table(run_claimed(run, load_config(CONFIG, arguments))))
