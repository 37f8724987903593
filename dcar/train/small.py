"""One trainer for the small models: the recogniser of sound, the recogniser of tokens, and the
chunk scorer.

`SmallTrainer` has data order, optimiser, checkpoints and export; `CTCTrainer` adds what both
recognisers share.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from dcar.config import setting
from dcar.config.training import TrainerSettings
from dcar.errors import ConfigError
from dcar.train.bucketed import BucketedTrainer, sharding
from heads.checkpoint import Checkpoint


@dataclass
class SmallSettings(TrainerSettings):
    """Settings common to the training of all small models."""

    per_device_train_batch_size: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup_steps: int = 50
    half_weights: bool = setting(
        False, "Store the finished weights in float16, which halves the file."
    )


SPAN_EVERY = 60
"""Frames per hidden span; every utterance has at least one span."""


def hidden_spans(frames: int, longest: int, rng: np.random.Generator) -> Iterator[slice]:
    """Yield randomly drawn spans of 1 to `longest` frames of an utterance, which training hides;
    none if longest is 0."""
    for _ in range(max(1, frames // SPAN_EVERY) if longest else 0):
        length = int(rng.integers(1, longest + 1))
        start = int(rng.integers(0, max(1, frames - length + 1)))
        yield slice(start, start + length)


class SmallTrainer(BucketedTrainer):
    """Trainer of a small model, which is not sharded. Subclasses define the loss and the
    evaluation."""

    what: str  # kind of model, for messages

    def __init__(self, config: Any, model: Checkpoint, train: Any, dev: Any):
        """Create the trainer. config: a `SmallSettings`. Raises ConfigError if weights are
        sharded."""
        if sharding():
            raise ConfigError(
                f"{self.what} is small and is not sharded: launch with "
                f"launch/accelerate/multi_gpu.yaml instead of {sharding()}"
            )
        super().__init__(config, model, train, dev)

    def describe(self, inputs: Mapping[str, Any]) -> str:
        rows, longest = next(iter(inputs.values())).shape[:2]
        return f"a batch of {rows} utterances of up to {longest} positions"

    def write_model(self) -> None:
        if self.is_world_process_zero():
            self.model.save_pretrained(self.out, half=self.config.half_weights)


class CTCTexts(Dataset):
    """Frames and symbols of utterances; items are addressed by (epoch, index), so that resuming
    needs no state.

    frames: [T, …] for each utterance; symbols: the ids that CTC predicts for its text; texts: the
    references that errors are counted against; lengths: T of each.
    """

    def __init__(
        self,
        config: Any,
        frames: Sequence[Any],
        symbols: Sequence[Sequence[int]],
        texts: Sequence[Any],
        lengths: Sequence[int] | np.ndarray,
    ):
        self.config, self.frames, self.symbols = config, frames, symbols
        self.texts, self.lengths = texts, lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, address: tuple[int, int]) -> dict[str, np.ndarray]:
        """Return the example of an utterance in an epoch: frames [T, …], text [symbols]."""
        epoch, index = address
        rng = np.random.default_rng([self.config.seed, epoch, index])
        return {
            "frames": self.changed(self.frames[index], rng),
            "text": np.asarray(self.symbols[index]),
        }

    def changed(self, frames: Any, rng: np.random.Generator) -> np.ndarray:
        """Return the frames, some of them hidden or replaced for training."""
        raise NotImplementedError


def collate_ctc(examples: Sequence[dict[str, np.ndarray]]) -> dict[str, Tensor]:
    """Return a padded batch: frames [B, T, …], lengths [B], text_ids [B, U], text_lengths [B]."""
    frames, texts = ([torch.from_numpy(e[name]) for e in examples] for name in ("frames", "text"))
    return {
        "frames": pad_sequence(frames, batch_first=True),
        "lengths": torch.tensor([len(f) for f in frames]),
        "text_ids": pad_sequence(texts, batch_first=True),
        "text_lengths": torch.tensor([len(t) for t in texts]),
    }


class CTCTrainer(SmallTrainer):
    """Trainer of a `WindowCTC` with the CTC loss (symbol 0 is the blank)."""

    errors = "wer"  # name of the error rate among the dev metrics
    collate = staticmethod(collate_ctc)

    def compute_loss(
        self,
        model,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch=None,
    ):
        """Return the CTC loss in nats per symbol, averaged over utterances."""
        log_probs = model(inputs["frames"], inputs["lengths"])
        loss = functional.ctc_loss(
            log_probs.float().transpose(0, 1),
            inputs["text_ids"],
            inputs["lengths"],
            inputs["text_lengths"],
            blank=0,
        )
        return (loss, log_probs) if return_outputs else loss

    def count(self, dev: Any, mine: list[int]) -> tuple[float, float, float, float]:
        """Return sums over these dev utterances: nats, symbols, errors of the transcripts, and
        units of the references."""
        raise NotImplementedError

    def dev_metrics(self) -> dict[str, float]:
        """Return the nats per symbol (`eval_loss`) and the error rate."""
        mine = list(range(self.args.process_index, len(self.eval_dataset), self.args.world_size))
        counts = self.count(self.eval_dataset, mine) if mine else (0.0, 0.0, 0.0, 0.0)
        sums = torch.tensor(counts, dtype=torch.float64, device=self.args.device)
        nats, symbols, errors, reference = self.accelerator.reduce(sums, "sum").tolist()
        return {"loss": nats / symbols, self.errors: errors / reference}
