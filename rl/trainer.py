"""DCPO: `transformers.Trainer` whose batches are prompts and whose targets are its own rollouts.

A step: every process rolls out its prompts G times with the policy of this moment, rewards the rollouts, and takes
`num_iterations` clipped updates on them. A batch carries its place (epoch, position), and everything random is
addressed by (seed, epoch, utterance, member, position), so a resumed run goes on bit for bit; the checkpoint holds
the reference policy and the policy that made the rollouts in flight.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import TrainOutput

from dcar.decoding import ChunkMethod, PolicyChunk, decode
from dcar.decoding.chunks import check_draws
from dcar.decoding.fast.passes import fast
from dcar.errors import CheckpointError, ConfigError, RewardError
from dcar.model.draft import AnyDecoder
from dcar.prompts.items import PromptItem
from dcar.recognition.base import Recognizer
from dcar.text.wer import WordErrors, corpus_wer
from dcar.train.batches import EpochLoader
from dcar.train.callbacks import JsonlLog, TensorBoardLog
from dcar.train.checkpoints import latest_checkpoint, why_incomplete
from dcar.train.resilient import ResilientTrainer
from dcar.vocoder.base import Vocoder
from heads.policy import ChunkPolicy
from rl import objective
from rl.config import DCPOConfig
from rl.console import Progress
from rl.credit import Decisions, Located, decision_advantages
from rl.meter import Meter
from rl.natural import NaturalGradient, Product, fisher_product
from rl.price import Price
from rl.rewards import Reward, RolloutRecord, check_locate, locates, needs_sound, score, transcribe
from rl.rollout import Roller, RolloutBatch, synthesise

__all__ = ["DCPOConfig", "DCPOTrainer"]

STATE = "dcpo.safetensors"


class Prompts(Dataset):
    """Prompts addressed by (epoch, position of the batch, index)."""

    def __init__(self, items: Sequence[PromptItem]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, address: tuple[int, int, int]) -> tuple[tuple[int, int, int], PromptItem]:
        return address, self.items[address[2]]


class PromptBatches(Sampler[list[tuple[int, int, int]]]):
    """This process's prompts of every micro-batch, as a pure function of (seed, epoch).

    A window of `accumulation` micro-batches is repeated `iterations` times: the inner updates on the same rollouts.
    The last window of an epoch is filled up from the beginning of the permutation.
    """

    def __init__(self, size: int, prompts: int, accumulation: int, iterations: int, seed: int, rank: int = 0,
                 processes: int = 1, shuffle: bool = True):
        self.size, self.prompts, self.accumulation, self.iterations = size, prompts, accumulation, iterations
        self.seed, self.rank, self.processes, self.shuffle = seed, rank, processes, shuffle
        self.epoch = 0
        self.per_window = prompts * processes * accumulation
        if size < self.per_window:
            raise ConfigError(
                f"{size} training prompts are fewer than the {self.per_window} of one update ({prompts} x {processes} "
                f"processes x {accumulation} accumulated): lower per_device_train_batch_size or give more prompts")

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def windows(self) -> int:
        return math.ceil(self.size / self.per_window)

    def __len__(self) -> int:
        return self.windows * self.accumulation * self.iterations

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.size) if self.shuffle else np.arange(
            self.size)
        order = np.resize(order, self.windows * self.per_window)
        position = 0
        for window in range(self.windows):
            for _ in range(self.iterations):
                for micro in range(self.accumulation):
                    first = (window * self.accumulation + micro) * self.prompts * self.processes
                    mine = order[first + self.rank * self.prompts : first + (self.rank + 1) * self.prompts]
                    yield [(self.epoch, position, int(i)) for i in mine]
                    position += 1


def collate(rows: list[tuple[tuple[int, int, int], PromptItem]]) -> dict[str, Any]:
    (epoch, position, _), _ = rows[0]
    return {"epoch": epoch, "position": position, "indices": [a[2] for a, _ in rows], "items": [i for _, i in rows]}


def law_of(policy: nn.Module, batch: RolloutBatch) -> Tensor:
    """Log-law of a policy at the decisions of rollouts [R, M, K], of N draws [R, M, N K] (`joint_law`)."""
    return policy(batch.hidden.float(), batch.positions, batch.candidates).flatten(2)


@dataclass
class Prepared:
    """Rollouts with all that the updates on them share."""

    batch: RolloutBatch
    advantages: Tensor  # [R], or [R, M] with credit by decision
    weights: Tensor  # [R] in the loss
    old: Tensor | None  # [R, M] log-probabilities under the rollout policy; None: the update is on-policy
    reference: Tensor  # [R, M, K] log-law of the reference policy, of N draws [R, M, N K]
    normalizer: float | Tensor


class DCPOTrainer(ResilientTrainer):
    """Trains `policy` on rollouts of the frozen `base`.

    reward_funcs: callables on a list of `rl.rewards.RolloutRecord`, one number each, NaN for "could not be computed";
    added with `args.reward_weights` (default 1 each). `recognizer` transcribes the evaluation prompts.
    """

    args: DCPOConfig
    train_dataset: Prompts
    eval_dataset: Prompts | None

    def __init__(self, policy: ChunkPolicy, base: AnyDecoder, args: DCPOConfig, reward_funcs: Sequence[Reward],
                 train_prompts: Sequence[PromptItem], vocoder: Vocoder, recognizer: Recognizer,
                 eval_prompts: Sequence[PromptItem] | None = None, callbacks: list[TrainerCallback] | None = None):
        if not args.chunk_range and args.forced_rows != "none":
            raise ConfigError("chunk_range is empty: give it, or `guidance` (written by `dcar profile`), or "
                              "forced_rows=none")
        if max(args.chunk_range, default=1) > policy.config.num_actions:
            raise ConfigError(f"chunk_range {args.chunk_range} asks for more tokens than the "
                              f"{policy.config.num_actions} that the decoder's heads predict")
        chosen = set(policy.config.sizes or args.chunk_range)
        if args.forced_rows != "none" and not set(args.chunk_range) <= chosen:
            raise ConfigError(f"chunk_range {args.chunk_range} has sizes that are not among the policy's: "
                              f"policy_sizes={list(policy.config.sizes)}")
        check_draws(policy, args.draws)
        if args.credit == "decision":
            check_locate(reward_funcs)
        weights = args.reward_weights or [1.0] * len(reward_funcs)
        if len(weights) != len(reward_funcs):
            raise ConfigError(f"{len(weights)} reward_weights for {len(reward_funcs)} rewards")
        self.jsonl = JsonlLog(Path(args.output_dir) / "log.jsonl")
        callbacks = [self.jsonl, *(callbacks or [])]
        trackers = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
        if "tensorboard" in trackers:
            args.report_to = [name for name in trackers if name != "tensorboard"]
            callbacks.append(TensorBoardLog(Path(args.output_dir) / "tensorboard"))
        super().__init__(policy, args, train_dataset=Prompts(train_prompts),
                         eval_dataset=None if eval_prompts is None else Prompts(eval_prompts), data_collator=collate,
                         callbacks=callbacks)
        for noisy in (PrinterCallback, ProgressCallback):
            self.remove_callback(noisy)
        self.add_callback(Progress(quiet=bool(args.disable_tqdm)))
        if self.is_fsdp_enabled:
            raise ConfigError("the policy is small and the base frozen: run DCPO with "
                              "launch/accelerate/multi_gpu.yaml, not with FSDP")
        self.base = base.to(args.device).eval().requires_grad_(False)
        self.recognizer, self.vocoder = recognizer, vocoder
        self.reward_funcs, self.reward_weights = list(reward_funcs), list(weights)
        self.reference, self.rollout_policy = (self._frozen_copy() for _ in range(2))
        self.roller = Roller(
            self.base, vocoder, self.reward_funcs, self.reward_weights, args.sampling, group_size=args.num_generations,
            chunk_range=args.chunk_range, forced_rows=args.forced_rows, share_token_draws=args.common_random_numbers,
            draws=args.draws, microbatches=args.reward_microbatches, overlap=args.overlap,
            hidden_dtype=getattr(torch, args.hidden_dtype), decoding=args.decoding)  # type: ignore[arg-type]
        self.price = Price(args.tokens_per_pass, args.price_gain) if args.tokens_per_pass else None
        self._buffer: dict[int, Prepared] = {}
        self._meter = Meter()
        self._rollout_seconds = 0.0

    @property
    def policy(self) -> ChunkPolicy:
        return self.accelerator.unwrap_model(self.model)

    def _frozen_copy(self) -> ChunkPolicy:
        copy = ChunkPolicy(self.policy.config).to(self.args.device).eval().requires_grad_(False)
        copy.load_state_dict(self.policy.state_dict())
        return copy

    # --- data ---------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        args = self.args
        batches = PromptBatches(
            len(self.train_dataset), args.prompts_per_step, args.gradient_accumulation_steps, args.num_iterations,
            args.seed, args.process_index, args.world_size, args.shuffle_dataset is not False)
        # already this process's share: not prepared by Accelerate, which would shard it again
        return EpochLoader(self.train_dataset, batch_sampler=batches, collate_fn=collate,
                           generator=torch.Generator().manual_seed(args.seed))

    # --- one update ---------------------------------------------------------------------------------------------

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            assert self.model is not None
            args = self.args
            if args.optimizer == "natural":
                self.optimizer = NaturalGradient(self.model.parameters(), self._curvature, args.learning_rate,
                                                 args.damping)
                return self.optimizer
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.learning_rate, eps=args.adam_epsilon,
                                              betas=(args.adam_beta1, args.adam_beta2))
        return self.optimizer

    def _curvature(self) -> Product:
        """Products with the Fisher information of the policy's law at the decisions of this window, all processes."""
        weights = [p for p in self.policy.parameters() if p.requires_grad]
        window = list(self._buffer.values())
        window = window[: math.ceil(self.args.fisher_share * len(window))]
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the other attentions have no second derivative
            products = [fisher_product(law_of(self.policy, made.batch), partial(self._mean, made), weights)
                        for made in window]

        def product(v: Sequence[Tensor]) -> list[Tensor]:
            parts = zip(*(one(v) for one in products), strict=True)
            return [self.accelerator.reduce(torch.stack(part).mean(0), "mean") for part in parts]

        return product

    def _mean(self, made: Prepared, by_decision: Tensor) -> Tensor:
        """Of one number by decision [R, M], as the loss takes it."""
        return objective.aggregate(by_decision, made.batch.mask, made.weights, self.args.loss_type, made.normalizer)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch=None) -> Tensor:
        started, self._rollout_seconds = time.perf_counter(), 0.0
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._meter.add("seconds_update", time.perf_counter() - started - self._rollout_seconds)
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch=None):
        args = self.args
        prepared = self._rollouts(inputs)
        batch = prepared.batch
        beta = objective.kl_weight(args.beta, inputs["epoch"], math.ceil(self.state.num_train_epochs))
        log_law = law_of(model, batch)
        old = objective.taken(log_law, batch.actions).detach() if prepared.old is None else prepared.old
        out = objective.policy_loss(
            log_law, batch.actions, objective.behaviour_log_probs(old, batch.forced, args.forced_rows),
            prepared.reference, prepared.advantages, batch.mask, prepared.weights, beta=beta, epsilon=args.epsilon,
            epsilon_high=args.epsilon_high, delta=args.delta, loss_type=args.loss_type, normalizer=prepared.normalizer)
        self._log_update(out, log_law.detach(), prepared, beta)
        return (out.loss, {}) if return_outputs else out.loss

    def _rollouts(self, inputs: dict[str, Any]) -> Prepared:
        """The rollouts of this micro-batch, made once per window (accumulation x inner iterations)."""
        args = self.args
        inside = inputs["position"] % args.window
        if inside == 0:
            state = self.policy.state_dict()
            first = inputs["position"] == 0 and (inputs["epoch"] == 0 or args.reference_policy == "epoch")
            for copy in (self.reference, self.rollout_policy) if first else (self.rollout_policy,):
                copy.load_state_dict(state)
            self._buffer.clear()
            if self.price is not None:
                self.price.advance()
        micro = inside % args.gradient_accumulation_steps
        if micro not in self._buffer:  # also after resuming inside a window: the same rollouts are made again
            self.check_weights()  # a policy that is broken has no law to draw sizes from
            started = time.perf_counter()
            seed = args.seed * 1000 + 1 + inputs["epoch"]
            batch = self.roller.collect(self.rollout_policy, inputs["items"], inputs["indices"], seed)
            # made again after resuming: they stand in the log already
            meter, self._meter = self._meter, Meter() if inside >= args.gradient_accumulation_steps else self._meter
            self._check_failures(batch)
            self._buffer[micro] = self._prepare(batch, micro)
            self._meter = meter
            self._rollout_seconds += time.perf_counter() - started
        return self._buffer[micro]

    @torch.no_grad()
    def _prepare(self, batch: RolloutBatch, micro: int) -> Prepared:
        args = self.args
        std = objective.reward_std(self.accelerator.gather(batch.rewards)) if args.scale_rewards == "batch" else None
        advantages = objective.group_advantages(batch.rewards, args.num_generations, args.scale_rewards, std)
        weights = objective.rollout_weights(batch.forced, advantages.valid, args.forced_rows, args.forced_weight)
        reference = law_of(self.reference, batch)
        old = objective.taken(law_of(self.rollout_policy, batch), batch.actions) if args.num_iterations > 1 else None
        normalizer: float | Tensor = float(args.max_completion_length)
        if args.loss_type == "dapo":
            decisions = (batch.mask * (weights > 0).unsqueeze(-1)).sum()
            normalizer = self.accelerator.reduce(decisions, "mean").clamp(min=1)
        self._log_rollouts(batch, advantages)
        values = self._credit(batch) if args.credit == "decision" else advantages.values
        if self.price is not None:
            values = objective.by_decision(values) + self._pay(batch, micro)
        return Prepared(batch, values, weights, old, reference, normalizer)

    def _pay(self, batch: RolloutBatch, micro: int) -> Tensor:
        """What decisions [R, M] get for the length of their chunks, at the price of this window."""
        assert self.price is not None
        sampled = [r.result for r in batch.records if not r.forced]
        kept = torch.tensor([sum(len(r.tokens) for r in sampled), sum(r.target_passes for r in sampled)],
                            dtype=torch.float64, device=self.args.device)
        tokens, passes = self.accelerator.reduce(kept, "sum").tolist()
        self.price.seen[micro] = tokens, passes
        self._meter.add("price", self.price.value)
        return self.price.of_decisions(batch.actions % self.policy.config.num_actions, batch.mask)

    def _credit(self, batch: RolloutBatch) -> Tensor:
        """Advantages by decision [R, M]: of rewards that say where they were lost by what stands behind each decision,
        of all others by rollout."""
        args, group = self.args, self.args.num_generations
        weights = np.asarray(self.reward_weights)
        others = [j for j, reward in enumerate(self.reward_funcs) if not locates(reward)]
        rest = torch.from_numpy(batch.parts[:, others] @ weights[others]).to(batch.rewards)
        rest = rest.masked_fill(batch.rewards.isnan(), math.nan)  # what failed is in no mean
        std = objective.reward_std(self.accelerator.gather(rest)) if args.scale_rewards == "batch" else None
        values = objective.group_advantages(rest, group, args.scale_rewards, std).values
        values = values[:, None].repeat(1, batch.actions.shape[1])
        # what every choice has in common: the first tokens of one chunk, nothing of several
        shortest = min(self.policy.config.sizes, default=1) if args.draws == 1 else 0
        decisions = [
            Decisions([] if failed else self._located(record),
                      [p - (record.result.prompt_length - 1) for p in record.result.decision_positions])
            for record, failed in zip(batch.records, batch.rewards.isnan().tolist(), strict=True)
        ]
        for first in range(0, len(decisions), group):
            mates = decisions[first : first + group]
            for i, found in enumerate(decision_advantages(mates, args.credit_window, shortest), start=first):
                values[i, : len(found)] += torch.from_numpy(found).to(values)
        return values

    def _located(self, record: RolloutRecord) -> list[Located]:
        """Where a rollout lost the rewards that say so, times their weights; nothing where one of them could not."""
        asked = [(r, w) for r, w in zip(self.reward_funcs, self.reward_weights, strict=True) if locates(r)]
        if any(reward not in record.located for reward, _ in asked):
            return []
        return [replace(record.located[r], costs=w * record.located[r].costs) for r, w in asked]

    def _check_failures(self, batch: RolloutBatch) -> None:
        failed = [r.failure for r, value in zip(batch.records, batch.rewards.tolist(), strict=True) if value != value]
        self._meter.add("failed_rewards", len(failed), len(batch.records))
        everywhere = gather_object([(len(failed), len(batch.records), failed[0] if failed else None)])
        share = sum(e[0] for e in everywhere) / sum(e[1] for e in everywhere)
        if share > self.args.max_failed_rewards:
            first = next(e[2] for e in everywhere if e[0])
            step = self.state.global_step
            if step and why_incomplete(self.out / f"checkpoint-{step}"):  # nothing of this step has been learned yet
                self._save_checkpoint(self.policy, None)
            raise RewardError(f"{share:.0%} of the rewards of step {step + 1} could not be computed, more than "
                              f"max_failed_rewards {self.args.max_failed_rewards:.0%}; the first: {first}. "
                              f"{self._last_state()} The same command goes on from there")

    # --- what is logged --------------------------------------------------------------------

    def _log_rollouts(self, batch: RolloutBatch, advantages: objective.Advantages) -> None:
        meter, records, rewards = self._meter, batch.records, batch.rewards.tolist()
        sampled = [r for r in records if not r.forced]
        meter.add_values("reward", rewards)
        meter.add_values("reward_std", [float(objective.reward_std(batch.rewards))])
        meter.add_values("reward_forced", [v for r, v in zip(records, rewards, strict=True) if r.forced])
        meter.add_values("reward_sampled", [v for r, v in zip(records, rewards, strict=True) if not r.forced])
        for j, reward in enumerate(self.reward_funcs):
            meter.add_values(f"rewards/{reward.name}/mean", batch.parts[:, j].tolist())
            if reward.name == "range_penalty":
                meter.add_values("penalty", (-batch.parts[:, j]).tolist())
        for name, rows in (("wer", records), ("wer_sampled", sampled)):
            scored = [r.errors for r in rows if r.errors is not None]
            meter.add(name, sum(e.errors for e in scored), sum(e.reference_words for e in scored))
        meter.add("frac_reward_zero_std", float(advantages.zero_std.sum()), len(advantages.zero_std))
        add_decisions(meter, "", sampled or records, self.args.chunk_range, self.policy.config.num_actions)
        meter.add("duration_ratio", sum(len(r.result.tokens) for r in sampled or records),
                  sum(len(r.item.reference_tokens) for r in sampled or records))
        for name, value in batch.seconds.items():
            meter.add(f"seconds_{name}", value)

    @torch.no_grad()
    def _log_update(self, out: objective.PolicyLoss, log_law: Tensor, prepared: Prepared, beta: float) -> None:
        meter = self._meter
        mask = prepared.batch.mask * (prepared.weights > 0).unsqueeze(-1)
        decisions = float(mask.sum())
        meter.add("entropy", float((objective.entropy(log_law) * mask).sum()), decisions)
        meter.add("kl", float((out.kl * mask).sum()), decisions)
        meter.add("clip_fraction", float((out.clipped * mask).sum()), decisions)
        meter.add("beta", beta)
        if decisions:
            meter.add_max("ratio_max", float(out.ratio[mask > 0].max()))

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self._meter.drain())
        super().log(logs, start_time)

    # --- evaluation ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, eval_dataset: Prompts | None = None, ignore_keys=None,  # type: ignore[override]
                 metric_key_prefix: str = "eval") -> dict[str, Any]:
        """Speak the evaluation prompts with the greedy and the sampled policy; corpus WER by the reward recogniser,
        mean reward, tokens per pass, actions. The draws are the same in every evaluation of a run."""
        dataset = eval_dataset or self.eval_dataset
        if dataset is None:
            raise ConfigError("evaluation needs evaluation prompts: set eval_split")
        self.check_weights()
        started = time.perf_counter()
        metrics: dict[str, Any] = {}
        base = self.base if self.args.decoding == "loop" else fast(self.base)
        for mode, suffix in (("greedy", ""), ("sample", "_sampled")):
            mine = dataset.items[self.args.process_index :: self.args.world_size]
            method = ChunkMethod(PolicyChunk(self.policy, mode, draws=self.args.draws))  # type: ignore[arg-type]
            results = decode(base, [i.prompt for i in mine], method, self.args.sampling,
                             seed=self.args.seed * 1000, batch_size=self.args.per_device_eval_batch_size)
            records = [RolloutRecord(item, 0, 0, result) for item, result in zip(mine, results, strict=True)]
            metrics.update({f"{metric_key_prefix}_{k}{suffix}": v for k, v in self._judge(records).items()})
        metrics[f"{metric_key_prefix}_seconds"] = time.perf_counter() - started
        return self.evaluated(metrics)

    def _judge(self, records: list[RolloutRecord]) -> dict[str, Any]:
        heard = needs_sound(self.reward_funcs) or self.args.metric_for_best_model == "eval_wer"
        if heard:
            synthesise(records, self.vocoder)
        totals, _ = score(records, self.reward_funcs, self.reward_weights)
        meter = Meter()
        meter.add_values("reward", totals.tolist())
        add_decisions(meter, "", records, self.args.chunk_range, self.policy.config.num_actions)
        if not heard:
            return meter.drain()
        transcribe(records, self.recognizer)
        counts = [None if (e := r.errors) is None else (e.substitutions, e.deletions, e.insertions, e.reference_words)
                  for r in records]
        failures = gather_object([next((r.failure for r in records if r.failure), None)])
        wer = corpus_wer([None if c is None else WordErrors(*c) for c in gather_object(counts)])
        if 1 - wer.coverage > self.args.max_failed_rewards:
            raise RewardError(f"{1 - wer.coverage:.0%} of the evaluation utterances have no transcript; the first "
                              f"cause: {next((f for f in failures if f), 'unknown')}")
        return {"wer": wer.wer, "coverage": wer.coverage, **meter.drain()}

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The policy as `save_pretrained` writes it, with the reference and rollout policies beside it."""
        if not self.args.should_save:
            return
        path = Path(output_dir or self.args.output_dir)
        self.policy.save_pretrained(path)
        tensors = {
            f"{name}.{key}": value.detach().cpu().contiguous()
            for name in ("reference", "rollout_policy") for key, value in getattr(self, name).state_dict().items()
        }
        if self.price is not None:
            tensors["price"] = self.price.state()
        save_file(tensors, path / STATE)

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, ignore_keys_for_eval=None, **kwargs):
        if resume_from_checkpoint is True:
            found = latest_checkpoint(self.args.output_dir)
            if found is None:
                raise CheckpointError(f"{self.args.output_dir}: no complete checkpoint to resume from")
            resume_from_checkpoint = str(found)
        if resume_from_checkpoint:
            self._load_copies(Path(resume_from_checkpoint))
            if self.is_finished(resume_from_checkpoint):
                return self._finished(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint or None, trial, ignore_keys_for_eval, **kwargs)

    def _finished(self, checkpoint: Path) -> TrainOutput:
        """The policy and the state of a run that has all its steps; nothing is trained, nor logged twice."""
        self.finish_from(checkpoint)
        best = Path(self.args.output_dir) / Path(self.state.best_model_checkpoint or checkpoint).name
        if not self.args.load_best_model_at_end or not best.is_dir():
            best = checkpoint
        self.policy.load_state_dict(ChunkPolicy.from_pretrained(best).state_dict())
        return TrainOutput(self.state.global_step, 0.0, {})

    def describe(self, inputs: Mapping[str, Any]) -> str:
        units = max(len(item.prompt.text_ids) for item in inputs["items"])
        return (f"{len(inputs['items'])} prompts of up to {units} phonemes, {self.args.num_generations} rollouts each "
                f"of up to {self.args.max_completion_length} tokens")

    def kept_of(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The address of the prompts, from which the rollouts are made again, and the rollouts themselves."""
        kept = {"epoch": inputs["epoch"], "position": inputs["position"], "indices": list(inputs["indices"]),
                "utterances": [item.prompt.utterance_id for item in inputs["items"]]}
        made = self._buffer.get(inputs["position"] % self.args.window % self.args.gradient_accumulation_steps)
        if made is None:
            return kept
        batch = made.batch
        return {**kept, "hidden": batch.hidden, "positions": batch.positions, "actions": batch.actions,
                "mask": batch.mask, "forced": batch.forced, "rewards": batch.rewards, "advantages": made.advantages,
                "candidates": batch.candidates,
                "weights": made.weights, "reference": made.reference}

    def _load_copies(self, checkpoint: Path) -> None:
        stored = ChunkPolicy.load_config(checkpoint)
        if stored != ChunkPolicy.config_class(**{
                k: getattr(self.policy.config, k) for k in stored.__dataclass_fields__}):
            raise CheckpointError(f"{checkpoint}: a checkpoint of another run (policy {stored}); choose another "
                                  "out folder, or resume=never to start again")
        try:
            tensors = load_file(checkpoint / STATE)
        except OSError as error:
            raise CheckpointError(f"{checkpoint / STATE}: cannot read it ({error}); resume from another one") from error
        for name in ("reference", "rollout_policy"):
            own = {k.removeprefix(name + "."): v for k, v in tensors.items() if k.startswith(name + ".")}
            try:
                getattr(self, name).load_state_dict(own)
            except RuntimeError as error:
                raise CheckpointError(f"{checkpoint / STATE}: of another form of policy ({error}); choose another out "
                                      "folder, or resume=never to start again") from error
        if self.price is not None:
            if "price" not in tensors:
                raise CheckpointError(f"{checkpoint}: a checkpoint of a run without tokens_per_pass; choose another "
                                      "out folder, or resume=never to start again")
            self.price.restore(tensors["price"])
        self._buffer.clear()


def add_decisions(meter: Meter, prefix: str, records: Sequence[RolloutRecord], chunk_range: Sequence[int],
                  num_actions: int) -> None:
    """Tokens per pass, truncation, share of actions outside the range, and the histogram of actions."""
    results = [r.result for r in records]
    actions = np.array([a for r in results for a in r.actions], dtype=np.int64)  # a process may have no prompt
    meter.add(f"{prefix}tokens_per_pass", sum(len(r.tokens) for r in results), sum(r.target_passes for r in results))
    meter.add(f"{prefix}truncated", sum(r.truncated for r in results), len(results))
    if chunk_range:
        meter.add(f"{prefix}out_of_range", float((~np.isin(actions, chunk_range)).sum()), len(actions))
    meter.add_counts(f"{prefix}action_histogram", np.bincount(actions - 1, minlength=num_actions))
