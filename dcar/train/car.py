"""Stage one: train a CAR decoder with K heads (or FAR, with one) on a prepared corpus.

    accelerate launch -m dcar.cli train --config car_starter out=runs/car
    dcar train --config car_starter max_steps=2000

    accelerate launch -m dcar.cli train backbone.path=runs/cosyvoice2 backbone.train=lora \\
        data=… out=runs/car_lora

The last command trains heads on a pretrained language model (dcar/model/backbones), which is
adapted with LoRA, frozen, or trained jointly.

Paper: §3.1, eq. 1, App. C.1. Departures: see dcar/model/car.py (positions); the starter recipes use
AdamW with a cosine schedule, which learns faster than ScaledAdam with Eden in the few minutes of a
quickstart.
"""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from dcar.config import load_config
from dcar.errors import ConfigError
from dcar.model.backbones.decoder import BackboneDecoder
from dcar.model.batch import SpeechBatch
from dcar.model.car import CARDecoder, CAROutput
from dcar.model.cards import decoder_card
from dcar.model.load import load_decoder_config
from dcar.optim import ScaledAdam, eden
from dcar.prepare.columns import Split
from dcar.prepare.prepared import PreparedInfo, load_split, prepared_info
from dcar.process import run_claimed
from dcar.storage import sync
from dcar.train.batches import (
    BucketBatchSampler,
    FrozenStates,
    ReplayBatchSampler,
    SpeechDataset,
    TokenBatchSampler,
    with_replay,
)
from dcar.train.bucketed import BucketedTrainer, sharding
from dcar.train.checkpoints import data_stamp, last_of
from dcar.train.plan import data_identity, finish_backbone, plan, write_units
from dcar.train.settings import TrainConfig

logger = logging.getLogger(__name__)

EXPORT = ".export.part"  # folder that a finished model is written to before it is moved to `out`


