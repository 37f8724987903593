"""`dcar train-recognizer`: fine-tune a CTC or transducer model of NeMo on speech of one's own.

    dcar train-recognizer init_from=stt_en_fastconformer_transducer_large train_manifest=train.jsonl \
      dev_manifest=dev.jsonl out=runs/recognizer.nemo

The model is restored and saved by NeMo. The loop is plain torch: the model's own pass (SpecAugment with it) and
loss, AdamW with one cosine, batches of similar length, other playing speeds. Manifests: dcar/recognition/manifest.py;
`dcar prepare mode=resynthesize` writes one. The result is used as `recognizer=nemo:FILE.nemo`.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.config import check, load_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import CheckpointError, ConfigError
from dcar.optim import adamw
from dcar.recognition.base import Recognizer
from dcar.recognition.ctc import frames_needed
from dcar.recognition.manifest import Recording, load_manifest
from dcar.recognition.nemo import frame_seconds, load_nemo, quiet_nemo, recognizer_of, restore_nemo, text_symbols
from dcar.storage import replacing
from dcar.text.wer import WERScore, score_corpus
from dcar.tracking import write_json

logger = logging.getLogger(__name__)


@dataclass
class TrainRecognizerConfig:
    """Settings of `dcar train-recognizer`."""

    train_manifest: str = setting(meaning="JSONL manifest of the training speech.", place="file")
    dev_manifest: str = setting(meaning="JSONL manifest of held-out speech; its WER is reported.", place="file")
    out: str = setting(meaning="The .nemo file to write; a card (.md) and metrics (.json) go beside it.", place="file")
    init_from: str = setting(meaning="The model to go on from: a .nemo file, or a name that NeMo can download.")
    batch_seconds: float = setting(240.0, "Padded audio in one batch, in seconds.", above=0)
    learning_rate: float = setting(2e-4, "Peak learning rate of AdamW.", above=0)
    weight_decay: float = setting(1e-2, "Weight decay of matrices.", minimum=0)
    warmup_share: float = setting(0.05, "Share of the run in which the rate rises linearly.", minimum=0, maximum=1)
    max_steps: int = setting(20_000, "Optimiser steps; the cosine ends there.", minimum=1)
    max_minutes: float | None = setting(
        None, "Wall-clock budget; the cosine ends at whichever of the two ends first.", above=0)
    speeds: list[float] = setting([0.9, 1.0, 1.1], "Playing speeds drawn for each training utterance.", above=0)
    bf16: bool = setting(False, "bfloat16 autocast (CUDA, or CPUs that are fast at it).")
    half_weights: bool = setting(True, "Store matrices in float16: half the file, the same WER; restored as float32.")
    device: str = setting("auto", "cpu, cuda, or auto.")
    eval_minutes: float = setting(3.0, "Minutes between WER checks on (part of) the dev set.", minimum=0)
    seed: int = seed_setting(0, "Seed of batches, dropout and augmentation.")

    def __post_init__(self) -> None:
        check(self)
        if not self.speeds:
            raise ConfigError("speeds must name at least one speed")
        if not self.out.endswith(".nemo"):
            raise ConfigError(f"out {self.out}: must end in .nemo")


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Padded, on the CPU: waves [B, samples] float32, samples [B], texts [B, symbols] int64, symbols [B]."""


