"""Train a recogniser of sound on the states of a frozen speech encoder: CTC over characters, minutes on one core.

    dcar train-encoder-recognizer --config launch/recipes/recognizer_starter.yaml
    accelerate launch -m dcar.train.encoder_recognizer train_manifest=train.jsonl dev_manifest=dev.jsonl out=runs/ear

It serves the rewards of stage two that hear (`wer`, `cer`, `log_likelihood`), so it is trained on resynthesised speech
(`dcar resynthesize`). The encoder runs once: its states are kept in out/states (184 MB an hour) until the training has
ended. Leaves behind in out: weights, config.json, config.yaml, README.md, log.jsonl, provenance.json, checkpoints. Run
again, it goes on from the states that are there and from the last checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm import tqdm

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.config import check, load_config, save_config, setting
from dcar.config.schema import seed_setting
from dcar.decoding.batch import pad
from dcar.errors import CheckpointError
from dcar.model.cards import model_card
from dcar.process import meeting_others, run_command
from dcar.recognition.ctc import likelihood, spelled
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
from dcar.recognition.manifest import Recording, load_manifest
from dcar.storage import digest, writing
from dcar.text.wer import NORMALIZER, word_errors
from dcar.tokens.whisper import shared_encoder
from dcar.tracking import provenance
from dcar.train.checkpoints import latest_checkpoint
from dcar.train.small import SmallTrainer, hidden_spans

logger = logging.getLogger(__name__)

SHARD = 256
"""Utterances whose states are one file."""


@dataclass
class TrainEncoderRecognizerConfig:
    """Settings of `dcar train-encoder-recognizer`."""

    train_manifest: str = setting(meaning="JSONL manifest of the training speech (`dcar resynthesize`).", place="file")
    dev_manifest: str = setting(meaning="JSONL manifest of held-out speech; its WER is reported.", place="file")
    out: str = setting("runs/recognizer", "Folder to write.", place="folder")
    batch_size: int = setting(32, "Utterances of a process per step.", minimum=1)
    max_steps: int = setting(2400, "Updates of the weights.", minimum=1)
    learning_rate: float = setting(2e-3, "Peak of AdamW; it rises, then falls by a cosine.", above=0)
    weight_decay: float = setting(0.05, "Of matrices.", minimum=0)
    warmup_steps: int = setting(240, "Steps in which the learning rate rises.", minimum=0)
    max_grad_norm: float = setting(1.0, "Gradients are clipped to this norm, 0 = not.", minimum=0)
    dropout: float = setting(0.1, "Share of the states' values that training hides.", minimum=0, below=1)
    longest_span: int = setting(15, "States of a hidden span at most, one in every 60 states; 0 = none.", minimum=0)
    bf16: bool = setting(False, "bfloat16 autocast; log-probabilities are float32.")
    seed: int = seed_setting(0, "Of weights, order and what is hidden.")
    eval_steps: int = setting(400, "Steps between evaluations on the dev manifest.", minimum=1)
    save_steps: int = setting(400, "Steps between checkpoints.", minimum=1)
    log_steps: int = setting(25, "Steps between lines of the log.", minimum=1)
    half_weights: bool = setting(False, "Store the finished weights in float16: half the file.")
    resume: bool = setting(True, "Go on from the last checkpoint in out, bit for bit.")
    model: EncoderRecognizerConfig = setting(EncoderRecognizerConfig, "Shape.")

    def __post_init__(self) -> None:
        check(self)


def kept_states(recordings: Sequence[Recording], folder: Path) -> list[np.ndarray]:
    """The encoder's states [T, 512] float16 of every recording, from files that are made where they are missing (every
    process makes its share) and stay on the disk; a stopped run goes on from those that are there."""
    shards = [recordings[i : i + SHARD] for i in range(0, len(recordings), SHARD)]
    paths = [folder / f"{_identity(shard)}.npy" for shard in shards]
    state = PartialState()
    share = slice(state.process_index, None, state.num_processes)  # of all: what is missing changes while others write
    mine = [(shard, path) for shard, path in zip(shards[share], paths[share], strict=True) if not path.is_file()]
    if mine:
        encoder = shared_encoder(TAIL_SECONDS, 1)
        total, quiet = sum(len(shard) for shard, _ in mine), state.process_index > 0
        with tqdm(desc="encoder", total=total, unit="utt", disable=quiet) as bar:
            for shard, path in mine:
                rows = []
                for recording in shard:
                    rows.append(encoder_states(encoder, recording.samples(), ENCODER_SAMPLE_RATE).astype(np.float16))
                    bar.update()
                _write(path, np.concatenate(rows))
    with meeting_others():
        state.wait_for_everyone()
    states: list[np.ndarray] = []
    for shard, path in zip(shards, paths, strict=True):
        table = np.load(path, mmap_mode="r")
        lengths = [state_count(len(r.wave)) for r in shard]
        if len(table) != sum(lengths):
            raise CheckpointError(f"{path}: holds {len(table)} states where {sum(lengths)} belong; remove it and run "
                                  "the same command again")
        states += np.split(table, np.cumsum(lengths)[:-1])
    return states


def _identity(recordings: Sequence[Recording]) -> str:
    name = hashlib.sha256(ENCODER.encode())
    for recording in recordings:
        name.update(len(recording.wave).to_bytes(8, "little"))
        name.update(recording.wave.data)
    return name.hexdigest()[:32]


def _write(path: Path, states: np.ndarray) -> None:
    """Whole, or not at all."""
    with writing(path, states.nbytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.stem}.{os.getpid()}.npy")
        np.save(part, states)
        os.replace(part, path)


class StateTexts(Dataset):
    """States and characters of a manifest; items are addressed by (epoch, index), so that resuming needs no state."""

    def __init__(self, recordings: Sequence[Recording], states: Sequence[np.ndarray],
                 config: TrainEncoderRecognizerConfig):
        self.states, self.texts, self.config = states, [r.text for r in recordings], config
        alphabet = config.model.alphabet
        self.symbols = [[1 + place for place in spelled(text, alphabet, "the alphabet")] for text in self.texts]
        self.lengths = [len(s) for s in states]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, address: tuple[int, int]) -> dict[str, np.ndarray]:
        """What a step of training sees of an utterance: states [T, 512] float32, symbols [characters]."""
        epoch, index = address
        rng = np.random.default_rng([self.config.seed, epoch, index])
        return {"states": self.hidden(self.states[index].astype(np.float32), rng),
                "text": np.asarray(self.symbols[index])}

    def hidden(self, states: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """States [T, 512], some spans and a share of the other values 0."""
        dropout = self.config.dropout
        for span in hidden_spans(len(states), self.config.longest_span, rng):
            states[span] = 0
        if dropout:
            states *= (rng.random(states.shape, np.float32) >= dropout) / np.float32(1 - dropout)
        return states


def collate(examples: Sequence[dict[str, np.ndarray]]) -> dict[str, Tensor]:
    """A padded batch: states [B, T, 512], lengths [B], text_ids [B, U], text_lengths [B]."""
    texts, text_lengths = pad([e["text"].tolist() for e in examples], "cpu")
    states = [torch.from_numpy(e["states"]) for e in examples]
    return {"states": pad_sequence(states, batch_first=True), "lengths": torch.tensor([len(s) for s in states]),
            "text_ids": texts, "text_lengths": text_lengths}


class EncoderRecognizerTrainer(SmallTrainer):
    """The Trainer with the CTC loss, and the dev manifest's word errors as evaluation."""

    model: EncoderRecognizer
    eval_dataset: StateTexts

    def __init__(self, config: TrainEncoderRecognizerConfig, model: EncoderRecognizer, train: StateTexts,
                 dev: StateTexts):
        super().__init__("an encoder recogniser", config, model, train, dev, collate)

    def describe(self, inputs: Mapping[str, Any]) -> str:
        rows, longest = inputs["states"].shape[:2]
        return f"a batch of {rows} utterances of up to {longest * FRAME_SECONDS:.0f} s"

    def compute_loss(self, model, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch=None):
        """CTC loss, nats per character, mean over utterances."""
        log_probs = model(inputs["states"], inputs["lengths"])
        loss = functional.ctc_loss(log_probs.float().transpose(0, 1), inputs["text_ids"], inputs["lengths"],
                                   inputs["text_lengths"], blank=BLANK)
        return (loss, log_probs) if return_outputs else loss

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Of the dev manifest, over all processes: nats per character (`eval_loss`) and corpus WER."""
        self.model.eval()
        dev, device = eval_dataset or self.eval_dataset, self.args.device
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        for index in range(self.args.process_index, len(dev), self.args.world_size):
            states = torch.from_numpy(dev.states[index].astype(np.float32)).to(device)
            log_probs = self.model.frames(states[None], torch.tensor([len(states)], device=device))[0].cpu()
            heard = word_errors(dev.texts[index], self.model.read(log_probs))
            nats = -likelihood(log_probs, dev.symbols[index], BLANK)
            sums += sums.new_tensor([nats, len(dev.texts[index]), heard.errors, heard.reference_words])
        nats, characters, errors, words = self.accelerator.reduce(sums, "sum").tolist()
        return self.evaluated({f"{metric_key_prefix}_loss": nats / characters,
                               f"{metric_key_prefix}_wer": errors / words})


def run(config: TrainEncoderRecognizerConfig) -> EncoderRecognizer:
    """Train (or go on training) and save the recogniser with its card, log and provenance into `config.out`.

    Raises DataError for a manifest that is missing or broken, CheckpointError where out holds another run.
    """
    out, given = Path(config.out), config
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, encoder=ENCODER))
    last = latest_checkpoint(out) if config.resume else None
    if last and (found := EncoderRecognizer.load_config(last)) != config.model:
        raise CheckpointError(f"{last}: a checkpoint of another recogniser ({found}, here {config.model}); choose "
                              "another out, or resume=false to start again")
    train, dev = (load_manifest(path, FRAME_SECONDS) for path in (config.train_manifest, config.dev_manifest))
    hours = sum(len(r.wave) for r in train) / ENCODER_SAMPLE_RATE / 3600
    kept = out / "states"
    sets = [StateTexts(recordings, kept_states(recordings, kept), config) for recordings in (train, dev)]
    utterances = len(train)
    del train, dev  # their waves: 115 MB an hour
    torch.manual_seed(config.seed)
    model = EncoderRecognizer(config.model)
    trainer = EncoderRecognizerTrainer(config, model, *sets)
    if trainer.is_world_process_zero():
        with writing(out):
            save_config(given, out / "config.yaml")
        logger.info("%.2f M parameters, %.2f h, %d training utterances, %d processes",
                    sum(p.numel() for p in model.parameters()) / 1e6, hours, utterances, trainer.args.world_size)
    data = {"train": Path(config.train_manifest).name, "dev": Path(config.dev_manifest).name,
            "digests": [digest(Path(path)) for path in (config.train_manifest, config.dev_manifest)],
            "train_hours": round(hours, 3), "train_utterances": utterances, "normalizer": NORMALIZER}
    trainer.origin = provenance(config=dataclasses.asdict(config), seed=config.seed, data=data)
    trainer.fit(last)
    with trainer.doing("evaluating and exporting the trained recogniser"), writing(out):
        recognizer = trainer.export(encoder_recognizer_card, half=config.half_weights, data=data)
        if trainer.is_world_process_zero():
            shutil.rmtree(kept)
    return recognizer


def encoder_recognizer_card(recognizer: EncoderRecognizer, source: Mapping[str, Any]) -> str:
    """README.md of an encoder recogniser."""
    config, data = recognizer.config, source["data"]
    return model_card(
        "Encoder recogniser", "Words from the states of whisper-base's frozen encoder, by CTC over characters: the "
        "reward recogniser of stage two, trained on the speech of a vocoder. It is no judge of what was trained by it.",
        [("size", f"{sum(p.numel() for p in recognizer.parameters()):,} parameters, {len(config.dilations)} layers, "
                  f"width {config.hidden_size}, beside the encoder's"),
         ("encoder", config.encoder),
         ("output", f"{len(config.alphabet)} characters and blank, one frame each {1000 * FRAME_SECONDS:.0f} ms"),
         ("training speech", f"{data['train_hours']} h, {data['train_utterances']} utterances, `{data['train']}`"),
         ("checksum", f"`{recognizer.checksum()}`")],
        source, metrics_of=f"dev manifest; loss in nats per character, {data['normalizer']}", tags=("ctc",),
        settings=("learning_rate", "batch_size", "max_steps", "dropout", "longest_span", "bf16", "seed"),
        code="from dcar.recognition.load import load_recognizer\n\n"
             'recognizer = load_recognizer("encoder:path/to/this/directory")\n'
             "print(recognizer.transcribe([wave], sample_rate))  # wave: float32, mono")


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(load_config(TrainEncoderRecognizerConfig, arguments))


if __name__ == "__main__":
    sys.exit(run_command("dcar.train.encoder_recognizer", main))