class RunTrainer(BucketedTrainer):
    """Trainer of a run with `TokenModelSettings`: the paper's optimiser or AdamW, batches limited
    by tokens, any number of processes."""

    def __init__(self, config: Any, model: Any, train: Any, dev: Any):
        """Create the trainer. config: a `TokenModelSettings` with the shape `model`. Raises
        ConfigError if the optimiser or the compiler cannot work on sharded weights."""
        if config.optim == "scaled_adam" and sharding():
            raise ConfigError(
                "optim=scaled_adam scales the steps of a tensor by its root mean square, but "
                "FSDP and DeepSpeed split tensors among processes: set "
                "optim=adamw_torch_fused (learning_rate about 5e-4), or launch with "
                "launch/accelerate/multi_gpu.yaml"
            )
        if config.torch_compile and sharding():
            raise ConfigError(
                "torch_compile=true compiles whole models, but FSDP and DeepSpeed split them among "
                "processes: set torch_compile=false, or launch with "
                "launch/accelerate/multi_gpu.yaml"
            )
        if config.per_device_train_batch_tokens:
            self.batch_setting = "per_device_train_batch_tokens"
        for parameter in model.parameters():
            # empty parameters (no additional heads) get no gradient, which DDP would wait for
            if not parameter.numel():
                parameter.requires_grad_(False)
        if config.torch_compile:
            model.compile(dynamic=True)
        super().__init__(config, model, train, dev)
        if config.optim == "scaled_adam":  # it clips by itself
            self.args.max_grad_norm = 0.0
        # true if DeepSpeed found no backend
        alone = self.args.world_size < int(os.environ.get("WORLD_SIZE", 1))
        if sharding() and (alone or not (self.is_fsdp_enabled or self.is_deepspeed_enabled)):
            raise ConfigError(
                f"{sharding()} was requested, but Accelerate does not shard on CPUs or in a "
                "single process, and would silently train data-parallel: launch several GPU "
                "processes without ACCELERATE_USE_CPU, or use launch/accelerate/multi_gpu.yaml "
                "(cpu2.yaml on CPUs)"
            )

    def sampler(self, lengths: Sequence[int], shuffle: bool) -> BucketBatchSampler:
        config = self.config
        if shuffle and config.per_device_train_batch_tokens:
            return TokenBatchSampler(
                lengths,
                config.per_device_train_batch_tokens,
                config.seed,
                self.args.process_index,
                self.args.world_size,
                self.train_dataset.longest_prompt,
            )
        return super().sampler(lengths, shuffle)

    def create_optimizer(self, model=None):
        if self.optimizer is None and self.config.optim == "scaled_adam":
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = ScaledAdam(parameters, lr=self.config.learning_rate)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.lr_scheduler is None and self.config.optim == "scaled_adam":
            batches = len(self.get_train_dataloader())
            per_epoch = math.ceil(batches / self.config.gradient_accumulation_steps)
            optimizer = optimizer or self.create_optimizer()
            self.lr_scheduler = eden(optimizer, per_epoch, warmup_batches=self.config.warmup_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def _corrupt(self, speech_ids: Tensor) -> Tensor:
        """Replace a share of the codes by random ones: the model learns to recover from its own
        errors. BOS stays."""
        # valid for a backbone too, because `run` stores its shape in config.model
        codes = self.config.model.speech_vocab_size
        hit = torch.rand(speech_ids.shape, device=speech_ids.device) < self.config.input_corruption
        hit &= speech_ids < codes
        return torch.where(hit, torch.randint_like(speech_ids, codes), speech_ids)

    def write_model(self) -> None:
        part = self.out / EXPORT
        self.save_model(str(part))
        self.accelerator.wait_for_everyone()
        # else ZeRO-3 would also shard the next language model, which only one process loads
        unset_hf_deepspeed_config()
        if self.is_world_process_zero():
            for path in sorted(part.iterdir()):  # complete files replace older ones
                sync(path)
                path.replace(self.out / path.name)
            part.rmdir()


class CARTrainer(RunTrainer):
    """Trainer of a decoder, with a loss and an accuracy per head."""

    def __init__(
        self,
        config: TrainConfig,
        model: CARDecoder,
        train: SpeechDataset,
        dev: SpeechDataset,
        own: int = 0,
    ):
        """Create the trainer. own: number of training rows that are not replayed; the replayed
        ones follow them. 0 = all. Raises ConfigError if `spoken.sentences` is set and weights
        are sharded."""
        if config.spoken.sentences and sharding():
            raise ConfigError(
                "spoken.sentences needs the whole decoder in one process, but FSDP and DeepSpeed "
                "split it among processes: set spoken.sentences=0, or launch with "
                "launch/accelerate/multi_gpu.yaml"
            )
        self.own = own
        self.choice: Any = None  # the `SpokenChoice`, if spoken.sentences is set
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        super().__init__(config, model, train, dev)

    def sampler(self, lengths: Sequence[int], shuffle: bool) -> BucketBatchSampler:
        config = self.config
        if not (shuffle and config.replay):
            return super().sampler(lengths, shuffle)
        return ReplayBatchSampler(
            lengths,
            self.own,
            config.per_device_train_batch_size,
            config.replay_share,
            config.seed,
            self.args.process_index,
            self.args.world_size,
        )

    def prepare_data(self) -> None:
        if self.config.keep_states:
            batch_size = self.config.per_device_train_batch_size
            self.train_dataset = FrozenStates(self.train_dataset, self.model, batch_size)

    def finish_from(self, checkpoint: Path) -> None:
        super().finish_from(checkpoint)
        if self.choice:
            self.choice.read()

    def compute_loss(
        self,
        model,
        inputs: Any,  # a SpeechBatch
        return_outputs: bool = False,
        num_items_in_batch=None,
    ):
        config = self.config
        if config.input_corruption and model.training:
            inputs = {**inputs, "speech_inputs": self._corrupt(inputs["speech_ids"])}
        share = config.head_positions if model.training else 1
        output: CAROutput = model(inputs, config.head_weights, share)
        # Trainer divides by the number of accumulated batches
        return (output.loss, output) if return_outputs else output.loss

    def dev_metrics(self) -> dict[str, float]:
        """Return the teacher-forced loss (nats) and accuracy of every head."""

        def measure(batch: SpeechBatch) -> Tensor:
            _, out = self.compute_loss(self.model, batch, return_outputs=True)
            sums = torch.stack(
                (out.head_losses, out.head_accuracies, torch.ones_like(out.head_losses))
            )
            return sums * len(batch["positions"])

        with self.compute_loss_context_manager():
            sums = self.dev_sums(measure)
        loss, accuracy = (sums[:2] / sums[2]).tolist()
        metrics = {"loss": sum(loss)}
        for k, (nats, share) in enumerate(zip(loss, accuracy, strict=True), start=1):
            metrics |= {f"head{k}_loss": nats, f"head{k}_accuracy": share}
        return metrics

    def final_metrics(self) -> tuple[dict[str, float], int]:
        """Return metrics and step of the weights that are written: those of the last step, or,
        with `spoken.sentences`, of the step with the fewest word errors."""
        metrics, step = super().final_metrics()
        if self.choice and (best := self.choice.agreed()) != step:
            logger.info(
                "the weights of step %d are written: they made the fewest word errors on the dev "
                "sentences",
                best,
            )
            self.model.load_state_dict(self.choice.best_weights(best))
            metrics, step = self.evaluate(), best
        return metrics, step

    def write_model(self) -> None:
        super().write_model()
        if self.is_world_process_zero():
            write_units(prepared_info(self.config.data), self.out)
        if self.is_world_process_zero() and issubclass(self.kind, BackboneDecoder):
            finish_backbone(
                self.kind.from_pretrained(self.out), Path(self.config.backbone.path), self.out
            )

    def describe(self, inputs: Mapping[str, Any]) -> str:
        rows, longest = inputs["speech_ids"].shape
        phonemes = inputs["text_ids"].shape[1]
        return (
            f"a batch of {rows} utterances of up to {longest} speech tokens and {phonemes} phonemes"
        )


def run(config: TrainConfig) -> CARDecoder:
    """Train (or resume training) and save the decoder, its config, card, log and provenance in
    `config.out`.

    Raises DataError for data that is missing, broken, or made with another phoneme inventory than
    this program's, CheckpointError if out holds another model's run, ConfigError if `init_from` is
    another model.
    """
    prepared = prepared_info(config.data)
    train, dev = load_split(config.data, "train"), load_split(config.data, "dev")
    config, wanted, make = plan(config, data_identity(prepared))
    last = last_of(config, load_decoder_config, wanted, "model")
    torch.manual_seed(config.seed)
    return fit(config, make(), train, dev, prepared, config, last)


def fit(
    config: TrainConfig,
    model: CARDecoder,
    train: Split,
    dev: Split,
    prepared: PreparedInfo,
    saved: Any,
    last: Path | None,
) -> CARDecoder:
    """Train the parameters of `model` that require a gradient on prepared splits; save weights,
    log, card, provenance and `saved` (the configuration that the user gave) in `config.out`. Return
    the model as it was written.

    Training resumes from the checkpoint `last`, if there is one; the caller has checked that it
    belongs to this model.
    """
    rows = with_replay(train, config.replay, prepared) if config.replay else train
    trainer = CARTrainer(
        config,
        model,
        SpeechDataset(rows, config.model, config.prompt_tokens, config.seed),
        SpeechDataset(dev, config.model, config.prompt_tokens, config.seed),
        own=len(train),
    )
    if config.spoken.sentences:
        from dcar.train.spoken import SpokenChoice  # with a vocoder and a recogniser

        trainer.choice = SpokenChoice.load(trainer)
        trainer.add_callback(trainer.choice)
    if config.replay:
        logger.info("%d of the training utterances are replayed ones", len(rows) - len(train))
    return trainer.make(
        last,
        saved,
        decoder_card,
        {"data": prepared.content, "backbone": config.backbone.path},
        data=data_stamp(config.data),
    )


CONFIG = TrainConfig


def main(arguments: list[str] | None = None) -> None:
    run_claimed(run, load_config(CONFIG, arguments), resumes=True)
