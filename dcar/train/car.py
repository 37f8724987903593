"""Stage one: train a CAR decoder with K heads (or FAR, with one) on a prepared corpus.

    accelerate launch -m dcar.train --config launch/recipes/car_starter.yaml out=runs/car
    dcar train --config launch/recipes/car_starter.yaml max_steps=2000

    accelerate launch -m dcar.train backbone.path=runs/cosyvoice2 backbone.train=lora data=… out=runs/car_lora

The last line trains heads on a pretrained language model (dcar/model/backbones) with LoRA, frozen, or jointly.

Paper: §3.1, eq. 1, App. C.1. Departures: see dcar/model/car.py (positions); the starter recipes use AdamW with a cosine
schedule, which learns faster than ScaledAdam with Eden in the few minutes of a quickstart.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from dcar.config import check, load_config, save_config, setting
from dcar.errors import CheckpointError, ConfigError, DataError
from dcar.model.backbones.decoder import TEXT_TOKENIZER_FOLDER, BackboneConfig, BackboneDecoder, cast_backbone
from dcar.model.backbones.lora import MODES, LoraSettings, add_lora, merge, save_adapter, set_trainable
from dcar.model.car import CARConfig, CARDecoder, CAROutput
from dcar.model.cards import decoder_card
from dcar.model.load import load_decoder_config
from dcar.optim import ScaledAdam, adamw, cosine, eden
from dcar.prepare.prepared import load_prepared, prepared_info, tokenizer_identity
from dcar.process import meeting_others, run_command
from dcar.sources.shipped import resolve
from dcar.storage import digest, sync, write_text, writing
from dcar.tokens.codebook import codebook_of
from dcar.tracking import provenance, write_json
from dcar.train.batches import BucketBatchSampler, EpochLoader, SpeechDataset, collate
from dcar.train.callbacks import JsonlLog, TensorBoardLog
from dcar.train.checkpoints import check_same_data, latest_checkpoint, step_of
from dcar.train.frozen import FrozenStates, on_frozen_trunk
from dcar.train.replay import ReplayBatchSampler, with_replay
from dcar.train.resilient import ResilientTrainer
from dcar.train.settings import RunSettings
from dcar.train.spoken import SpokenChoice, SpokenJudge, SpokenSettings

logger = logging.getLogger(__name__)

EXPORT = ".export.part"  # the folder that a finished model is written to before it takes its place


@dataclass
class BackboneTraining:
    """Heads on a pretrained language model instead of a decoder from scratch."""

    path: str = setting("", "Decoder written by `dcar convert-backbone`; empty = the decoder that `model` describes.")
    train: str = setting("lora", "lora: adapters and heads; heads: the model stays as it is; joint: everything.",
                         choices=MODES)
    lora: LoraSettings = setting(LoraSettings, "Adapters, y = W x + (alpha / rank) B A dropout(x).")
    dtype: str = setting("float32", "Storage of a model that is not trained itself.", choices=("float32", "bfloat16"))

    def __post_init__(self):
        check(self)
        if self.dtype == "bfloat16" and self.train == "joint":
            raise ConfigError("backbone.dtype=bfloat16 would lose small updates of trained weights: keep float32 and "
                              "set bf16=true, which computes in bfloat16")


@dataclass
class TrainConfig(RunSettings):
    """Settings of stage one."""

    head_weight_decay: float = setting(1.0, "Lambda of eq. 1: head k counts lambda^(k-1); 1 = uniform, the paper's.",
                                       above=0, maximum=1)
    loss_reduction: str = setting("per_head_mean", "How positions are averaged.",
                                 choices=("per_head_mean", "token_sum"))
    eos_tail: str = setting("fill", "Targets behind the end: end of speech again, or none.", choices=("fill", "ignore"))
    head_positions: float = setting(1.0, "Share of positions that the additional heads are trained on; less is faster.",
                                    above=0, maximum=1)
    gradient_checkpointing: bool = setting(False, "Recompute activations: less memory, about a third more time.")
    init_from: str = setting("", "Start from the weights of this decoder, not from scratch; starter = the shipped one.",
                             names=("starter",))
    freeze_trunk: bool = setting(False, "Train the additional heads alone, on the decoder of init_from, which may have "
                                        "heads of another number or kind: those of `model` are then made anew.")
    codebook_init: bool = setting(False, "From scratch: speech embeddings start from the tokenizer's centroids.")
    keep_states: bool = setting(False, "Of a frozen trunk: compute the hidden states of the training split once, each "
                                       "utterance behind one prompt, and keep them (2 bytes a value).")
    replay: str = setting("", "Another prepared corpus, rows of which fill every batch, so that a small one does not "
                              "make the decoder forget; starter = the shipped one.",
                          names=("starter",))
    replay_share: float = setting(0.5, "Share of a batch that is replayed; an epoch is one of `data` alone.", above=0,
                                  below=1)
    spoken: SpokenSettings = setting(SpokenSettings, "The best step by what it says, not by its loss.")
    model: CARConfig = setting(CARConfig, "Shape of the decoder; vocabulary sizes are taken from the data.")
    backbone: BackboneTraining = setting(BackboneTraining, "Heads on a pretrained language model instead.")

    def __post_init__(self):
        super().__post_init__()
        if not self.backbone.path:
            self.model.check_heads()
        if self.freeze_trunk and (not self.init_from or self.model.num_prediction_heads == 1):
            raise ConfigError("freeze_trunk trains additional heads on a decoder that there is: give init_from=… and "
                              "model.num_prediction_heads of at least 2 (on a language model: backbone.train=heads)")
        if self.keep_states and (not self.freeze_trunk or self.input_corruption or self.own_tokens):
            raise ConfigError("keep_states keeps what a trunk that does not change says of its data: set "
                              "freeze_trunk=true, input_corruption=0 and own_tokens=0")
        if self.codebook_init and (self.init_from or self.backbone.path):
            raise ConfigError("codebook_init is a start from scratch; init_from and backbone.path name other weights")
        if self.replay and self.batch_size < 2:
            raise ConfigError("replay fills a part of every batch: batch_size must be 2 or more")

    @property
    def head_weights(self) -> list[float]:
        return [self.head_weight_decay**k for k in range(self.model.num_prediction_heads)]


class CARTrainer(ResilientTrainer):
    """The Trainer with length-bucketed batches, the paper's optimiser, and a loss and accuracy per head."""

    model: CARDecoder
    train_dataset: SpeechDataset
    eval_dataset: SpeechDataset
    batch_setting = "batch_size"

    def __init__(self, config: TrainConfig, model: CARDecoder, train: SpeechDataset, dev: SpeechDataset, own: int = 0):
        """own: how many of the training rows are not replayed; the replayed ones stand behind them. 0 = all."""
        if config.spoken.sentences and is_sharded():
            raise ConfigError("spoken.sentences needs the whole decoder in one process, which FSDP or DeepSpeed do not "
                              "have: set it to 0, or launch with launch/accelerate/multi_gpu.yaml")
        if config.optimizer == "scaled_adam" and is_sharded():
            raise ConfigError("scaled_adam scales the steps of a tensor by its root mean square, and FSDP or DeepSpeed "
                              "would show it pieces of tensors: set optimizer=adamw (learning_rate about 5e-4), or "
                              "launch with launch/accelerate/multi_gpu.yaml")
        self.config, self.own = config, own
        self.choice: SpokenChoice | None = None  # where the best step is chosen by what it says
        with meeting_others():
            on_cpus = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")
            if int(os.environ.get("WORLD_SIZE", 1)) > 1 and on_cpus and not dist.is_initialized():
                # transformers hands its ddp_timeout on to GPUs' process groups only
                dist.init_process_group("gloo", timeout=timedelta(minutes=config.wait_minutes))
            arguments = self._arguments(config)
        self.jsonl = JsonlLog(Path(config.out) / "log.jsonl")
        callbacks: list[TrainerCallback] = [self.jsonl]
        if config.tensorboard:
            callbacks.append(TensorBoardLog(Path(config.out) / "tensorboard"))
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        super().__init__(model, arguments, train_dataset=train, eval_dataset=dev, data_collator=collate,
                         callbacks=callbacks)
        alone = self.args.world_size < int(os.environ.get("WORLD_SIZE", 1))  # DeepSpeed that found no backend
        if is_sharded() and (alone or not (self.is_fsdp_enabled or self.is_deepspeed_enabled)):
            raise ConfigError(f"{'FSDP' if asked_for('FSDP') else 'DeepSpeed'} was asked for, but Accelerate does not "
                              "shard on CPUs or in a single process and would train data-parallel without a word: "
                              "launch several GPU processes without ACCELERATE_USE_CPU, or use "
                              "launch/accelerate/multi_gpu.yaml (cpu2.yaml on CPUs)")

    @staticmethod
    def _arguments(config: TrainConfig) -> TrainingArguments:
        return TrainingArguments(
            output_dir=config.out, max_steps=config.max_steps, seed=config.seed, data_seed=config.seed,
            per_device_train_batch_size=config.batch_size, gradient_accumulation_steps=config.gradient_accumulation,
            max_grad_norm=0.0 if config.optimizer == "scaled_adam" else config.max_grad_norm, bf16=config.bf16,
            logging_steps=config.log_steps, eval_strategy="steps", eval_steps=config.eval_steps,
            save_steps=config.save_steps, save_total_limit=2, remove_unused_columns=False, label_names=[],
            report_to=[], dataloader_num_workers=config.workers,
            disable_tqdm=None, logging_nan_inf_filter=False,
            # Accelerate shards on its default device only, which is the CPU where there is no other
            use_cpu=not torch.cuda.is_available() and not is_sharded(), ddp_timeout=round(60 * config.wait_minutes),
        )

    def get_train_dataloader(self) -> DataLoader:
        return self._loader(self.train_dataset, shuffle=True)

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        return self._loader(eval_dataset or self.eval_dataset, shuffle=False)

    def _loader(self, dataset: SpeechDataset, shuffle: bool) -> EpochLoader:
        config, place = self.config, (self.args.process_index, self.args.world_size)
        sampler: BucketBatchSampler
        if shuffle and config.replay:
            sampler = ReplayBatchSampler(dataset.lengths, self.own, config.batch_size, config.replay_share, config.seed,
                                         *place)
        else:
            sampler = BucketBatchSampler(dataset.lengths, config.batch_size, config.seed, shuffle, *place)
        # its own generator: a loader that draws its seed from the global one breaks resuming bit for bit
        return EpochLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=self.config.workers,
                           generator=torch.Generator().manual_seed(self.config.seed))

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            if self.config.optimizer == "scaled_adam":
                self.optimizer = ScaledAdam(parameters, lr=self.config.learning_rate)
            else:
                self.optimizer = adamw(parameters, self.config.learning_rate, self.config.weight_decay)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.lr_scheduler is None:
            optimizer = optimizer or self.optimizer
            if self.config.optimizer == "scaled_adam":
                per_epoch = math.ceil(len(self.get_train_dataloader()) / self.config.gradient_accumulation)
                self.lr_scheduler = eden(optimizer, per_epoch, warmup_batches=self.config.warmup_steps)
            else:
                self.lr_scheduler = cosine(optimizer, num_training_steps, self.config.warmup_steps)
        return self.lr_scheduler

    def compute_loss(self, model, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch=None):
        config = self.config
        if config.input_corruption and model.training:
            inputs = {**inputs, "speech_inputs": self._corrupt(inputs["speech_ids"])}
        own = {"own_tokens": config.own_tokens} if config.own_tokens and model.training else {}
        output: CAROutput = model(
            **inputs, **own, head_weights=config.head_weights, reduction=config.loss_reduction,
            eos_tail=config.eos_tail, head_positions=config.head_positions if model.training else 1)
        return (output.loss, output) if return_outputs else output.loss  # Trainer divides by accumulated batches

    def _corrupt(self, speech_ids: Tensor) -> Tensor:
        """Replace a share of the codes by random ones: the model learns to recover from its own errors. BOS stays."""
        codes = self.config.model.speech_vocab_size  # of a backbone too: `run` writes its shape there
        hit = (torch.rand(speech_ids.shape, device=speech_ids.device) < self.config.input_corruption)
        hit &= speech_ids < codes
        return torch.where(hit, torch.randint_like(speech_ids, codes), speech_ids)

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Teacher-forced loss (nats) and accuracy of every head on the dev split, over all processes."""
        self.model.eval()
        sums = torch.zeros(3, self.config.model.num_prediction_heads, dtype=torch.float64, device=self.args.device)
        with self.compute_loss_context_manager():
            loader = self.get_eval_dataloader(eval_dataset)
            sampler = cast(BucketBatchSampler, loader.batch_sampler)
            for step, batch in enumerate(loader):
                _, out = self.compute_loss(self.model, self._prepare_inputs(batch), return_outputs=True)
                if not sampler.is_repeated(step):
                    sums += torch.stack((out.head_losses * out.targets, out.head_accuracies * out.targets, out.targets))
        sums = self.accelerator.reduce(sums, "sum")
        loss, accuracy = (sums[0] / sums[2]).tolist(), (sums[1] / sums[2]).tolist()
        metrics = {f"{metric_key_prefix}_loss": sum(loss)}
        for k, (nats, share) in enumerate(zip(loss, accuracy, strict=True), start=1):
            metrics[f"{metric_key_prefix}_head{k}_loss"] = nats
            metrics[f"{metric_key_prefix}_head{k}_accuracy"] = share
        return self.evaluated(metrics)

    def longest_batch(self) -> dict[str, Any]:
        longest = np.argsort(self.train_dataset.lengths)[::-1][: self.config.batch_size]
        return collate([self.train_dataset[0, int(i)] for i in longest])

    def describe(self, inputs: Mapping[str, Any]) -> str:
        rows, longest = inputs["speech_ids"].shape
        phonemes = inputs["text_ids"].shape[1]
        return f"a batch of {rows} utterances of up to {longest} speech tokens and {phonemes} phonemes"

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A directory that CARDecoder.from_pretrained loads; every process calls it (FSDP gathers the weights)."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            path = Path(output_dir or self.config.out)
            self.accelerator.unwrap_model(self.model).save_config(path)
            (path / "training_args.bin").unlink(missing_ok=True)  # a pickle; the settings are in config.yaml


def asked_for(what: str) -> bool:
    """Whether the launcher asked for FSDP or DEEPSPEED."""
    return os.environ.get(f"ACCELERATE_USE_{what}", "false").lower() in ("true", "1")


def is_sharded() -> bool:
    """Whether the launcher asked for either."""
    return asked_for("FSDP") or asked_for("DEEPSPEED")


def run(config: TrainConfig) -> CARDecoder:
    """Train (or go on training) and save the decoder, its config, card, log and provenance into `config.out`.

    Raises DataError for data that is missing, broken, or of another phoneme inventory than this program's,
    CheckpointError for an out folder that holds another model's run, ConfigError where `init_from` is another model.
    """
    out = Path(config.out)
    prepared = prepared_info(config.data)
    train, dev = load_prepared(config.data, "train"), load_prepared(config.data, "dev")
    config, wanted, make = plan(config, data_identity(prepared))
    last = latest_checkpoint(out) if config.resume else None
    if last and (differences := differing(load_decoder_config(last), wanted)):
        raise CheckpointError(f"{last}: a checkpoint of another model: {differences}; choose another out, or "
                              "resume=false to start again")
    torch.manual_seed(config.seed)
    return fit(config, make(), train, dev, prepared, config, last)


def fit(config: TrainConfig, model: CARDecoder, train, dev, prepared: dict[str, Any], saved: Any,
        last: Path | None) -> CARDecoder:
    """Train the parameters of `model` that require a gradient on prepared splits; save weights, log, card,
    provenance and `saved` (the configuration that the user gave) into `config.out`.

    It goes on from the checkpoint `last`, if there is one; the caller has seen that it is of this model.
    """
    out = Path(config.out)
    rows = with_replay(train, config.replay, data_identity(prepared)) if config.replay else train
    trainer = CARTrainer(config, model, SpeechDataset(rows, config.model, config.prompt_tokens, config.seed),
                         SpeechDataset(dev, config.model, config.prompt_tokens, config.seed), own=len(train))
    if config.spoken.sentences:
        judge = SpokenJudge.load(config.spoken, model, config.data, config.prompt_tokens, config.seed)
        trainer.choice = SpokenChoice(trainer, judge, out)
        trainer.add_callback(trainer.choice)
    if trainer.is_world_process_zero():
        with writing(out):
            save_config(saved, out / "config.yaml")
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        logger.info("%.2f M parameters, %.2f M of them trained, %d training utterances, %d replayed, %d processes",
                    sum(p.numel() for p in model.parameters()) / 1e6, sum(trained) / 1e6, len(train),
                    len(rows) - len(train), trainer.args.world_size)
    trainer.origin = provenance(
        config=dataclasses.asdict(config), seed=config.seed,
        data={"path": config.data, "prepared.json": digest(Path(config.data) / "prepared.json")})
    if last:
        check_same_data(last, trainer.origin)
    if last and step_of(last) >= config.max_steps:  # finished before; Trainer would add a step
        trainer.finish_from(last)
        if trainer.choice:
            trainer.choice.read()
        model.load_state_dict(type(model).from_pretrained(last).state_dict())
        model.to(trainer.args.device)
    else:
        if config.keep_states:
            trainer.train_dataset = FrozenStates(trainer.train_dataset, model, config.batch_size)
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    with trainer.doing("evaluating and exporting the trained model"), writing(out):
        return export(config, model, trainer, prepared)


def export(config: TrainConfig, model: CARDecoder, trainer: CARTrainer, prepared: dict[str, Any]) -> CARDecoder:
    """The last evaluation, and the decoder with its card and provenance in `config.out`."""
    out = Path(config.out)
    metrics, step = trainer.evaluate(), trainer.state.global_step
    if trainer.choice and (best := trainer.choice.agreed()) != step:
        logger.info("step %d said the dev sentences best and is what is written", best)
        model.load_state_dict(trainer.choice.best_weights(best))
        metrics, step = trainer.evaluate(), best
    trainer.check_weights()
    trainer.save_model(str(out / EXPORT))
    trainer.accelerator.wait_for_everyone()
    unset_hf_deepspeed_config()  # ZeRO-3 would shard the next language model too, which one process alone loads here
    if trainer.is_world_process_zero():
        for path in sorted((out / EXPORT).iterdir()):  # whole files take the places of older ones
            sync(path)
            path.replace(out / path.name)
        (out / EXPORT).rmdir()
        decoder = type(model).from_pretrained(out)
        if isinstance(decoder, BackboneDecoder):
            finish_backbone(decoder, Path(config.backbone.path), out)
            decoder = type(model).from_pretrained(out)
        source = provenance(
            data=prepared, metrics=metrics, steps=step, processes=trainer.args.world_size,
            checksum=decoder.checksum(), config=dataclasses.asdict(config), backbone=config.backbone.path)
        write_text(out / "README.md", decoder_card(decoder, source))
        names = ("config.json", "model.safetensors", "config.yaml", "README.md")
        write_json(out / "provenance.json", {**source, "files": {name: digest(out / name) for name in names}})
    trainer.accelerator.wait_for_everyone()
    return type(model).from_pretrained(out)


def plan(config: TrainConfig, identity: dict[str, Any]) -> tuple[TrainConfig, CARConfig | BackboneConfig,
                                                                 Callable[[], CARDecoder]]:
    """The resolved settings, the configuration that a checkpoint of this run has, and what makes the model."""
    if config.backbone.path:
        return plan_backbone(config, identity)
    wanted = dataclasses.replace(config.model, **identity)

    def make() -> CARDecoder:
        if not config.init_from:
            model = CARDecoder(wanted)
            if config.codebook_init:
                model.start_from_codebook(require_codebook(config.data))
            return model
        starter = "far" if wanted.num_prediction_heads == 1 else "decoder"
        model = CARDecoder.from_pretrained(resolve(config.init_from, starter))
        if config.freeze_trunk:
            model = on_frozen_trunk(model, wanted)
        if differences := differing(model.config, wanted):
            raise ConfigError(f"init_from {config.init_from} does not fit the configured model and data: {differences}")
        return model

    return dataclasses.replace(config, model=wanted), wanted, make


def require_codebook(data: str) -> np.ndarray:
    """The codebook of the tokenizer of prepared `data`; ConfigError if it is of a kind that has none."""
    codebook = codebook_of(prepared_info(data)["tokenizer"], data)
    if codebook is None:
        raise ConfigError(f"{data}: its tokenizer has no k-means codebook to start from; set codebook_init=false")
    return codebook


def plan_backbone(config: TrainConfig, identity: dict[str, Any]) -> tuple[TrainConfig, BackboneConfig,
                                                                          Callable[[], CARDecoder]]:
    """`plan` for a pretrained language model; ConfigError or DataError where settings or data are not its own."""
    settings = config.backbone
    found = BackboneDecoder.load_config(settings.path)
    for name, what in (("speech_vocab_size", "the number of speech codes"), ("tokenizer", "the speech tokenizer"),
                       ("phonemes", "the text tokens")):
        ours = getattr(found, name)
        if ours and ours != identity[name]:
            raise DataError(f"{config.data}: {what} is {identity[name]}, but {settings.path} has {ours}; " + (
                f"run dcar retokenize data={config.data} decoder={settings.path} out=…" if name == "phonemes"
                else "prepare the corpus with the model's own speech tokenizer"))
    wanted = dataclasses.replace(found, tokenizer=identity["tokenizer"], phonemes=identity["phonemes"],
                                 lora=dataclasses.asdict(settings.lora) if settings.train == "lora" else None)
    shape = decoder_shape(wanted)
    if config.model not in (CARConfig(), shape):
        raise ConfigError("`model` describes a decoder from scratch, and backbone.path names one that has its shape "
                          "already: remove the settings of `model`")
    if config.init_from:
        raise ConfigError("init_from and backbone.path both name weights to start from: give one")

    def make() -> CARDecoder:
        model = BackboneDecoder.from_pretrained(settings.path)
        model.config.tokenizer, model.config.phonemes = wanted.tokenizer, wanted.phonemes
        if settings.train == "lora":
            add_lora(model, settings.lora)
        set_trainable(model, settings.train)
        return cast(CARDecoder, cast_backbone(model, getattr(torch, settings.dtype)))

    return dataclasses.replace(config, model=shape), wanted, make


def decoder_shape(config: CARConfig | BackboneConfig) -> CARConfig:
    """What the trainer reads of a model: a CARConfig as it is; of a language model what the two have in common."""
    if isinstance(config, CARConfig):
        return config
    return CARConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(CARConfig)
                        if hasattr(config, f.name)}, dropout=0.0)


def finish_backbone(decoder: BackboneDecoder, origin: Path, out: Path) -> None:
    """Merge the adapters into the decoder of `out`, keep them beside it, and bring the text tokenizer along."""
    if decoder.config.lora:
        save_adapter(decoder, out / "adapter")
        merge(decoder).save_pretrained(out)
    if (tokenizer := origin / TEXT_TOKENIZER_FOLDER).is_dir():
        shutil.copytree(tokenizer, out / TEXT_TOKENIZER_FOLDER, dirs_exist_ok=True)


def data_identity(prepared: dict) -> dict[str, Any]:
    """Vocabulary and names that tie a decoder to its tokenizer and phoneme inventory."""
    return {
        "speech_vocab_size": prepared["tokenizer"]["vocab_size"], "tokenizer": tokenizer_identity(prepared),
        "phonemes": prepared["phonemes"]["version"],
    }


def differing(found: CARConfig | BackboneConfig, wanted: CARConfig | BackboneConfig) -> str:
    """The fields in which two decoders differ, for a message; empty if there are none."""
    if type(found) is not type(wanted):
        return "one is on a pretrained language model, the other is not"
    ours, theirs = (json.loads(json.dumps(dataclasses.asdict(c))) for c in (wanted, found))
    return ", ".join(f"{k} is {theirs[k]!r}, here {ours[k]!r}" for k in ours if ours[k] != theirs[k])


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(load_config(TrainConfig, arguments))


if __name__ == "__main__":
    sys.exit(run_command("dcar.train", main))
