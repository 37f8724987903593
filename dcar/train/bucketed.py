"""Trainer of all models that read whole utterances: length-bucketed batches, AdamW with a cosine
schedule, model folders.

Stage one, recognisers and the chunk scorer are subclasses, which define the loss and the
evaluation.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from dcar.config import save_config
from dcar.config.resume import settings_stamp
from dcar.config.training import TrainerSettings
from dcar.optim import cosine
from dcar.process import end_process_group
from dcar.storage import write_text, writing
from dcar.tracking import provenance, write_provenance
from dcar.train.batches import BucketBatchSampler, EpochLoader, collate
from dcar.train.resilient import ResilientTrainer

logger = logging.getLogger(__name__)


def sharding() -> str:
    """Return "FSDP" or "DeepSpeed" if the launcher requested one of them, else an empty string."""
    for name in ("FSDP", "DeepSpeed"):
        if os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() in ("true", "1"):
            return name
    return ""


def arguments(config: TrainerSettings) -> TrainingArguments:
    """Return the arguments of transformers for a run, most of which have the names of the settings.
    On several CPUs, also start the process group."""
    shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainerSettings)}
    shared["output_dir"] = shared.pop("out")
    del shared["resume_from_checkpoint"]  # see `last_of`
    on_cpus = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and on_cpus and not dist.is_initialized():
        # transformers passes its ddp_timeout only to process groups of GPUs
        dist.init_process_group("gloo", timeout=timedelta(seconds=config.ddp_timeout))
    return TrainingArguments(
        **shared,
        data_seed=config.seed,
        adam_beta2=0.98,
        eval_strategy="steps",
        save_total_limit=2,
        remove_unused_columns=False,
        label_names=[],
        logging_nan_inf_filter=False,
        # Accelerate shards only on its default device, which is the CPU if there is no other
        use_cpu=not torch.cuda.is_available() and not sharding(),
        ddp_find_unused_parameters=False,
    )


class BucketedTrainer(ResilientTrainer):
    """Trainer with length-bucketed batches; see the module. `config` has the settings; datasets
    are addressed by (epoch, index) and have `lengths`."""

    model: Any
    train_dataset: Any
    eval_dataset: Any
    collate: Callable[..., Any] = staticmethod(collate)

    def __init__(self, config: Any, model: Any, train: Any, dev: Any):
        self.config = config
        self.kind = type(model)  # kept, because FSDP may replace it by a class of its own
        super().__init__(
            model,
            arguments(config),
            train_dataset=train,
            eval_dataset=dev,
            data_collator=self.collate,
        )

    def sampler(self, lengths: Sequence[int], shuffle: bool) -> BucketBatchSampler:
        """Return the sampler of this process's batches of utterances of these lengths."""
        return BucketBatchSampler(
            lengths,
            self.config.per_device_train_batch_size,
            self.config.seed,
            shuffle,
            self.args.process_index,
            self.args.world_size,
        )

    def loader(self, dataset: Any, shuffle: bool) -> EpochLoader:
        """Return the loader of this process's batches of a dataset."""
        # A generator of its own: if the loader drew its seed from the global one, a resumed run
        # would differ.
        workers = self.args.dataloader_num_workers
        return EpochLoader(
            dataset,
            batch_sampler=self.sampler(dataset.lengths, shuffle),  # type: ignore[arg-type]
            collate_fn=self.collate,
            num_workers=workers,
            pin_memory=self.args.device.type == "cuda",
            persistent_workers=shuffle and workers > 0,
            generator=torch.Generator().manual_seed(self.config.seed),
        )

    def on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch on this process's device. The host does not wait for the copy from
        pinned memory."""
        return {name: part.to(self.args.device, non_blocking=True) for name, part in batch.items()}

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        return super().training_step(model, self.on_device(inputs), num_items_in_batch)

    def get_train_dataloader(self) -> DataLoader:
        return self.loader(self.train_dataset, True)

    @torch.no_grad()
    def evaluate(self, *, ignore_keys: Any = None) -> dict[str, float]:  # type: ignore[override]
        """Return `dev_metrics`, after logging them and passing them to the callbacks.
        `ignore_keys` is passed by Trainer and not used."""
        self.model.eval()
        return self.evaluated({f"eval_{name}": value for name, value in self.dev_metrics().items()})

    def dev_metrics(self) -> dict[str, float]:
        """Return metrics on the dev data, over all processes. Subclasses define them; this is
        called without gradients and with the model in eval mode."""
        raise NotImplementedError

    def dev_sums(self, measure: Callable[[Any], Tensor]) -> Tensor:
        """Sum `measure(batch)` over the dev set across processes, in float64."""
        loader = self.loader(self.eval_dataset, False)
        sums = torch.zeros((), device=self.args.device)
        for step, batch in enumerate(loader):
            values = measure(self.on_device(batch)).double()
            if loader.batch_sampler.is_repeated(step):
                values = torch.zeros_like(values)
            sums = sums + values
        return self.accelerator.reduce(sums, "sum")  # type: ignore[return-value]

    def get_decay_parameter_names(self, model) -> list[str]:
        return [name for name, p in model.named_parameters() if p.dim() > 1]

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.lr_scheduler is None:
            optimizer = optimizer or self.create_optimizer()
            self.lr_scheduler = cosine(optimizer, num_training_steps, self.config.warmup_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that the model's `from_pretrained` loads. Every process must call this
        (FSDP gathers the weights)."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            path = Path(output_dir or self.config.out)
            self.accelerator.unwrap_model(self.model).save_config(path)
            # a pickle file; config.yaml has the settings
            (path / "training_args.bin").unlink(missing_ok=True)

    def prepare_data(self) -> None:
        """Compute what is needed once before the first step; nothing by default."""

    def make(
        self,
        last: Path | None,
        given: Any,
        card: Callable[[Any, Mapping[str, Any]], str],
        known: Mapping[str, Any],
        *,
        finished: Callable[[], None] | None = None,
        **origin: Any,
    ) -> Any:
        """Train, from the checkpoint `last` on if there is one, evaluate, and write the model with
        its card, settings and provenance. Return the model as it was written.

        The process group is closed: nothing that processes do together may follow.

        given: the settings as the user gave them. card: function from the model and its provenance
        to its README.md. known: further entries of the provenance. origin: entries that checkpoints
        record about data and base model. finished: called on the main process at the end. Raises
        CheckpointError if the checkpoint was trained on other data, or with settings that cannot
        change.
        """
        out, config = self.out, dataclasses.asdict(self.config)
        self.origin = provenance(settings=settings_stamp(given), seed=self.config.seed, **origin)
        done = self.check_resume(last) if last else False  # before anything is written
        if self.is_world_process_zero():
            with writing(out):
                save_config(given, out / "config.yaml")
            sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
            logger.info(
                "parameters: %.2f M, trained: %.2f M, training utterances: %d, processes: %d",
                sum(n for n, _ in sizes) / 1e6,
                sum(n for n, trained in sizes if trained) / 1e6,
                len(self.train_dataset),
                self.args.world_size,
            )
        if last and done:  # Trainer would train one more step
            self.finish_from(last)
            self.model.load_state_dict(self.kind.from_pretrained(last).state_dict())
            self.model.to(self.args.device)
        else:
            self.prepare_data()
            self.train(resume_from_checkpoint=str(last) if last else None)
        with self.doing("evaluating and exporting the trained model"), writing(out):
            metrics, step = self.final_metrics()
            self.check_weights()
            self.write_model()
            model = None
            if self.is_world_process_zero():
                model = self.kind.from_pretrained(out)
                source = provenance(
                    metrics=metrics,
                    steps=step,
                    processes=self.args.world_size,
                    checksum=model.checksum(),
                    config=json.loads(json.dumps(config)),
                    resumed=self.origin.get("resumed", []),
                    **known,
                )
                write_text(out / "README.md", card(model, source))
                names = ("config.json", "model.safetensors", "config.yaml", "README.md")
                write_provenance(out, source, names)
                if finished:
                    finished()
            self.accelerator.wait_for_everyone()
            end_process_group()
            return model or self.kind.from_pretrained(out)

    def final_metrics(self) -> tuple[dict[str, float], int]:
        """Return the last evaluation, and its step."""
        return self.evaluate(), self.state.global_step

    def write_model(self) -> None:
        """Write weights and config.json to `out`. Every process must call this."""
        raise NotImplementedError
