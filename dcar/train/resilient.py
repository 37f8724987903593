"""A `transformers.Trainer` for runs of days. It stops at the first value that is not finite, seals
its checkpoints, saves and exits when a signal requests it, and reports the cause when a disk, the
memory or another process fails.

The host reads nothing from a GPU during a step. Losses, gradients and stop requests are checked on
the device; the result is copied without waiting and read when the next update has been queued.

Both stages train with it. Departure from documented override points: `_save_checkpoint`, the only
method after which all files of a checkpoint have been written; tests/dcar/train/test_checkpoints.py
checks that it is called.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from dcar.config.resume import START_AGAIN, changed_settings, check_data
from dcar.errors import CheckpointError, DCARError, ProcessError, StoppedError, TrainingError
from dcar.process import INTERRUPTED, REQUEUE, is_of_others
from dcar.storage import read_manifest, writing
from dcar.train.callbacks import JsonlLog, ShownProgress
from dcar.train.checkpoints import (
    STATE,
    begin_checkpoint,
    latest_checkpoint,
    remove_old,
    seal_checkpoint,
    some,
)
from heads.checkpoint import all_finite, not_finite

logger = logging.getLogger(__name__)

SIGNALS = {signal.SIGTERM: REQUEUE, signal.SIGUSR1: REQUEUE, signal.SIGINT: INTERRUPTED}
RANKS_APART = 1_000_003  # difference between the seeds of two neighbouring processes


@dataclass
class Check:
    """Check of one update, possibly still being copied from the device to the host."""

    step: int
    batches: list[Mapping[str, Any]]  # its micro-batches
    losses: list[Tensor]
    gradients: list[str]  # names of the parameters with a gradient
    finite: Tensor  # [losses + gradients] bool, on the host
    # [2] on the host, summed over processes: checks with values that are not finite, stop requests
    flags: Tensor
    copied: torch.cuda.Event | None  # recorded after both copies; None if there was nothing to copy

    def read(self) -> tuple[bool, bool]:
        """Wait for the copy, and return whether a value is not finite on any process, and
        whether any process received a stop request."""
        if self.copied is not None:
            self.copied.synchronize()
        broken, status = self.flags.tolist()
        return broken > 0, status > 0


class StopRequests:
    """Record of SIGTERM, SIGUSR1 or Ctrl-C; a second Ctrl-C exits at once."""

    def __init__(self) -> None:
        self.status = 0  # requested exit status; 0 = no request
        self.name = ""
        self.process = os.getpid()

    def __call__(self, number: int, frame: Any) -> None:
        if os.getpid() != self.process:  # in a forked worker: its parent decides
            return
        if self.status and number == signal.SIGINT:
            os._exit(INTERRUPTED)
        self.status, self.name = SIGNALS[signal.Signals(number)], signal.Signals(number).name
        again = "; press Ctrl-C again to exit at once" if number == signal.SIGINT else ""
        os.write(2, f"{self.name}: saving at the end of this step{again}\n".encode())

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals within the block. Only the main thread can; in another one this
        does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Watch(TrainerCallback):
    """Callback that calls the trainer when its loop begins, and at the two points of an update
    at which it can stop."""

    def __init__(self, trainer: ResilientTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step:
            self.trainer.use_settings()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.look()

    def on_step_end(self, args, state, control, **kwargs):
        # at the end of an epoch, `on_epoch_end` saves, after the evaluation that is due there
        if self.trainer.stopping and abs(state.epoch - round(state.epoch)) > 1e-6:
            control.should_save = True

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.trainer.stopping:
            control.should_save = True


class ResilientTrainer(Trainer):
    """Trainer with the checks of this module. Subclasses describe a batch, name the setting that
    makes it smaller, and choose what is shown."""

    batch_setting = "per_device_train_batch_size"
    progress: type[ShownProgress] = ShownProgress

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        *,
        callbacks: Sequence[TrainerCallback] | None = None,
        **kwargs: Any,
    ):
        self.jsonl = JsonlLog(Path(args.output_dir or "") / "log.jsonl")
        super().__init__(model, args, callbacks=[self.jsonl, *(callbacks or [])], **kwargs)
        for noisy in (PrinterCallback, ProgressCallback):
            self.remove_callback(noisy)
        if not args.disable_tqdm:
            self.add_callback(self.progress())
        # Trainer would split each batch with DataParallel, which supports only tensors as outputs
        if self.args.n_gpu > 1:
            logger.warning(
                "one process trains on one GPU, but this machine has %d: to use all of them, "
                "launch with accelerate launch --config_file launch/accelerate/multi_gpu.yaml -m …",
                self.args.n_gpu,
            )
            self.args._n_gpu = 1
        # provenance of the run, for the manifests of its checkpoints
        self.origin: dict[str, Any] = {}
        self._groups: list[dict[str, Any]] = []  # the optimiser's settings in this run
        self.requests = StopRequests()
        self.stopping = False
        self._update: list[Mapping[str, Any]] = []  # the micro-batches of this update
        self._losses: list[Tensor] = []  # their losses
        self._updated = False  # True if both belong to an update that is finished
        self._checks: deque[Check] = deque()  # checks that have not been read yet
        # On a GPU an update is checked after the next one has been queued, so the device never
        # waits.
        self.unread = int(self.args.device.type == "cuda")
        self._doing = "starting"
        self.add_callback(Watch(self))

    @property
    def out(self) -> Path:
        """Folder of the run."""
        return Path(self.args.output_dir or "")

    # --- checks that may stop a run ---------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch=None
    ) -> Tensor:
        if self._updated:
            self._update, self._losses, self._updated = [], [], False
        self._update.append(inputs)
        self._doing = f"computing the gradients of step {self.state.global_step + 1}"
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._losses.append(loss)
        return loss

    def evaluated(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Log the metrics of a trainer's own evaluation, pass them to the callbacks as
        `Trainer.evaluate` does, and return them."""
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def look(self) -> None:
        """Check losses and gradients of this update on the device, and exchange stop requests.

        The host reads the result at once on a CPU, and after the next update on a GPU (see
        `settle`).
        """
        assert self.model is not None
        named = [(n, p.grad) for n, p in self.model.named_parameters() if p.grad is not None]
        if getattr(self.accelerator, "scaler", None) is not None:
            named = []  # with fp16, infinite gradients are expected, and handled by the scaler
        finite = all_finite([*self._losses, *(gradient for _, gradient in named)])
        # created on the device, because a copy from the host would wait
        status = torch.full((), self.requests.status, device=finite.device)
        flags: Tensor = self.accelerator.reduce(  # type: ignore[assignment]
            torch.stack(((~finite).any().float(), status.float())), "sum"
        )
        check = Check(
            self.state.global_step + 1,
            self._update,
            self._losses,
            [name for name, _ in named],
            finite.to("cpu", non_blocking=True),
            flags.to("cpu", non_blocking=True),
            torch.cuda.Event() if finite.is_cuda else None,
        )
        if check.copied is not None:
            check.copied.record()
        self._checks.append(check)
        self._updated = True
        self.settle(self.unread)

    def settle(self, unread: int = 0) -> None:
        """Read the checks of all updates but the last `unread`, and set `stopping` if a process
        received a stop request.

        All processes must call this at the same step. Raises TrainingError if a loss or gradient
        was not finite.
        """
        while len(self._checks) > unread:
            check = self._checks.popleft()
            broken, stop = check.read()
            if broken:
                raise TrainingError(self._not_finite(check))
            self.stopping = self.stopping or stop

    def _not_finite(self, check: Check) -> str:
        """Return the message for an update that is not finite: the step, the tensors, the
        batches."""
        assert self.model is not None
        weights: list[str] = []
        if self.state.global_step < check.step:  # else the update itself changed them
            weights = not_finite(self.model.named_parameters())
        finite = check.finite[len(check.losses) :].tolist()
        gradients = [name for name, fine in zip(check.gradients, finite, strict=True) if not fine]
        losses = [f"{float(loss):g}" for loss in check.losses]
        if weights:
            what = f"the weights are not finite since the previous update ({some(weights)})"
        elif "nan" in losses or "inf" in losses or "-inf" in losses:
            what = f"the loss is {', '.join(losses)}"
        elif gradients:
            what = f"the gradient is not finite ({some(gradients)})"
        else:
            what = "a value is not finite in another process"
        batches = "; ".join(map(self.describe, check.batches))
        return (
            f"step {check.step}: {what}. The update was on {batches}. {self._last_state()} Lower "
            "learning_rate, raise warmup_steps, set bf16=false, or check the data"
        )

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Write a line of the log, after the updates that it reports have been checked."""
        self.settle()
        super().log(logs, start_time)

    def describe(self, inputs: Mapping[str, Any]) -> str:
        """Return a description of a batch for messages: the number of rows and their length."""
        return "a batch"

    def check_weights(self) -> None:
        """Raise TrainingError, on all processes, if a weight is not finite: such a model is
        never written."""
        assert self.model is not None
        self.settle()
        bad = not_finite(self.model.named_parameters())
        if float(
            self.accelerator.reduce(torch.tensor(float(len(bad)), device=self.args.device), "sum")
        ):
            raise TrainingError(
                f"step {self.state.global_step}: the weights are not finite ({some(bad)}) and "
                f"were not saved. {self._last_state()} Lower learning_rate, or raise warmup_steps"
            )

    def _last_state(self) -> str:
        checkpoint = latest_checkpoint(self.out)
        return (
            f"The last checkpoint is {checkpoint}." if checkpoint else "There is no checkpoint yet."
        )

    # --- checkpoints ------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint as Trainer does, after a mark that the folder is incomplete and
        before its manifest; then remove older checkpoints. Raises StoppedError if a stop was
        requested."""
        self.check_weights()
        args, step = self.args, self.state.global_step
        self._doing = f"writing the checkpoint of step {step}"
        folder = self.out / f"checkpoint-{step}"
        assert self.model is not None
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        with writing(folder, needed=3 * weights):  # Adam keeps two numbers per weight
            begin_checkpoint(folder)
            # no older checkpoint is removed before this one is sealed
            keep, args.save_total_limit = args.save_total_limit, None
            try:
                super()._save_checkpoint(model, trial)
            finally:
                args.save_total_limit = keep
            seal_checkpoint(
                folder, step=step, steps_per_epoch=self.steps_per_epoch, run=self.origin
            )
        if self.is_world_process_zero():
            remove_old(self.out, keep, [self.state.best_model_checkpoint])
        if self.stopping:
            name = self.requests.name or "another process was asked to stop"
            raise StoppedError(
                f"{name}: {folder} is saved; run the same command again to resume from it",
                self.requests.status or REQUEUE,
            )

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self._groups = [
            {k: v for k, v in group.items() if k != "params" and not torch.is_tensor(v)}
            for group in self.optimizer.param_groups  # type: ignore[union-attr]
        ]
        return scheduler

    def check_resume(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint has all steps of this run. Note for log and provenance the
        settings that take effect from this step on. Raises CheckpointError if the checkpoint was
        trained on other data, with settings that cannot change within a run, or with another number
        of steps an epoch."""
        step = TrainerState.load_from_json(str(checkpoint / STATE)).global_step
        manifest = read_manifest(checkpoint) or {}
        before = manifest.get("run") or {}
        check_data(checkpoint, before, self.origin)  # explains another number of steps
        _, now, *_, steps = self.set_initial_training_values(self.args, self.get_train_dataloader())
        if (then := manifest.get("steps_per_epoch", now)) != now:
            raise CheckpointError(
                f"{checkpoint}: {then} steps an epoch then, {now} now, so that parts of the data "
                "would be left out or repeated; keep the product of processes, "
                f"{self.batch_setting} and gradient_accumulation_steps, {START_AGAIN}"
            )
        self.jsonl.changed = changed_settings(checkpoint, before, self.origin, step, steps)
        resumed = list(before.get("resumed", []))
        if self.jsonl.changed:
            resumed.append({"step": step, "changed": self.jsonl.changed})
        if resumed:  # else the files are identical to those of a run without interruption
            self.origin["resumed"] = resumed
        return step == steps

    def use_settings(self) -> None:
        """Replace the learning rate, schedule and intervals that were loaded from a checkpoint
        by those of this run. Raises CheckpointError if the schedule cannot change."""
        self.state.compute_steps(self.args, self.state.max_steps)
        if not self.jsonl.changed:
            return
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        if not isinstance(schedule, LambdaLR):  # the rate depends on past steps
            raise CheckpointError(
                f"{', '.join(self.jsonl.changed)} changed, but a run with the schedule "
                f"{type(schedule).__name__} can only be resumed with the same settings"
            )
        for group, given in zip(self.optimizer.param_groups, self._groups, strict=True):  # type: ignore[union-attr]
            group.update(given)
        schedule.base_lrs = [given["initial_lr"] for given in self._groups]
        schedule.last_epoch -= 1
        schedule.step()  # sets the rates of the current step

    def finish_from(self, checkpoint: Path) -> None:
        """Load the trainer's state from a checkpoint that has all steps; nothing is trained."""
        logger.info("%s has all steps; nothing is left to train", checkpoint)
        self.state = TrainerState.load_from_json(str(checkpoint / STATE))
        # the file contains the values of the main process
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.jsonl.on_train_begin(self.args, self.state, self.control)

    # --- messages when something fails ------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Train as Trainer does, from the checkpoint on if one is given.

        Raises CheckpointError as `check_resume` does, StoppedError after a signal, TrainingError if
        a value is not finite or the memory is full, ProcessError if another process fails, and
        StorageError if the disk does.
        """
        if isinstance(resume_from_checkpoint, str):
            self.check_resume(Path(resume_from_checkpoint))
            manifest = read_manifest(Path(resume_from_checkpoint)) or {}
            if manifest.get("processes", self.args.world_size) != self.args.world_size:
                logger.warning(
                    "%s was written by %d processes and is resumed with %d: the results will not "
                    "be identical bit for bit",
                    resume_from_checkpoint,
                    manifest["processes"],
                    self.args.world_size,
                )
        elif self.args.process_index:
            # each process draws its own dropout and noise; a resumed one restores its random state
            torch.manual_seed(self.args.seed + RANKS_APART * self.args.process_index)
        sizes = self.set_initial_training_values(self.args, self.get_train_dataloader())
        self.steps_per_epoch = sizes[1]
        with self.requests.handled(), self.typed_errors():
            output = super().train(resume_from_checkpoint, *args, **kwargs)
            self.settle()
            return output

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Apply `typed_errors` to work outside of `train`; `what` describes it in messages."""
        self._doing, self._update = what, []
        with self.typed_errors():
            yield

    @contextlib.contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Convert errors of the memory to TrainingError, and those of other processes to
        ProcessError."""
        try:
            yield
        except DCARError:
            raise
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise TrainingError(self._out_of_memory(error)) from error
        except RuntimeError as error:
            if "not enough memory" in str(error) or "can't allocate memory" in str(error):
                raise TrainingError(self._out_of_memory(error)) from error
            if is_of_others(error, self.args.world_size):
                raise ProcessError(
                    f"process {self.args.process_index} of {self.args.world_size}, while "
                    f"{self._doing}: another process has ended, or did not answer within "
                    f"{self.args.ddp_timeout} s (ddp_timeout); its own log shows the cause. "
                    f"{self._last_state()} Run the same command again to resume "
                    f"({str(error).splitlines()[0]})"
                ) from error
            raise

    def _out_of_memory(self, error: BaseException) -> str:
        batch = self.describe(self._update[-1]) if self._update else "the model"
        message = (str(error) or "out of memory").splitlines()[0][:200]
        return (
            f"{self._doing}: out of memory for {batch} ({message}). Lower {self.batch_setting} and "
            "raise "
            "gradient_accumulation_steps by the same factor: the update stays the same. "
            f"{self._last_state()}"
        )
