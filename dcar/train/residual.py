"""Train a residual model: a codec's further layers from its first one (`dcar.vocoder.residual`).

    dcar train-residual --config residual_mtp
    accelerate launch -m dcar.cli train-residual --config residual_mtp

The data are prepared with residual=true. Trainer, optimisers, batches and precision are those of
stage one (dcar/train/car.py). A batch trains one layer, which is drawn anew for each, as in VALL-E
(arXiv 2301.02111). The acoustic prompt is a crop of at most `prompt_tokens` of another utterance of
the speaker, without its text, since that is what the vocoder has; VALL-E crops three seconds of the
same utterance.
"""

import dataclasses
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from dcar.config import load_config, setting
from dcar.errors import DataError
from dcar.model.batch import pad
from dcar.model.cards import model_card
from dcar.prepare.columns import Split
from dcar.prepare.prepared import RESIDUAL_COLUMNS, load_split, prepared_info, residual_of
from dcar.process import run_claimed, run_command
from dcar.prompts.chooser import PromptChooser, own_prompt
from dcar.text.units import is_phonemes
from dcar.train.batches import NO_PROMPT
from dcar.train.car import RunTrainer
from dcar.train.checkpoints import data_stamp, last_of
from dcar.train.settings import TokenModelSettings
from dcar.vocoder.residual import ResidualConfig, ResidualModel

logger = logging.getLogger(__name__)

IGNORE = -100  # target that cross entropy leaves out


@dataclass
class TrainResidualConfig(TokenModelSettings):
    """Settings of `dcar train-residual`; those that stage one has too mean the same."""

    out: str = "runs/residual"
    prompt_tokens: int = setting(
        150,
        "Longest acoustic prompt in tokens; 150 = three seconds at 50 Hz, as in VALL-E.",
        minimum=1,
    )
    model: ResidualConfig = setting(
        ResidualConfig, "Shape of the model; the codec is taken from the data."
    )


class ResidualDataset(Dataset):
    """All layers of utterances and of their prompts; items are addressed by (epoch, index).

    A training item also draws the layer to be trained; other items have all layers. Utterances that
    could only be their own prompts have an empty one.
    """

    def __init__(self, split: Split, config: ResidualConfig, seed: int, training: bool):
        if split.largest_text_id >= config.text_vocab_size:
            raise DataError(
                f"the data has text id {split.largest_text_id}, but the model has only "
                f"{config.text_vocab_size} text ids: raise model.text_vocab_size"
            )
        self.config, self.seed, self.training = config, seed, training
        self.longest_prompt = config.prompt_tokens
        self.rows = split.rows.select_columns(
            ["id", "text_ids", "speech", "prompt_speech", *RESIDUAL_COLUMNS]
        )
        self.has_prompt = split.columns["has_prompt"]
        self.lengths = split.columns["speech_tokens"]
        self.chooser = PromptChooser(split, config.prompt_tokens)
        self.own_prompt = own_prompt(split)
        if self.own_prompt.any():
            logger.warning(NO_PROMPT, self.own_prompt.sum(), len(self.own_prompt))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, address: tuple[int, int]) -> dict[str, Any]:
        """Return text ids [N], prompt [P, L], codes [T, L], and the number of layers to be read."""
        epoch, index = address
        rng = np.random.default_rng([self.seed, epoch, index])
        row = self.rows[index]
        if self.has_prompt[index]:
            prompt = self._layers(row, prompt=True)
        elif self.own_prompt[index]:
            prompt = self._layers(row)[:0]
        else:
            prompt = self._layers(self.rows[self.chooser.choose(index, rng)])
        start = self.chooser.start(prompt[:, 0].tolist(), rng)
        layers = self.config.codec_layers
        return {
            "text": row["text_ids"],
            "prompt": prompt[start : start + self.config.prompt_tokens],
            "codes": self._layers(row),
            "layers": int(rng.integers(2, layers + 1)) if self.training else layers,
        }

    def _layers(self, row: Mapping[str, Any], prompt: bool = False) -> Tensor:
        """Return the codes [T, L] of a row, or of its own prompt. Raises DataError if they have
        other layers."""
        first = row["prompt_speech" if prompt else "speech"]
        codes = np.vstack((first, residual_of(row, prompt)))
        if len(codes) != self.config.codec_layers:
            raise DataError(
                f"utterance {row['id']}: has codes of {len(codes)} layers, but prepared.json "
                f"records {self.config.codec_layers}; prepare the corpus again"
            )
        return torch.from_numpy(codes.T)


def collate_layers(examples: Sequence[dict]) -> dict[str, Tensor]:
    """Pad a batch to the arguments of `ResidualModel.forward`.

    `codes` [B, T, j] ends with the layer j that the first example has drawn.
    """
    layers = examples[0]["layers"]
    text_ids, text_lengths = pad([e["text"] for e in examples], "cpu")
    prompts, codes = ([e[name] for e in examples] for name in ("prompt", "codes"))
    return {
        "text_ids": text_ids,
        "text_lengths": text_lengths,
        "prompt": pad_sequence(prompts, batch_first=True),
        "prompt_lengths": torch.tensor([len(p) for p in prompts]),
        "codes": pad_sequence([c[:, :layers] for c in codes], batch_first=True),
        "lengths": torch.tensor([len(c) for c in codes]),
    }


