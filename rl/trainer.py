"""DCPO as a `transformers.Trainer` with the arguments of `trl.GRPOTrainer`.

A step: every process decodes its prompts G times with the present policy (rl/rollout.py), rewards
the rollouts (rl/rewards.py), and makes `num_iterations` clipped updates on them (rl/objective.py).
Rollouts and advantages of all accumulated micro-batches are made before the first of them is
trained on, so an update does not depend on how its rollouts are divided. A batch contains its
address (epoch, position), and every random number is addressed by (seed, epoch, utterance, member,
position), so that a resumed run is exactly equal to an uninterrupted one. The checkpoint holds the
reference policy and the policy that made the rollouts in progress.
"""

import math
import time
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput

from dcar.decoding import PolicyChunk, decode
from dcar.errors import CheckpointError, ConfigError, RewardError
from dcar.model.companions import load_policy
from dcar.model.draft import AnyDecoder
from dcar.model.load import load_decoder
from dcar.prompts.items import PromptItem
from dcar.prompts.load import vocoder_for
from dcar.recognition.base import Recognizer, check_reward_recognizer
from dcar.recognition.load import load_recognizer
from dcar.text.wer import corpus_wer
from dcar.train.batches import EpochLoader
from dcar.train.checkpoints import latest_checkpoint, why_incomplete
from dcar.train.resilient import ResilientTrainer
from dcar.vocoder.base import Vocoder
from dcar.vocoder.load import vocoder_identity
from heads.policy import ChunkPolicy
from rl import objective
from rl.advantages import AdvantageEstimator
from rl.config import DCPOConfig, required
from rl.data import PromptBatches, Prompts, items_of, prompts_of
from rl.metrics import Metrics, ShownDCPO, add_decisions, add_rollouts, add_update, scalars
from rl.natural import NaturalGradient, Product, fisher_product
from rl.pass_cost import PassCost, measure_pass_cost, stored_pass_cost
from rl.policies import bound, check_fits, guidance_range, make_policy
from rl.rewards import (
    BUILT_IN,
    Reward,
    asks_recognizer,
    import_rewards,
    needs_sound,
    path_of,
    score,
    version_of,
)
from rl.rollout import Roller, RolloutBatch, log_probs_of
from rl.transcription import (
    RECORDINGS_FOR_CHECK,
    GroundTruth,
    RolloutRecord,
    UnusedRecognizer,
    check_reads,
    synthesise,
    transcribe,
)

__all__ = ["DCPOConfig", "DCPOTrainer"]

STATE = "dcpo.safetensors"


@dataclass
class UpdateBatch:
    """Rollouts of a micro-batch, with everything that the updates on them share."""

    batch: RolloutBatch
    advantages: Tensor  # [R], or [R, M] with credit by decision
    weights: Tensor  # [R] weights in the loss
    # [R, M] log-probabilities under the rollout policy; None if the update is on-policy
    old: Tensor | None
    # [R, M, K] log-probabilities of the reference policy; with N candidates [R, M, N K]
    reference: Tensor
    normalizer: float | Tensor