class Batches:
    """Endless batches of similar length, shuffled, at random speeds; a pure function of (seed, epoch, place)."""

    def __init__(self, recordings: list[Recording], model: Any, config: TrainRecognizerConfig) -> None:
        self.recordings, self.config, self.frame = recordings, config, frame_seconds(model)
        self.texts = [torch.tensor(text_symbols(model, r.text)) for r in recordings]

    def plan(self, epoch: int) -> list[list[int]]:
        """Indices of the batches of one epoch: neighbours in (jittered) length, in random order."""
        rng = np.random.default_rng((self.config.seed, epoch))
        lengths = np.array([len(r.wave) for r in self.recordings]) / ENCODER_SAMPLE_RATE / min(self.config.speeds)
        batches: list[list[int]] = [[]]
        for index in np.argsort(lengths * rng.uniform(0.95, 1.05, len(lengths))):
            longest = max([lengths[i] for i in batches[-1]] + [lengths[index]])
            if batches[-1] and longest * (len(batches[-1]) + 1) > self.config.batch_seconds:
                batches.append([])
            batches[-1].append(int(index))
        rng.shuffle(batches)
        return batches

    def make(self, epoch: int, place: int, indices: list[int]) -> Batch:
        """One batch of these recordings."""
        rng = np.random.default_rng((self.config.seed, epoch, place + 1))
        waves = [torch.from_numpy(self._at_speed(self.recordings[i], float(rng.choice(self.config.speeds))))
                 for i in indices]
        texts = [self.texts[i] for i in indices]
        return (pad_sequence(waves, batch_first=True), torch.tensor([len(w) for w in waves]),
                pad_sequence(texts, batch_first=True), torch.tensor([len(t) for t in texts]))

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """(epoch, batch) without end."""
        epoch = 0
        while True:
            for place, indices in enumerate(self.plan(epoch)):
                yield epoch, self.make(epoch, place, indices)
            epoch += 1

    def _at_speed(self, recording: Recording, speed: float) -> np.ndarray:
        wave = recording.samples()
        # too fast for its text: CTC could not align it, so it is played as it is
        seconds = len(wave) / ENCODER_SAMPLE_RATE / speed
        if speed == 1.0 or frames_needed(recording.text) * self.frame > seconds:
            return wave
        return resample(wave, ENCODER_SAMPLE_RATE * speed, ENCODER_SAMPLE_RATE)


def run(config: TrainRecognizerConfig) -> dict[str, Any]:
    """Train, save `out` (.nemo) with its card and metrics, restore it, and return its metrics on the dev set.

    Ctrl-C saves the model as it is, then ends the run. Raises ConfigError, AssetError and DataError before anything is
    written, CheckpointError where the model cannot be.
    """
    output = Path(config.out)
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(config.seed)
    model, name = restore_nemo(config.init_from, device)
    recognizer = recognizer_of(model, name, device)
    train, dev = (load_manifest(path, frame_seconds(model)) for path in (config.train_manifest, config.dev_manifest))
    hours = sum(len(r.wave) for r in train) / ENCODER_SAMPLE_RATE / 3600
    parameters = sum(p.numel() for p in model.parameters())
    logger.info("train-recognizer: %.2f M parameters, %.2f h, %d utterances, %s", parameters / 1e6, hours, len(train),
                device)
    log: list[dict[str, float]] = []
    started, interrupted = time.monotonic(), False
    try:
        steps = _optimise(model, recognizer, train, dev, config, device, log)
    except KeyboardInterrupt:
        interrupted, steps = True, int(log[-1]["step"]) if log else 0
        logger.warning("train-recognizer: interrupted; saving the model as it is")
    minutes = (time.monotonic() - started) / 60
    _save(model, output, config.half_weights)
    score = dev_wer(load_nemo(output, device), dev)
    metrics: dict[str, Any] = {
        "parameters": parameters, "train_hours": round(hours, 3), "steps": steps, "minutes": round(minutes, 2),
        "interrupted": interrupted, "dev_utterances": len(dev), "dev_wer": score.wer,
        "dev_substitutions": score.substitutions, "dev_deletions": score.deletions,
        "dev_insertions": score.insertions, "dev_reference_words": score.reference_words,
        "normalizer": score.normalizer, "log": log, "config": asdict(config),
    }
    write_json(output.with_suffix(".json"), metrics)
    output.with_suffix(".md").write_text(_card(output.stem, type(model).__name__, metrics), encoding="utf-8")
    if interrupted:
        raise KeyboardInterrupt
    return metrics


def dev_wer(recognizer: Recognizer, recordings: list[Recording]) -> WERScore:
    """Corpus WER of a recogniser on recordings in memory."""
    heard = recognizer.transcribe([r.samples() for r in recordings], ENCODER_SAMPLE_RATE)
    return score_corpus([r.text for r in recordings], list(heard))