class ResidualTrainer(RunTrainer):
    """Trainer of a residual model, with the loss and accuracy of each layer."""

    model: ResidualModel
    collate = staticmethod(collate_layers)

    def compute_loss(
        self,
        model,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch=None,
    ):
        """Return the cross entropy of the last layer in `codes`: nats, mean over tokens."""
        before, target = inputs["codes"][..., :-1], inputs["codes"][..., -1]
        if self.config.input_corruption and model.training:
            before = self._corrupt(before)
        logits = model(**{**inputs, "codes": before})
        place = torch.arange(target.shape[1], device=target.device)
        target = target.masked_fill(place >= inputs["lengths"][:, None], IGNORE)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=IGNORE)
        return (loss, (logits, target)) if return_outputs else loss

    def dev_metrics(self) -> dict[str, float]:
        """Return loss (nats) and accuracy of each layer, given the recorded layers before it."""

        def measure(batch: dict[str, Tensor]) -> Tensor:
            return torch.stack([sums(batch, j) for j in range(2, batch["codes"].shape[2] + 1)])

        def sums(batch: dict[str, Tensor], layer: int) -> Tensor:
            some = {**batch, "codes": batch["codes"][..., :layer]}
            loss, (logits, target) = self.compute_loss(self.model, some, return_outputs=True)
            count = batch["lengths"].sum()
            return torch.stack((loss * count, (logits.argmax(-1) == target).sum(), count))

        with self.compute_loss_context_manager():
            nats, right, count = self.dev_sums(measure).T
        losses, accuracies = (nats / count).tolist(), (right / count).tolist()
        metrics = {"loss": sum(losses) / len(losses), "accuracy": sum(accuracies) / len(losses)}
        for j, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True), start=2):
            metrics |= {f"layer{j}_loss": loss, f"layer{j}_accuracy": accuracy}
        return metrics

    def describe(self, inputs: Mapping[str, Any]) -> str:
        rows, longest, layers = inputs["codes"].shape
        return f"layer {layers} of a batch of {rows} utterances of up to {longest} tokens"


def run(config: TrainResidualConfig) -> ResidualModel:
    """Train (or resume training) and save the model, its card, log and provenance in `config.out`.

    Raises DataError for data without residual codes or phonemes, CheckpointError if out holds
    another run.
    """
    asked = config
    prepared = prepared_info(config.data)
    tokens_of, phonemes = prepared.tokenizer, prepared.phonemes
    if tokens_of.layers is None or tokens_of.layers < 2:
        raise DataError(
            f"{config.data}: contains only the first layer of {tokens_of.name}; prepare it again "
            "with a tokenizer of several layers and residual=true"
        )
    if not is_phonemes(phonemes):
        raise DataError(
            f"{config.data}: its text ids are those of a language model, not phonemes; use the "
            "corpus as it was before `dcar prepare mode=retokenize`"
        )
    shape = dataclasses.replace(
        config.model,
        speech_vocab_size=tokens_of.vocab_size,
        codec_layers=tokens_of.layers,
        prompt_tokens=config.prompt_tokens,
        codec=tokens_of.spec,
        tokenizer=tokens_of.identity,
        phonemes=phonemes,
    )
    config = dataclasses.replace(config, model=shape)
    last = last_of(config, ResidualModel.load_config, shape, "residual model")
    torch.manual_seed(config.seed)
    trainer = ResidualTrainer(
        config,
        ResidualModel(shape),
        ResidualDataset(load_split(config.data, "train"), shape, config.seed, training=True),
        ResidualDataset(load_split(config.data, "dev"), shape, config.seed, training=False),
    )
    stamp = data_stamp(config.data)
    return trainer.make(last, asked, residual_card, {"data": prepared.content}, data=stamp)


def residual_card(model: ResidualModel, source: Mapping[str, Any]) -> str:
    """Return the README.md of a residual model."""
    config = model.config
    return model_card(
        "Residual codebooks",
        f"Predicts layers 2 to {config.codec_layers} of a codec from its first layer, phonemes and "
        "an acoustic prompt. With the codec's decoder it is a vocoder: `vocoder=residual:FOLDER`.",
        [
            (
                "size",
                f"{sum(p.numel() for p in model.parameters()):,} parameters, "
                f"{config.num_layers} layers, width {config.hidden_size}",
            ),
            ("codec", f"{config.codec}, {config.tokenizer}"),
            ("text", config.phonemes),
            ("checksum", f"`{model.checksum()}`"),
        ],
        source,
        metrics_of="dev split; loss in nats, given the recorded layers before",
        settings=(
            "optim learning_rate per_device_train_batch_size per_device_train_batch_tokens "
            "max_steps bf16 seed"
        ).split(),
        code="from dcar.vocoder.load import load_vocoder\n\n"
        'vocoder = load_vocoder("residual:path/to/this/directory", prompts=prompts)',
    )


CONFIG = TrainResidualConfig


def main(arguments: list[str] | None = None) -> None:
    run_claimed(run, load_config(CONFIG, arguments), resumes=True)


if __name__ == "__main__":
    sys.exit(run_command("dcar.train.residual", main))