class DCPOTrainer(ResilientTrainer):
    """Trainer of a chunk policy on rollouts of a frozen decoder.

        trainer = DCPOTrainer(
            model="starter", reward_funcs=["token_likelihood", my_reward], args=args,
            train_dataset=dataset, decoder="starter",
        )

    model: a policy, of which a copy is trained, or its folder; None: a new one, by
    `args.policy_…`. reward_funcs: one or several built-in names, dotted paths and functions
    `(completions, **columns) -> list[float]` (rl/rewards.py), added with `args.reward_weights`;
    None: those of args. train_dataset, eval_dataset: made by `rl.data.load_dataset`, or lists of
    `PromptItem`; None: the splits train and dev of `args.data`. decoder, vocoder, recognizer: None:
    those of args; a decoder that is given as a module keeps its own precision. Errors are those of
    `dcar.errors`.
    """

    args: DCPOConfig
    train_dataset: Prompts
    eval_dataset: Prompts | None

    progress = ShownDCPO

    def __init__(
        self,
        model: ChunkPolicy | str | None = None,
        reward_funcs: str | Reward | Sequence[str | Reward] | None = None,
        args: DCPOConfig | None = None,
        train_dataset: Dataset | Sequence[PromptItem] | None = None,
        eval_dataset: Dataset | Sequence[PromptItem] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        *,
        decoder: AnyDecoder | str | None = None,
        vocoder: Vocoder | None = None,
        recognizer: Recognizer | None = None,
    ):
        args = DCPOConfig() if args is None else copy(args)  # some settings are filled in
        if reward_funcs is None:
            reward_funcs = args.reward_funcs
        if isinstance(reward_funcs, str) or callable(reward_funcs):
            reward_funcs = [reward_funcs]
        named = import_rewards(reward_funcs)  # before anything is loaded
        args.reward_funcs = [path_of(reward) for reward in named]
        self.reward_versions = [version_of(reward) for reward in named]
        decoder = required(args, "decoder") if decoder is None else decoder
        self.base = (
            load_decoder(decoder, args.device, dtype=args.dtype)
            if isinstance(decoder, str)
            else decoder
        )
        checksum = self.base.checksum() if hasattr(self.base, "checksum") else ""
        args.chunk_range = guidance_range(args, checksum)
        train, evaluated = prompts_of(args, self.base, train_dataset, eval_dataset)
        self.vocoder = vocoder or vocoder_for(
            self.base,
            required(args, "data"),
            [*train, *(evaluated or ())],
            args.vocoder,
            str(args.device),
        )
        judged = bool(evaluated) and args.judges_by_wer
        if recognizer is None and (asks_recognizer(named) or judged):
            recognizer = load_recognizer(args.recognizer, device=str(args.device))
        self.recognizer = recognizer or UnusedRecognizer(args.recognizer)
        self.reward_funcs = [
            BUILT_IN[r](args, self.recognizer) if isinstance(r, str) else r for r in named
        ]
        self.reward_weights = args.reward_weights or [1.0] * len(self.reward_funcs)
        if isinstance(model, str):
            model = load_policy(model)
        if model is None:
            policy = make_policy(args, self.base, checksum)
        else:
            policy = bound(model, args, checksum)
        check_fits(policy, args, self.reward_funcs)
        super().__init__(
            policy,
            args,
            train_dataset=Prompts(train),
            eval_dataset=evaluated and Prompts(evaluated),
            data_collator=itemgetter(0),  # a batch has one address
            callbacks=callbacks,
        )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ConfigError(
                "DCPO does not run with FSDP or DeepSpeed, because the policy is small and the "
                "decoder frozen: use launch/accelerate/multi_gpu.yaml"
            )
        self.base = self.base.to(args.device).eval().requires_grad_(False)
        self.reference, self.rollout_policy = (
            deepcopy(policy).eval().requires_grad_(False) for _ in range(2)
        )
        self._copies = nn.ModuleDict(
            {"reference": self.reference, "rollout_policy": self.rollout_policy}
        )
        self._copies.to(args.device)
        # With two parts, one is synthesised and transcribed while the other is decoded. On a GPU
        # with rewards of tokens alone this gains nothing: they are fast, and a pass takes as long
        # for half of the rows.
        parts = 1 if args.device.type == "cuda" and not needs_sound(self.reward_funcs) else 2
        self.roller = Roller(
            args,
            self.base,
            self.vocoder,
            self.reward_funcs,
            self.reward_weights,
            self.recognizer,
            parts,
        )
        self.pass_cost = self._pass_cost() if args.points_per_percent else None
        self.advantages_of = AdvantageEstimator(
            args,
            self.reward_funcs,
            self.reward_weights,
            min(policy.config.sizes, default=1),
            self.pass_cost,
        )
        self._window: list[UpdateBatch] = []  # micro-batches of the updates in progress
        self._metrics = Metrics()
        self._rollout_seconds = 0.0
        self._transcribe_recordings(named)

    def _transcribe_recordings(self, named: Sequence[str | Reward]) -> None:
        """Measure the WER of the recordings under the reward recogniser: a term of the reward
        wer, and a check for the others. Raises RewardError if it makes too many errors."""
        args, items = self.args, self.train_dataset.items
        if asks_recognizer(named):
            needed = args.credit == "decision" or "log_likelihood" in named
            evaluated = self.eval_dataset.items if self.eval_dataset else []
            check_reads(self.recognizer, [*items, *evaluated], needed)
        if "wer" not in named:  # the other rewards need it only for the check
            items = items[:: max(1, -(-len(items) // RECORDINGS_FOR_CHECK))]
        self.ground_truth = truth = GroundTruth(
            self.out / "ground_truth.json",
            f"{self.recognizer.name} {vocoder_identity(self.vocoder, args.vocoder)}",
            items,
        )
        if not asks_recognizer(named):
            return
        truth.measure(self.vocoder, self.recognizer, args.process_index, args.world_size)
        check_reward_recognizer(self.recognizer.name, truth.corpus(), args.max_reward_wer)
        for name, reward in zip(named, self.reward_funcs, strict=True):
            if name == "wer":
                reward.ground_truth = truth.rates()  # type: ignore[attr-defined]

    def _pass_cost(self) -> PassCost:
        """Return the cost in the settings, or measure it in the first process; then the settings
        contain it."""
        args = self.args
        if not args.pass_cost:
            cost = None
            if args.process_index == 0:
                cost = stored_pass_cost(
                    self.out / "pass_cost.json",
                    args.resume_from_checkpoint == "never",
                    partial(
                        measure_pass_cost,
                        self.base,
                        self.policy,
                        self.vocoder,
                        self.train_dataset.items[0],
                        args.sampling,
                        args.num_candidates,
                    ),
                )
            (cost,) = broadcast_object_list([cost])
            args.pass_cost = [round(ms, 4) for ms in cost]
        return PassCost(*args.pass_cost)

    @property
    def policy(self) -> ChunkPolicy:
        return self.accelerator.unwrap_model(self.model)

    # --- data -------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        args = self.args
        batches = PromptBatches(
            len(self.train_dataset),
            args.prompts_per_step,
            args.gradient_accumulation_steps,
            args.num_iterations,
            args.seed,
            args.process_index,
            args.world_size,
        )
        # not prepared by Accelerate: the batches are this process's share already
        return EpochLoader(
            self.train_dataset,
            batch_sampler=batches,
            collate_fn=itemgetter(0),
            generator=torch.Generator().manual_seed(args.seed),
        )

    # --- one update -------------------------------------------------------------------------------

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None and self.args.optim == "natural":
            self.optimizer = NaturalGradient(
                self.policy.parameters(), self._curvature, self.args.learning_rate
            )
        return super().create_optimizer(model)

    def _curvature(self) -> Product:
        """Return products with the Fisher information of the policy at the decisions of this
        window on all processes."""
        weights = [p for p in self.policy.parameters() if p.requires_grad]
        # other attention backends have no second derivative
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            products = [
                fisher_product(
                    log_probs_of(self.policy, prepared.batch),
                    partial(self._mean, prepared),
                    weights,
                )
                for prepared in self._window
            ]

        def product(v: Sequence[Tensor]) -> list[Tensor]:
            parts = zip(*(one(v) for one in products), strict=True)
            return [self.accelerator.reduce(torch.stack(part).mean(0), "mean") for part in parts]

        return product

    def _mean(self, made: UpdateBatch, by_decision: Tensor) -> Tensor:
        """Reduce one number per decision [R, M] as the loss does."""
        return objective.aggregate(
            by_decision, made.batch.mask, made.weights, self.args.loss_type, made.normalizer
        )

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch=None
    ) -> Tensor:
        started, self._rollout_seconds = time.perf_counter(), 0.0
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._metrics.add("seconds_update", time.perf_counter() - started - self._rollout_seconds)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch=None,
    ):
        args = self.args
        # rollouts of this micro-batch, with advantages and the log-probabilities of π_ref
        prepared = self._rollouts(inputs)
        batch = prepared.batch
        beta = objective.kl_weight(
            args.beta, inputs["epoch"], math.ceil(self.state.num_train_epochs)
        )
        # π_θ at the decisions of the rollouts [R, M, A]; π_old is π_θ itself in the first of the
        # inner updates
        log_probs = log_probs_of(model, batch)
        old = (
            objective.taken(log_probs, batch.actions).detach()
            if prepared.old is None
            else prepared.old
        )
        out = objective.policy_loss(
            log_probs,
            batch.actions,
            old,
            prepared.reference,
            prepared.advantages,
            batch.mask,
            prepared.weights,
            beta=beta,
            epsilon=args.epsilon,
            loss_type=args.loss_type,
            normalizer=prepared.normalizer,
        )
        counted = batch.mask * (prepared.weights > 0).unsqueeze(-1)
        add_update(self._metrics, out, log_probs.detach(), counted, beta)
        return (out.loss, {}) if return_outputs else out.loss

    def _rollouts(self, inputs: dict[str, Any]) -> UpdateBatch:
        """Return the rollouts of this micro-batch; those of its window (accumulation x inner
        iterations) are made together, once."""
        args = self.args
        inside = inputs["position"] % args.window
        if inside == 0:  # a window begins: the policy that speaks its rollouts is today's
            state = self.policy.state_dict()
            self.rollout_policy.load_state_dict(state)
            if inputs["position"] == 0:
                self.reference.load_state_dict(state)
            self._window = []
        if not self._window:  # also after resuming inside a window: the same rollouts again
            self.check_weights()  # NaN weights give no distribution to draw from
            started = time.perf_counter()
            batches = [
                self.roller.collect(
                    self.rollout_policy,
                    items,
                    indices,
                    args.seed * 1000 + 1 + inputs["epoch"],
                    trainer_state=self.state,
                )
                for items, indices in zip(inputs["items"], inputs["indices"], strict=True)
            ]
            # rollouts that are made again after resuming are in the log already
            metrics = self._metrics
            self._metrics = Metrics() if inside else metrics
            self._window = self._prepare(batches)
            self._metrics = metrics
            self._rollout_seconds += time.perf_counter() - started
        return self._window[inside % args.gradient_accumulation_steps]

    @torch.no_grad()
    def _prepare(self, batches: list[RolloutBatch]) -> list[UpdateBatch]:
        """Return the micro-batches of a window with advantages and weights, for which the rewards
        of all count together, and with the log-probabilities of earlier policies."""
        args, group = self.args, self.args.num_generations
        records = [r for b in batches for r in b.records]
        # 1. rewards of the whole window, NaN where one failed
        self._check_failures(records, torch.cat([b.rewards for b in batches]))
        # 2. advantages: against the group, for a rollout or for each of its decisions
        advantages = self.advantages_of(batches)
        weights = advantages.valid.float()
        # 3. back into micro-batches, with what the policies before say of the same decisions
        counts = [len(b.records) for b in batches]
        window, old = [], None
        for batch, zero_std, mine, weight in zip(
            batches,
            advantages.zero_std.split([count // group for count in counts]),
            advantages.values.split(counts),
            weights.split(counts),
            strict=True,
        ):
            add_rollouts(
                self._metrics,
                batch,
                zero_std,
                self.reward_funcs,
                args.chunk_range,
                self.policy.config.num_actions,
            )
            if mine.dim() > 1:
                mine = mine[:, : batch.mask.shape[1]]
            with self.accelerator.autocast():  # in the precision of the trained policy
                reference = log_probs_of(self.reference, batch)
                if args.num_iterations > 1:
                    old = objective.taken(log_probs_of(self.rollout_policy, batch), batch.actions)
            window.append(
                UpdateBatch(batch, mine, weight, old, reference, float(args.max_completion_length))
            )
        if args.loss_type == "dapo":
            counted = [(m.batch.mask * (m.weights > 0).unsqueeze(-1)).sum() for m in window]
            decisions = self.accelerator.reduce(torch.stack(counted).mean(), "mean").clamp(min=1)
            window = [replace(made, normalizer=decisions) for made in window]
        if self.pass_cost is not None:
            compared = [r.result for r in records if not r.forced]
            tokens = sum(len(r.tokens) for r in compared)
            spent = self.pass_cost.fixed * sum(r.passes for r in compared)
            self._metrics.add("ms_per_token", spent + self.pass_cost.per_token * tokens, tokens)
        return window

    def _check_failures(self, records: Sequence[RolloutRecord], rewards: Tensor) -> None:
        failed = [
            r.failure for r, bad in zip(records, rewards.isnan().tolist(), strict=True) if bad
        ]
        self._metrics.add("failed_rewards", len(failed), len(records))
        everywhere = gather_object([(len(failed), len(records), failed[0] if failed else None)])
        share = sum(e[0] for e in everywhere) / sum(e[1] for e in everywhere)
        if share > self.args.max_failed_rewards:
            first = next(e[2] for e in everywhere if e[0])
            step = self.state.global_step
            # no update of this step has been made yet, so the state is that of the last step
            if step and why_incomplete(self.out / f"checkpoint-{step}"):
                self._save_checkpoint(self.policy, None)
            raise RewardError(
                f"{share:.0%} of the rewards of step {step + 1} could not be computed, more than "
                f"max_failed_rewards {self.args.max_failed_rewards:.0%}; first cause: {first}. "
                f"{self._last_state()} Remove the cause and run the same command again to resume"
            )

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self._metrics.drain())
        super().log(scalars(logs), start_time)

    # --- evaluation -------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: Dataset | Sequence[PromptItem] | None = None,  # type: ignore[override]
        ignore_keys=None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, Any]:
        """Decode the evaluation prompts with the greedy and the sampled policy, and return
        corpus WER by the reward recogniser, mean reward, tokens per pass and actions. The random
        numbers are the same in every evaluation of a run."""
        if eval_dataset is None and self.eval_dataset is None:
            raise ConfigError("evaluate needs prompts: give eval_dataset=…")
        items = self.eval_dataset.items if eval_dataset is None else items_of(eval_dataset)  # type: ignore[union-attr]
        self.check_weights()
        started = time.perf_counter()
        metrics: dict[str, Any] = {}
        args = self.args
        modes: tuple[tuple[Literal["greedy", "sample"], str], ...] = (
            ("greedy", ""),
            ("sample", "_sampled"),
        )
        for mode, suffix in modes:
            mine = items[args.process_index :: args.world_size]
            method = PolicyChunk(self.policy, mode, num_candidates=args.num_candidates)
            results = decode(
                self.base,
                mine,
                method,
                args.sampling,
                seed=args.seed * 1000,
                batch_size=args.per_device_eval_batch_size,
            )
            records = [
                RolloutRecord(item, 0, 0, result)
                for item, result in zip(mine, results, strict=True)
            ]
            metrics.update(
                {f"{metric_key_prefix}_{k}{suffix}": v for k, v in self._judge(records).items()}
            )
        metrics[f"{metric_key_prefix}_seconds"] = time.perf_counter() - started
        return self.evaluated(metrics)

    def _judge(self, records: list[RolloutRecord]) -> dict[str, Any]:
        transcribed = self.args.judges_by_wer or needs_sound(self.reward_funcs)
        if transcribed:
            synthesise(records, self.vocoder)
        totals, _ = score(
            records,
            self.reward_funcs,
            self.reward_weights,
            self.recognizer,
            trainer_state=self.state,
        )
        metrics = Metrics()
        metrics.add_values("reward", totals.tolist())
        add_decisions(metrics, records, self.args.chunk_range, self.policy.config.num_actions)
        if not transcribed:
            return metrics.drain()
        transcribe(records, self.recognizer)
        failures = gather_object([next((r.failure for r in records if r.failure), None)])
        wer = corpus_wer(gather_object([r.errors for r in records]))
        if 1 - wer.coverage > self.args.max_failed_rewards:
            raise RewardError(
                f"{1 - wer.coverage:.0%} of the evaluation utterances have no transcript, more "
                f"than max_failed_rewards {self.args.max_failed_rewards:.0%}; first cause: "
                f"{next((f for f in failures if f), 'unknown')}"
            )
        return {"wer": wer.wer, "coverage": wer.coverage, **metrics.drain()}

    # --- checkpoints ------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the policy by `save_pretrained`, and the reference and rollout policies next to
        it."""
        if not self.args.should_save:
            return
        path = Path(output_dir or self.args.output_dir)
        self.policy.save_pretrained(path)
        tensors = {
            name: value.cpu().contiguous() for name, value in self._copies.state_dict().items()
        }
        save_file(tensors, path / STATE)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial=None,
        ignore_keys_for_eval=None,
        **kwargs,
    ):
        if resume_from_checkpoint is True:
            latest = latest_checkpoint(self.args.output_dir)
            if latest is None:
                raise CheckpointError(
                    f"{self.args.output_dir}: contains no complete checkpoint to resume "
                    "from; leave resume_from_checkpoint out to start a new run"
                )
            resume_from_checkpoint = str(latest)
        if resume_from_checkpoint:
            self._load_copies(checkpoint := Path(resume_from_checkpoint))
            if self.check_resume(checkpoint):  # the run was complete: train and log nothing
                self.finish_from(checkpoint)
                best = (
                    Path(self.args.output_dir)
                    / Path(self.state.best_model_checkpoint or checkpoint).name
                )
                if not self.args.load_best_model_at_end or not best.is_dir():
                    best = checkpoint
                self.policy.load_state_dict(ChunkPolicy.from_pretrained(best).state_dict())
                return TrainOutput(self.state.global_step, 0.0, {})
        return super().train(resume_from_checkpoint or None, trial, ignore_keys_for_eval, **kwargs)

    def describe(self, inputs: Mapping[str, Any]) -> str:
        items = inputs["items"][inputs["position"] % self.args.gradient_accumulation_steps]
        units = max(len(item.text_ids) for item in items)
        return (
            f"{len(items)} prompts of up to {units} phonemes, "
            f"{self.args.num_generations} rollouts each of up to {self.args.max_completion_length} "
            "tokens"
        )

    def _load_copies(self, checkpoint: Path) -> None:
        if (stored := type(self.policy).load_config(checkpoint)) != self.policy.config:
            raise CheckpointError(
                f"{checkpoint}: a checkpoint of another run (policy {stored}); choose another out "
                "folder, or resume_from_checkpoint=never to start again"
            )
        self._copies.load_state_dict(load_file(checkpoint / STATE))
        self._window = []