def loss_of(model: Any, batch: Batch, device: str) -> torch.Tensor:
    """The model's own loss of a batch, CTC or transducer (of a hybrid model the transducer's)."""
    waves, samples, texts, symbols = (part.to(device) for part in batch)
    encoded, frames, *_ = model(input_signal=waves, input_signal_length=samples)
    if not hasattr(model, "joint"):
        return model.loss(log_probs=encoded.float(), targets=texts, input_lengths=frames, target_lengths=symbols)
    decoded, lengths, _ = model.decoder(targets=texts, target_length=symbols)
    if model.joint.fuse_loss_wer:
        loss, *_ = model.joint(encoder_outputs=encoded, decoder_outputs=decoded, encoder_lengths=frames,
                               transcripts=texts, transcript_lengths=symbols, compute_wer=False)
        return loss
    joint = model.joint(encoder_outputs=encoded, decoder_outputs=decoded)
    return model.loss(log_probs=joint, targets=texts, input_lengths=frames, target_lengths=lengths)


def _optimise(model: Any, recognizer: Recognizer, train: list[Recording], dev: list[Recording],
              config: TrainRecognizerConfig, device: str, log: list[dict[str, float]]) -> int:
    """The training loop; appends one record per dev check to `log`; returns the number of steps."""
    optimizer = adamw(model.parameters(), config.learning_rate, config.weight_decay)
    budget = math.inf if config.max_minutes is None else config.max_minutes * 60
    started = checked = time.monotonic()
    losses: list[torch.Tensor] = []
    model.train()
    for step, (epoch, batch) in enumerate(Batches(train, model, config)):
        now = time.monotonic()
        progress = max(step / config.max_steps, (now - started) / budget)
        if progress >= 1:
            return step
        rate = min(progress / config.warmup_share, 1.0) if config.warmup_share else 1.0
        rate *= 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * max(rate, 1e-3)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=config.bf16):
            loss = loss_of(model, batch, device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
        if torch.isfinite(norm):  # a single overflow must not poison the weights
            optimizer.step()
        losses.append(loss.detach())
        if now - checked > config.eval_minutes * 60:
            model.eval()
            record = {"step": step, "epoch": epoch, "minutes": (now - started) / 60,
                      "loss": float(torch.stack(losses).mean()), "dev_wer": dev_wer(recognizer, dev[:200]).wer}
            model.train()
            logger.info("train-recognizer: %s", json.dumps({k: round(v, 4) for k, v in record.items()}))
            log.append(record)
            losses.clear()
            checked = time.monotonic()
    raise AssertionError("the batches have no end")


def _save(model: Any, output: Path, half_weights: bool) -> None:
    """Write the `.nemo` beside its place, then rename it: it is whole or absent."""
    full = {parameter: parameter.data for parameter in model.parameters()}
    for parameter, data in full.items():
        # matrices as float16; NeMo's strict load copies them back into float32
        parameter.data = data.half() if half_weights and data.ndim >= 2 else data
    try:
        with replacing(output) as part, quiet_nemo():
            model.save_to(str(part))
    except OSError as error:
        raise CheckpointError(f"{output}: the model cannot be written ({error}); free some space") from error
    finally:
        for parameter, data in full.items():
            parameter.data = data


def _card(name: str, kind: str, metrics: dict[str, Any]) -> str:
    config, interrupted = metrics["config"], " (interrupted)" if metrics["interrupted"] else ""
    return f"""# {name}: {kind} of NeMo

Fine-tuned from `{Path(config['init_from']).name}` by `dcar train-recognizer`. Restore it with
`ASRModel.restore_from("{name}.nemo")`, or use it as `recognizer=nemo:{name}.nemo`. A reward recogniser of stage two; it
is no judge of what was trained by it. The licence of the model that it was made of applies.

| | |
| --- | --- |
| parameters | {metrics["parameters"] / 1e6:.2f} M |
| training speech | {metrics["train_hours"]} h, manifest `{Path(config["train_manifest"]).name}` |
| training | {metrics['steps']} steps in {metrics['minutes']} minutes{interrupted}, seed {config['seed']} |
| WER on the dev set | {100 * metrics['dev_wer']:.2f} % of {metrics['dev_reference_words']} words in \
{metrics["dev_utterances"]} utterances ({metrics["normalizer"]}) |
"""


def main(arguments: list[str] | None = None) -> None:
    """Command line: `[--config FILE.yaml] [key=value …]`."""
    run(load_config(TrainRecognizerConfig, arguments))
