"""Train the shipped recogniser of audio: CTC over characters on the states of a frozen speech
encoder.

    dcar prepare mode=resynthesize data=starter split=train out=runs/resynthesis batch_size=16
    dcar prepare mode=resynthesize data=starter split=dev out=runs/resynthesis
    python -m launch.starter.train_recognizer train_manifest=runs/resynthesis/train.jsonl \\
      dev_manifest=runs/resynthesis/dev.jsonl out=runs/recognizer

The recogniser provides the rewards `wer`, `cer` and `log_likelihood` of stage two, so it is trained
on resynthesised speech; `make_models.sh` also adds every sentence in another voice. The default
settings are those of the shipped recogniser, which took a quarter of an hour for the encoder and
half an hour for the training on one core. The encoder runs once: its states are kept in out/states
(184 MB per hour of speech) until the training has ended. The folder `out` then holds weights,
config.json, config.yaml, README.md, log.jsonl, provenance.json and checkpoints. The same command
resumes from the existing states and the last checkpoint.
"""

import hashlib
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.config import load_config, setting
from dcar.corpus.read import load_corpus
from dcar.errors import DataError
from dcar.model.cards import model_card
from dcar.process import run_claimed, run_command
from dcar.progress import Progress
from dcar.recognition.ctc import frames_needed, likelihood, spelled
from dcar.recognition.encoder import (
    BLANK,
    ENCODER,
    FRAME_SECONDS,
    TAIL_SECONDS,
    EncoderRecognizer,
    EncoderRecognizerConfig,
    encoder_states,
    state_count,
)
from dcar.storage import digest, replacing, writing
from dcar.text.languages import DEFAULT, language_of
from dcar.text.wer import word_errors
from dcar.tokens.whisper import WhisperEncoder
from dcar.train.checkpoints import last_of
from dcar.train.small import CTCTexts, CTCTrainer, SmallSettings, hidden_spans

logger = logging.getLogger(__name__)

SHARD = 256
"""Number of utterances whose states are in one file."""


@dataclass(kw_only=True)
class TrainEncoderRecognizerConfig(SmallSettings):
    """Settings of the training."""

    train_manifest: str = setting(
        meaning="JSONL manifest of the training speech (`dcar prepare mode=resynthesize`).",
        place="file",
    )
    dev_manifest: str = setting(
        meaning="JSONL manifest of held-out speech; its WER is reported.", place="file"
    )
    out: str = "runs/recognizer"
    max_steps: int = 2000
    warmup_steps: int = 200
    dropout: float = setting(
        0.1, "Share of the states' values set to 0 in training.", minimum=0, below=1
    )
    longest_span: int = setting(
        15, "Longest hidden span, in states; one span per 60 states; 0 = none.", minimum=0
    )
    eval_steps: int = 400
    save_steps: int = 400
    bf16: bool = True  # ten times slower on processors without instructions for it
    half_weights: bool = True
    model: EncoderRecognizerConfig = setting(EncoderRecognizerConfig, "Shape of the model.")


@dataclass(frozen=True)
class Recording:
    """Utterance in memory: samples [n] int16 at 16 kHz and the words as they are pronounced."""

    wave: np.ndarray
    text: str

    def samples(self) -> np.ndarray:
        """Return the waveform as recognisers take it, [n] float32 in −1 … 1."""
        return self.wave.astype(np.float32) / 32768


def load_recordings(manifest: str) -> list[Recording]:
    """Read a corpus of kind jsonl into memory (115 MB per hour).

    Utterances whose audio is too short to align with their text are left out with a warning. Raises
    DataError and AudioError, naming file and line, for a row that cannot be used.
    """
    recordings = []
    for u in load_corpus("jsonl", manifest):
        if not (text := language_of(DEFAULT).words(u.text)):
            raise DataError(f"{u.source}: the text {u.text!r} has no words; remove the line")
        wave, _ = u.load(ENCODER_SAMPLE_RATE)
        seconds = len(wave) / ENCODER_SAMPLE_RATE
        if frames_needed(text) * FRAME_SECONDS > seconds:
            logger.warning("%s: %.2f s are too short for %r; left out", u.source, seconds, text)
            continue
        recordings.append(Recording((np.clip(wave, -1, 1) * 32767).astype(np.int16), text))
    return recordings


def kept_states(recordings: Sequence[Recording], folder: Path) -> list[np.ndarray]:
    """Return the encoder's states [T, 512] float16 of every recording. They are read from files
    in `folder`; missing files are made first, so a stopped run resumes from those that exist."""
    encoder = WhisperEncoder(TAIL_SECONDS)
    states: list[np.ndarray] = []
    for start in Progress(
        range(0, len(recordings), SHARD), desc="encoder", unit=f"{SHARD} utterances"
    ):
        shard = recordings[start : start + SHARD]
        path = folder / f"{_identity(shard)}.npy"
        if not path.is_file():
            waves = [recording.samples() for recording in shard]
            hidden = torch.cat(encoder_states(encoder, waves, ENCODER_SAMPLE_RATE)).half().cpu()
            with writing(path, hidden.nbytes), replacing(path) as part, part.open("wb") as file:
                np.save(file, hidden.numpy())
        ends = np.cumsum([state_count(len(r.wave)) for r in shard])
        states += np.split(np.load(path, mmap_mode="r"), ends[:-1])
    return states


