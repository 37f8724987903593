"""`dcar train-recognizer`: a small NeMo FastConformer-CTC over characters, trained from scratch, saved as `.nemo`.

The reward of stage two needs a recogniser that is cheap (a few milliseconds per utterance on a CPU) and that knows the
sound of our own vocoder, so it is trained on resynthesised speech. The model is built and saved by NeMo and can be
restored by NeMo alone; the training loop is plain torch: `forward` and `loss`, one learning-rate cycle, length-sorted
batches, speed and SpecAugment augmentation. Where the manifest gives the speech tokens that the audio was made from, a
throw-away layer also predicts them frame by frame in the first part of the run: a dense target, which takes the long
plateau of a CTC model on two hours of speech away.

    dcar train-recognizer train_manifest=train.jsonl dev_manifest=dev.jsonl out=recognizer/starter.nemo

Manifests: dcar/recognition/manifest.py; `dcar resynthesize` writes one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.config import check, load_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import CheckpointError, ConfigError
from dcar.optim import adamw
from dcar.process import run_command
from dcar.recognition.ctc import frames_needed
from dcar.recognition.manifest import CHARACTERS, Recording, load_manifest
from dcar.recognition.nemo import NemoCTCRecognizer, nemo_models, quiet_nemo
from dcar.text.wer import WERScore, score_corpus
from dcar.tracking import write_json

logger = logging.getLogger(__name__)

TOKEN_RATE = 50
FRAME_SECONDS = 0.04
"""Output frame of the model: 10 ms features, subsampled by 4. Characters at 80 ms would not fit into fast speech."""


@dataclass
class TrainRecognizerConfig:
    """Settings of `dcar train-recognizer`."""

    train_manifest: str = setting(meaning="JSONL manifest of the training speech.", place="file")
    dev_manifest: str = setting(meaning="JSONL manifest of held-out speech; its WER is reported.", place="file")
    out: str = setting(meaning="The .nemo file to write; a card (.md) and metrics (.json) go beside it.",
                       old=("output",), place="file")
    hidden_size: int = setting(128, "Width of the Conformer layers.", minimum=1)
    num_layers: int = setting(6, "Number of Conformer layers.", minimum=1)
    num_attention_heads: int = setting(4, "Attention heads per layer.", minimum=1)
    subsampling_channels: int = setting(64, "Channels of the convolutions that subsample by 4.", minimum=1)
    dropout: float = setting(0.1, "Dropout in the encoder.", minimum=0, below=1)
    batch_seconds: float = setting(240.0, "Padded audio in one batch, in seconds.", above=0)
    learning_rate: float = setting(2e-3, "Peak learning rate of AdamW.", above=0)
    weight_decay: float = setting(1e-2, "Weight decay of matrices.", minimum=0)
    warmup_share: float = setting(0.05, "Share of the run in which the rate rises linearly.", minimum=0, maximum=1)
    max_steps: int = setting(20_000, "Optimiser steps; the cosine ends there.", minimum=1)
    max_minutes: float | None = setting(
        None, "Wall-clock budget; the cosine ends at whichever of the two ends first.", above=0
    )
    speeds: list[float] = setting([0.9, 1.0, 1.1], "Playing speeds drawn for each training utterance.", above=0)
    spec_augment: bool = setting(True, "Mask random bands of frequencies and times.")
    bf16: bool = setting(False, "bfloat16 autocast (CUDA, or CPUs that are fast at it).")
    half_weights: bool = setting(
        True, "Store matrices in float16: half the file, the same WER; restored as float32."
    )
    device: str = setting("auto", "cpu, cuda, or auto.")
    eval_minutes: float = setting(3.0, "Minutes between WER checks on (part of) the dev set.", minimum=0)
    data_threads: int = setting(2, "Threads that prepare augmented batches ahead.", minimum=1)
    token_weight: float = setting(
        1.0, "Weight of predicting the manifest's tokens; falls to 0 over token_share.", minimum=0
    )
    token_share: float = setting(0.5, "Share of the run in which tokens are predicted.", minimum=0, maximum=1)
    init_from: str = setting("", "Go on from the weights of this .nemo of the same shape.")
    seed: int = seed_setting(0, "Seed of weights, batches and augmentation.")

    def __post_init__(self) -> None:
        check(self)
        if not self.speeds:
            raise ConfigError("speeds must name at least one speed")
        if not self.out.endswith(".nemo"):
            raise ConfigError(f"out {self.out}: must end in .nemo")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(f"hidden_size {self.hidden_size} must be a multiple of num_attention_heads "
                              f"{self.num_attention_heads}")


def build_model(config: TrainRecognizerConfig) -> Any:
    """A NeMo `EncDecCTCModel` (FastConformer, 4x subsampling, 28 characters) with fresh, seeded weights."""
    with quiet_nemo():
        from omegaconf import OmegaConf

        models = nemo_models("dcar train-recognizer")

        labels = list(CHARACTERS)
        module = "nemo.collections.asr.modules."
        dataset = {"manifest_filepath": None, "labels": labels, "sample_rate": ENCODER_SAMPLE_RATE, "batch_size": 1}
        tree: dict[str, Any] = {
            "sample_rate": ENCODER_SAMPLE_RATE,
            "labels": labels,
            "log_prediction": False,
            "ctc_reduction": "mean_volume",
            "skip_nan_grad": False,
            "validation_ds": dataset | {"shuffle": False, "num_workers": 0},
            "preprocessor": {
                "_target_": module + "AudioToMelSpectrogramPreprocessor",
                "sample_rate": ENCODER_SAMPLE_RATE,
                "normalize": "per_feature",
                "window_size": 0.025,
                "window_stride": 0.01,
                "window": "hann",
                "features": 80,
                "n_fft": 512,
                "log": True,
                "frame_splicing": 1,
                "dither": 1e-5,
                "pad_to": 0,
            },
            "encoder": {
                "_target_": module + "ConformerEncoder",
                "feat_in": 80,
                "feat_out": -1,
                "n_layers": config.num_layers,
                "d_model": config.hidden_size,
                "subsampling": "dw_striding",
                "subsampling_factor": 4,
                "subsampling_conv_channels": config.subsampling_channels,
                "ff_expansion_factor": 4,
                "self_attention_model": "rel_pos",
                "n_heads": config.num_attention_heads,
                "att_context_size": [-1, -1],
                "xscaling": False,
                "untie_biases": True,
                "pos_emb_max_len": 5000,
                "conv_kernel_size": 9,
                "conv_norm_type": "batch_norm",
                "dropout": config.dropout,
                "dropout_pre_encoder": config.dropout,
                "dropout_emb": 0.0,
                "dropout_att": config.dropout,
            },
            "decoder": {
                "_target_": module + "ConvASRDecoder",
                "feat_in": config.hidden_size,
                "num_classes": len(labels),
                "vocabulary": labels,
            },
            "decoding": {"strategy": "greedy_batch"},
        }
        if config.spec_augment:
            tree["spec_augment"] = {
                "_target_": module + "SpectrogramAugmentation",
                "freq_masks": 2,
                "time_masks": 4,
                "freq_width": 20,
                "time_width": 0.05,
            }
        torch.manual_seed(config.seed)
        return models.EncDecCTCModel(OmegaConf.create(tree))


class BatchStream:
    """Endless, shuffled, length-sorted, augmented batches, prepared ahead by threads.

    Every batch is a pure function of (seed, epoch, its place), so the number of threads changes nothing.
    """

    def __init__(self, recordings: list[Recording], config: TrainRecognizerConfig) -> None:
        self.recordings = recordings
        self.config = config

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

    def make(self, epoch: int, place: int, indices: list[int]) -> tuple[torch.Tensor, ...]:
        """waves [B, samples] float32, sample counts [B], characters [B, L] int64, character counts [B], and the speech
        token in the middle of every output frame [B, frames] int64, -1 where there is none."""
        rng = np.random.default_rng((self.config.seed, epoch, place + 1))
        rows = [self.recordings[i] for i in indices]
        waves = [torch.from_numpy(self._at_speed(r, float(rng.choice(self.config.speeds)))) for r in rows]
        tokens = [torch.from_numpy(frame_tokens(r, len(w))) for r, w in zip(rows, waves, strict=True)]
        texts = [torch.tensor([CHARACTERS.index(c) for c in r.text]) for r in rows]
        pad = torch.nn.utils.rnn.pad_sequence
        return (
            pad(waves, batch_first=True),
            torch.tensor([len(w) for w in waves]),
            pad(texts, batch_first=True),
            torch.tensor([len(t) for t in texts]),
            pad(tokens, batch_first=True, padding_value=-1),
        )

    def __iter__(self) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
        """(epoch, batch) without end."""
        with ThreadPoolExecutor(max(1, self.config.data_threads)) as pool:
            ahead: list[tuple[int, Future[tuple[torch.Tensor, ...]]]] = []
            epoch = 0
            while True:
                for place, indices in enumerate(self.plan(epoch)):
                    ahead.append((epoch, pool.submit(self.make, epoch, place, indices)))
                    if len(ahead) > 2 * self.config.data_threads:
                        due, future = ahead.pop(0)
                        yield due, future.result()
                epoch += 1

    @staticmethod
    def _at_speed(recording: Recording, speed: float) -> np.ndarray:
        wave = recording.samples()
        # Too fast for its text: CTC could not align it, so it is played as it is.
        seconds = len(wave) / ENCODER_SAMPLE_RATE / speed
        if speed == 1.0 or frames_needed(recording.text) * FRAME_SECONDS > seconds:
            return wave
        return resample(wave, ENCODER_SAMPLE_RATE * speed, ENCODER_SAMPLE_RATE)


def frame_tokens(recording: Recording, samples: int) -> np.ndarray:
    """Speech token in the middle of every output frame of `samples` samples, played at any speed; -1 = none."""
    frames = math.ceil(samples / ENCODER_SAMPLE_RATE / FRAME_SECONDS)
    if recording.tokens is None:
        return np.full(frames, -1, np.int64)
    speed = len(recording.wave) / samples
    index = np.floor((np.arange(frames) + 0.5) * FRAME_SECONDS * speed * TOKEN_RATE + 1e-6).astype(np.int64)
    return recording.tokens[np.minimum(index, len(recording.tokens) - 1)]


def run(config: TrainRecognizerConfig) -> dict[str, Any]:
    """Train, save `out` (.nemo) with its card and metrics, restore it, and return its metrics on the dev set.

    Ctrl-C saves the model as it is, then ends the run. Raises ConfigError and DataError before anything is written.
    """
    output = Path(config.out)
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    train, dev = (load_manifest(path, FRAME_SECONDS) for path in (config.train_manifest, config.dev_manifest))
    hours = sum(len(r.wave) for r in train) / ENCODER_SAMPLE_RATE / 3600
    model = build_model(config).to(device)
    if config.init_from:
        load_weights(model, config.init_from, device)
    parameters = sum(p.numel() for p in model.parameters())
    logger.info(
        "train-recognizer: %.2f M parameters, %.2f h, %d utterances, %s", parameters / 1e6, hours, len(train), device
    )
    started = time.monotonic()
    log: list[dict[str, float]] = []
    interrupted = False
    try:
        steps = _optimise(model, train, dev, config, device, log)
    except KeyboardInterrupt:
        interrupted, steps = True, int(log[-1]["step"]) if log else 0
        logger.warning("train-recognizer: interrupted; saving the model as it is")
    minutes = (time.monotonic() - started) / 60
    _save(model, output, config.half_weights)
    restored = NemoCTCRecognizer(output, device=device)
    score = dev_wer(restored, dev)
    metrics: dict[str, Any] = {
        "parameters": parameters,
        "train_hours": round(hours, 3),
        "steps": steps,
        "minutes": round(minutes, 2),
        "interrupted": interrupted,
        "dev_utterances": len(dev),
        "dev_wer": score.wer,
        "dev_substitutions": score.substitutions,
        "dev_deletions": score.deletions,
        "dev_insertions": score.insertions,
        "dev_reference_words": score.reference_words,
        "normalizer": score.normalizer,
        "log": log,
        "config": asdict(config),
    }
    write_json(output.with_suffix(".json"), metrics)
    output.with_suffix(".md").write_text(_card(output.stem, metrics), encoding="utf-8")
    if interrupted:
        raise KeyboardInterrupt
    return metrics


def load_weights(model: Any, source: str, device: str) -> None:
    """Copy the weights of a saved recogniser into a freshly built one; CheckpointError if its shape differs."""
    with quiet_nemo():
        try:
            kind = nemo_models("dcar train-recognizer").EncDecCTCModel
            weights = kind.restore_from(source, map_location=device).state_dict()
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{source}: NeMo cannot restore this recogniser ({error})") from error
    expected = model.state_dict()
    different = sorted(k for k in expected | weights
                       if k not in expected or k not in weights or expected[k].shape != weights[k].shape)
    if different:
        raise CheckpointError(f"{source}: is not of the shape that this configuration builds ({different[0]} and "
                              f"{len(different) - 1} others differ); give its hidden_size, num_layers, …")
    model.load_state_dict(weights)


def dev_wer(recognizer: NemoCTCRecognizer, recordings: list[Recording]) -> WERScore:
    """Corpus WER of a recogniser on recordings in memory."""
    heard = recognizer.transcribe([r.samples() for r in recordings], ENCODER_SAMPLE_RATE)
    return score_corpus([r.text for r in recordings], list(heard))


def _optimise(
    model: Any,
    train: list[Recording],
    dev: list[Recording],
    config: TrainRecognizerConfig,
    device: str,
    log: list[dict[str, float]],
) -> int:
    """The training loop; appends one record per dev check to `log`; returns the number of steps."""
    vocabulary = 1 + max((int(r.tokens.max()) for r in train if r.tokens is not None), default=0)
    token_layer = torch.nn.Linear(config.hidden_size, vocabulary).to(device)  # thrown away after training
    optimizer = adamw((*model.parameters(), *token_layer.parameters()), config.learning_rate, config.weight_decay)
    budget = math.inf if config.max_minutes is None else config.max_minutes * 60
    started = checked = time.monotonic()
    losses: list[torch.Tensor] = []
    model.train()
    for step, (epoch, batch) in enumerate(BatchStream(train, config)):
        now = time.monotonic()
        progress = max(step / config.max_steps, (now - started) / budget)
        if progress >= 1:
            return step
        rate = min(progress / config.warmup_share, 1.0) if config.warmup_share else 1.0
        rate *= 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * max(rate, 1e-3)
        waves, samples, texts, characters, tokens = (tensor.to(device, non_blocking=True) for tensor in batch)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=config.bf16):
            features, lengths = model.preprocessor(input_signal=waves, length=samples)
            if config.spec_augment:
                features = model.spec_augmentation(input_spec=features, length=lengths)
            encoded, frames = model.encoder(audio_signal=features, length=lengths)  # [B, D, frames]
            log_probs = model.decoder(encoder_output=encoded)
        loss = model.loss(log_probs=log_probs.float(), targets=texts, input_lengths=frames, target_lengths=characters)
        token_weight = config.token_weight * max(0.0, 1 - progress / config.token_share) if config.token_share else 0.0
        if token_weight and bool((tokens >= 0).any()):
            shared = min(tokens.shape[1], encoded.shape[2])
            logits = token_layer(encoded[:, :, :shared].transpose(1, 2).float())
            loss = loss + token_weight * torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tokens[:, :shared].flatten(), ignore_index=-1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
        if torch.isfinite(norm):  # a single overflow must not poison the weights
            optimizer.step()
        losses.append(loss.detach())
        if now - checked > config.eval_minutes * 60:
            wer = dev_wer(NemoCTCRecognizer.from_model(model, "training", device), dev[:200]).wer
            model.train()
            mean_loss = float(torch.stack(losses).mean())
            record = {"step": step, "epoch": epoch, "minutes": (now - started) / 60, "loss": mean_loss, "dev_wer": wer}
            logger.info("train-recognizer: %s", json.dumps({k: round(v, 4) for k, v in record.items()}))
            log.append(record)
            losses.clear()
            checked = time.monotonic()
    raise AssertionError("the batch stream has no end")


def _save(model: Any, output: Path, half_weights: bool) -> None:
    """Write the `.nemo` beside its place, then rename it: it is whole or absent."""
    full = {parameter: parameter.data for parameter in model.parameters()}
    for parameter, data in full.items():
        # Matrices as float16; NeMo's strict load copies them back into float32.
        parameter.data = data.half() if half_weights and data.ndim >= 2 else data
    temporary = output.with_name(f".{output.stem}.{os.getpid()}.nemo")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with quiet_nemo():
            model.save_to(str(temporary))
        os.replace(temporary, output)
    except OSError as error:
        raise CheckpointError(f"{output}: the model cannot be written ({error}); free some space") from error
    finally:
        temporary.unlink(missing_ok=True)
        for parameter, data in full.items():
            parameter.data = data


def _card(name: str, metrics: dict[str, Any]) -> str:
    config = metrics["config"]
    training = f"{metrics['steps']} steps in {metrics['minutes']} minutes, seed {config['seed']}"
    if metrics["interrupted"]:
        training += " (interrupted)"
    start = "from scratch"
    if config["init_from"]:
        start = f"from the weights of `{Path(config['init_from']).name}`"
    wer = f"{100 * metrics['dev_wer']:.2f} % of {metrics['dev_reference_words']} words"
    return f"""# {name}: FastConformer-CTC over characters

A NeMo `EncDecCTCModel` trained {start} by `dcar train-recognizer`; restore it with
`EncDecCTCModel.restore_from("{name}.nemo")` or `NemoCTCRecognizer`. It is the reward recogniser of
stage two: small, fast, and used only on the speech of this project's vocoder. It is no general recogniser.

| | |
| --- | --- |
| parameters | {metrics["parameters"] / 1e6:.2f} M ({config["num_layers"]} layers of {config["hidden_size"]}) |
| output | 28 characters and blank, one frame each {FRAME_SECONDS * 1000:.0f} ms |
| training speech | {metrics["train_hours"]} h, manifest `{Path(config["train_manifest"]).name}` |
| training | {training} |
| WER on the dev set | {wer} in {metrics["dev_utterances"]} utterances ({metrics["normalizer"]}) |
| licence | Apache-2.0 |
"""


def main(arguments: list[str] | None = None) -> None:
    """Command line: `[--config FILE.yaml] [key=value …]`."""
    run(load_config(TrainRecognizerConfig, arguments))


if __name__ == "__main__":
    sys.exit(run_command("dcar.recognition.train", main))
