"""A trainer of small models on length-bucketed batches of a prepared corpus: what the recogniser of tokens and the
coherence of chunks have in common."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from dcar.errors import ConfigError
from dcar.optim import adamw, cosine
from dcar.process import meeting_others
from dcar.storage import digest, write_text
from dcar.tracking import provenance, write_json
from dcar.train.batches import BucketBatchSampler, EpochLoader
from dcar.train.callbacks import JsonlLog
from dcar.train.car import is_sharded
from dcar.train.checkpoints import check_same_data, step_of
from dcar.train.resilient import ResilientTrainer
from heads.checkpoint import Checkpoint


class SmallSettings(Protocol):
    """What a configuration says of such a training."""

    out: str
    batch_size: int
    max_steps: int
    learning_rate: float
    weight_decay: float
    warmup_steps: int
    max_grad_norm: float
    bf16: bool
    seed: int
    eval_steps: int
    save_steps: int
    log_steps: int


class Utterances(Protocol):
    """Examples that are addressed by (epoch, index), so that resuming needs no state."""

    lengths: list[int]

    def __len__(self) -> int: ...

    def __getitem__(self, address: tuple[int, int]) -> Mapping[str, Any]: ...


SPAN_EVERY = 60
"""Frames for every span that is hidden; an utterance has one at least."""


def hidden_spans(frames: int, longest: int, rng: np.random.Generator) -> Iterator[slice]:
    """Spans of 1 to `longest` frames of an utterance that training hides, drawn anew; none where longest is 0."""
    for _ in range(max(1, frames // SPAN_EVERY) if longest else 0):
        length = int(rng.integers(1, longest + 1))
        start = int(rng.integers(0, max(1, frames - length + 1)))
        yield slice(start, start + length)


class SmallTrainer(ResilientTrainer):
    """The Trainer with AdamW, a cosine, and utterances of similar length side by side. Subclasses have the loss and the
    evaluation; their batches have `speech_ids` [B, T]."""

    model: Any
    train_dataset: Any
    batch_setting = "batch_size"

    def __init__(self, what: str, config: Any, model: Checkpoint, train: Utterances, dev: Utterances,
                 collate: Callable[[Sequence[Any]], dict[str, Tensor]]):
        """what: is trained, as an error calls it. config: `SmallSettings`. ConfigError where weights are sharded."""
        if is_sharded():
            raise ConfigError(f"{what} is small: train it with launch/accelerate/multi_gpu.yaml, not with FSDP or "
                              "DeepSpeed")
        settings: SmallSettings = config
        self.config, self._collate = config, collate
        with meeting_others():
            arguments = TrainingArguments(
                output_dir=settings.out, max_steps=settings.max_steps, seed=settings.seed, data_seed=settings.seed,
                per_device_train_batch_size=settings.batch_size, max_grad_norm=settings.max_grad_norm,
                bf16=settings.bf16, logging_steps=settings.log_steps, eval_strategy="steps",
                eval_steps=settings.eval_steps, save_steps=settings.save_steps, save_total_limit=2,
                remove_unused_columns=False, label_names=[], report_to=[], logging_nan_inf_filter=False,
                use_cpu=not torch.cuda.is_available())
        self.jsonl = JsonlLog(Path(settings.out) / "log.jsonl")
        super().__init__(model, arguments, train_dataset=train, eval_dataset=dev, data_collator=collate,
                         callbacks=[self.jsonl])

    def loader(self, dataset: Utterances, shuffle: bool) -> EpochLoader:
        """This process's batches of a dataset."""
        sampler = BucketBatchSampler(dataset.lengths, self.config.batch_size, self.config.seed, shuffle,
                                     self.args.process_index, self.args.world_size)
        # its own generator: a loader that draws its seed from the global one breaks resuming bit for bit
        return EpochLoader(dataset, batch_sampler=sampler, collate_fn=self._collate,  # type: ignore[arg-type]
                           generator=torch.Generator().manual_seed(self.config.seed))

    def get_train_dataloader(self) -> DataLoader:
        return self.loader(self.train_dataset, True)

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = adamw(self.model.parameters(), self.config.learning_rate, self.config.weight_decay)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.lr_scheduler is None:
            optimizer = optimizer or self.create_optimizer()
            self.lr_scheduler = cosine(optimizer, num_training_steps, self.config.warmup_steps)
        return self.lr_scheduler

    def longest_batch(self) -> dict[str, Any]:
        longest = np.argsort(self.train_dataset.lengths)[::-1][: self.config.batch_size]
        return self._collate([self.train_dataset[0, int(i)] for i in longest])

    def describe(self, inputs: Mapping[str, Any]) -> str:
        rows, longest = inputs["speech_ids"].shape
        return f"a batch of {rows} utterances of up to {longest} speech tokens"

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A directory that the model's `from_pretrained` loads."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            path = Path(output_dir or self.config.out)
            self.model.save_config(path)
            (path / "training_args.bin").unlink(missing_ok=True)  # a pickle; the settings are in config.yaml

    def fit(self, last: Path | None) -> None:
        """Train, from the checkpoint `last` on where there is one; a run that finished there only loads it.
        CheckpointError where it was trained on other data."""
        if last:
            check_same_data(last, self.origin)
        if last and step_of(last) >= self.config.max_steps:  # Trainer would add a step
            self.finish_from(last)
            self.model.load_state_dict(type(self.model).from_pretrained(last).state_dict())
            self.model.to(self.args.device)
        else:
            self.train(resume_from_checkpoint=str(last) if last else None)

    def export(self, card: Callable[[Any, Mapping[str, Any]], str], *, half: bool = False, **known: Any) -> Any:
        """The last evaluation, and the model with its card and provenance (with what else is `known`) in `out`; half:
        weights in float16. Returns it as it was written."""
        out, kind = self.out, type(self.model)
        metrics = self.evaluate()
        self.check_weights()
        if self.is_world_process_zero():
            self.model.save_pretrained(out, half=half)
            written = kind.from_pretrained(out)
            source = provenance(metrics=metrics, steps=self.state.global_step, processes=self.args.world_size,
                                checksum=written.checksum(),
                                config=json.loads(json.dumps(dataclasses.asdict(self.config))), **known)
            write_text(out / "README.md", card(written, source))
            names = ("config.json", "model.safetensors", "config.yaml", "README.md")
            write_json(out / "provenance.json", {**source, "files": {name: digest(out / name) for name in names}})
        self.accelerator.wait_for_everyone()
        return kind.from_pretrained(out)