def _identity(recordings: Sequence[Recording]) -> str:
    name = hashlib.sha256(ENCODER.encode())
    for recording in recordings:
        name.update(len(recording.wave).to_bytes(8, "little"))
        name.update(recording.wave.data)
    return name.hexdigest()[:32]


class StateTexts(CTCTexts):
    """Encoder states and characters of the utterances of a manifest."""

    def __init__(
        self,
        recordings: Sequence[Recording],
        states: Sequence[np.ndarray],
        config: TrainEncoderRecognizerConfig,
    ):
        texts = [r.text for r in recordings]
        symbols = [
            [1 + place for place in spelled(text, config.model.alphabet, "the alphabet")]
            for text in texts
        ]
        super().__init__(config, states, symbols, texts, [len(s) for s in states])

    def changed(self, frames: Any, rng: np.random.Generator) -> np.ndarray:
        """Return states [T, 512] float32 with some spans and a share of the other values set to
        0."""
        states, dropout = frames.astype(np.float32), self.config.dropout
        for span in hidden_spans(len(states), self.config.longest_span, rng):
            states[span] = 0
        if dropout:
            states *= (rng.random(states.shape, np.float32) >= dropout) / np.float32(1 - dropout)
        return states


class EncoderRecognizerTrainer(CTCTrainer):
    """Trainer whose dev metric is the word error rate."""

    model: EncoderRecognizer
    what = "an encoder recogniser"

    def count(self, dev: StateTexts, mine: list[int]) -> tuple[float, float, float, float]:
        sums, device = np.zeros(4), self.args.device
        for index in mine:
            states = torch.from_numpy(dev.frames[index].astype(np.float32)).to(device)
            log_probs = self.model.frames(states[None], torch.tensor([len(states)], device=device))[
                0
            ].cpu()
            wrong = word_errors(dev.texts[index], self.model.read(log_probs))
            nats = -likelihood(log_probs, dev.symbols[index], BLANK)
            sums += (nats, len(dev.texts[index]), wrong.errors, wrong.reference_words)
        nats, characters, errors, words = sums.tolist()
        return nats, characters, errors, words


def run(config: TrainEncoderRecognizerConfig) -> EncoderRecognizer:
    """Train (or resume) and save the recogniser with its card, log and provenance in `config.out`.

    Raises DataError or AudioError for a manifest that is missing or broken, and CheckpointError if
    `out` holds another run.
    """
    last = last_of(config, EncoderRecognizer.load_config, config.model, "recogniser")
    train, dev = (load_recordings(path) for path in (config.train_manifest, config.dev_manifest))
    hours = sum(len(r.wave) for r in train) / ENCODER_SAMPLE_RATE / 3600
    kept = Path(config.out) / "states"
    sets = [
        StateTexts(recordings, kept_states(recordings, kept), config) for recordings in (train, dev)
    ]
    utterances = len(train)
    del train, dev  # free the waveforms, 115 MB per hour
    torch.manual_seed(config.seed)
    model = EncoderRecognizer(config.model)
    trainer = EncoderRecognizerTrainer(config, model, *sets)
    data = {
        "train": Path(config.train_manifest).name,
        "dev": Path(config.dev_manifest).name,
        "digests": [digest(Path(path)) for path in (config.train_manifest, config.dev_manifest)],
        "train_hours": round(hours, 3),
        "train_utterances": utterances,
        "normalizer": language_of(DEFAULT).normalizer,
    }
    return trainer.make(
        last,
        config,
        encoder_recognizer_card,
        {"data": data},
        finished=lambda: shutil.rmtree(kept),
        data=data,
    )


def encoder_recognizer_card(recognizer: EncoderRecognizer, source: Mapping[str, Any]) -> str:
    """Return the text of README.md for an encoder recogniser."""
    config, data = recognizer.config, source["data"]
    return model_card(
        "Encoder recogniser",
        "Words from the states of whisper-base's frozen encoder, by CTC over characters: the "
        "reward recogniser of stage two, trained on the speech of a vocoder. Do not evaluate "
        "with it what was trained with its rewards.",
        [
            (
                "size",
                f"{sum(p.numel() for p in recognizer.parameters()):,} parameters, "
                f"{len(config.dilations)} layers, width {config.hidden_size}, in addition to the "
                "encoder's",
            ),
            ("encoder", config.encoder),
            (
                "output",
                f"{len(config.alphabet)} characters and blank, one frame each "
                f"{1000 * FRAME_SECONDS:.0f} ms",
            ),
            (
                "training speech",
                f"{data['train_hours']} h, {data['train_utterances']} utterances, "
                f"`{data['train']}`",
            ),
            ("checksum", f"`{recognizer.checksum()}`"),
        ],
        source,
        metrics_of=f"dev manifest; loss in nats per character, {data['normalizer']}",
        tags=("ctc",),
        settings=(
            "learning_rate per_device_train_batch_size max_steps dropout longest_span bf16 seed"
        ).split(),
        code="from dcar.recognition.load import load_recognizer\n\n"
        'recognizer = load_recognizer("encoder:path/to/this/directory")\n'
        "print(recognizer.transcribe([wave], sample_rate))  # wave: float32, mono",
    )


CONFIG = TrainEncoderRecognizerConfig


def main(arguments: list[str] | None = None) -> None:
    run_claimed(run, load_config(CONFIG, arguments), resumes=True)


if __name__ == "__main__":
    sys.exit(run_command("launch.starter.train_recognizer", main))
