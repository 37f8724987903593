"""One trainer for the small models: the recogniser of sound, the recogniser of tokens, and the
chunk scorer.

`SmallTrainer` has data order, optimiser, checkpoints and export; `CTCTrainer` adds what both
recognisers share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from dcar.config import check, setting
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError
from dcar.process import meeting_others
from dcar.train.bucketed import BucketedTrainer, arguments, sharding
from heads.checkpoint import Checkpoint


@dataclass
class SmallSettings:
    """Settings that the trainings of small models have in common."""

    out: str = setting("runs/small", "Folder to write.", place="folder")
    batch_size: int = setting(32, "Utterances of a process per step.", minimum=1)
    max_steps: int = setting(1000, "Updates of the weights.", minimum=1)
    learning_rate: float = setting(
        2e-3, "Peak of AdamW; it rises, then falls by a cosine.", above=0
    )
    weight_decay: float = setting(0.05, "Of matrices.", minimum=0)
    warmup_steps: int = setting(50, "Steps in which the learning rate rises.", minimum=0)
    max_grad_norm: float = setting(1.0, "Gradients are clipped to this norm, 0 = not.", minimum=0)
    bf16: bool = setting(False, "bfloat16 autocast.")
    seed: int = seed_setting(0, "Of weights, order and what is random in training.")
    eval_steps: int = setting(250, "Steps between evaluations on the dev data.", minimum=1)
    save_steps: int = setting(250, "Steps between checkpoints.", minimum=1)
    log_steps: int = setting(25, "Steps between lines of the log.", minimum=1)
    half_weights: bool = setting(False, "Store the finished weights in float16: half the file.")
    resume: bool = setting(True, "Go on from the last checkpoint in out, bit for bit.")

    def __post_init__(self) -> None:
        check(self)


SPAN_EVERY = 60
"""Frames for every span that is hidden; an utterance has one at least."""


def hidden_spans(frames: int, longest: int, rng: np.random.Generator) -> Iterator[slice]:
    """Spans of 1 to `longest` frames of an utterance that training hides, drawn anew; none where
    longest is 0."""
    for _ in range(max(1, frames // SPAN_EVERY) if longest else 0):
        length = int(rng.integers(1, longest + 1))
        start = int(rng.integers(0, max(1, frames - length + 1)))
        yield slice(start, start + length)


class SmallTrainer(BucketedTrainer):
    """The Trainer of a small model in one piece. Subclasses have the loss and the evaluation."""

    what: str  # is trained, as an error calls it

    def __init__(self, config: Any, model: Checkpoint, train: Any, dev: Any):
        """config: a `SmallSettings`. ConfigError where weights are sharded."""
        if sharding():
            raise ConfigError(
                f"{self.what} is small: train it with launch/accelerate/multi_gpu.yaml, not with "
                "FSDP or "
                "DeepSpeed"
            )
        with meeting_others():
            made = arguments(config)
        super().__init__(config, made, model, train, dev)

    def describe(self, inputs: Mapping[str, Any]) -> str:
        rows, longest = next(iter(inputs.values())).shape[:2]
        return f"a batch of {rows} utterances of up to {longest} positions"

    def write_model(self) -> None:
        if self.is_world_process_zero():
            self.model.save_pretrained(self.out, half=self.config.half_weights)


class CTCTexts(Dataset):
    """Frames and symbols of utterances; items are addressed by (epoch, index), so that resuming
    needs no state.

    frames: of every utterance [T, …]; symbols: of its text, CTC's ids; texts: as errors are
    counted; lengths: T.
    """

    def __init__(
        self,
        config: Any,
        frames: Sequence[Any],
        symbols: Sequence[Sequence[int]],
        texts: Sequence[Any],
        lengths: Sequence[int] | np.ndarray,
    ):
        self.config, self.frames, self.symbols, self.texts, self.lengths = (
            config,
            frames,
            symbols,
            texts,
            lengths,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, address: tuple[int, int]) -> dict[str, np.ndarray]:
        """What a step of training sees of an utterance: frames [T, …], text [symbols]."""
        epoch, index = address
        rng = np.random.default_rng([self.config.seed, epoch, index])
        return {
            "frames": self.changed(self.frames[index], rng),
            "text": np.asarray(self.symbols[index]),
        }

    def changed(self, frames: Any, rng: np.random.Generator) -> np.ndarray:
        """The frames with what training hides or replaces."""
        raise NotImplementedError


def collate_ctc(examples: Sequence[dict[str, np.ndarray]]) -> dict[str, Tensor]:
    """A padded batch: frames [B, T, …], lengths [B], text_ids [B, U], text_lengths [B]."""
    frames, texts = ([torch.from_numpy(e[name]) for e in examples] for name in ("frames", "text"))
    return {
        "frames": pad_sequence(frames, batch_first=True),
        "lengths": torch.tensor([len(f) for f in frames]),
        "text_ids": pad_sequence(texts, batch_first=True),
        "text_lengths": torch.tensor([len(t) for t in texts]),
    }


class CTCTrainer(SmallTrainer):
    """The Trainer of a `WindowCTC` with the CTC loss (symbol 0 is the blank)."""

    errors = "wer"  # what the dev metric of `count` is called
    collate = staticmethod(collate_ctc)

    def compute_loss(
        self,
        model,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch=None,
    ):
        """CTC loss, nats per symbol, mean over utterances."""
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
        """Of these dev utterances: nats, symbols, errors of what is read, and the reference's
        units."""
        raise NotImplementedError

    def dev_metrics(self) -> dict[str, float]:
        """Nats per symbol (`eval_loss`) and the error rate."""
        mine = list(range(self.args.process_index, len(self.eval_dataset), self.args.world_size))
        sums = torch.tensor(
            self.count(self.eval_dataset, mine) if mine else (0.0,) * 4,
            dtype=torch.float64,
            device=self.args.device,
        )
        nats, symbols, errors, reference = self.accelerator.reduce(sums, "sum").tolist()
        return {"loss": nats / symbols, self.errors: errors / reference}
