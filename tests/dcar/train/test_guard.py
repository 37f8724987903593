"""Training that goes wrong stops and says where."""

import dataclasses
import math
import os
import signal

import pytest
import torch
from tiny_data import CODES, counting, noise, write_prepared
from tiny_training import log_of, tiny_config, trainer_of
from transformers import TrainerCallback

from dcar.errors import StoppedError, TrainingError
from dcar.model.car import CARDecoder
from dcar.train import car
from dcar.train.car import CARTrainer, run
from dcar.train.checkpoints import latest_checkpoint, why_incomplete
from dcar.train.resilient import all_finite


def test_all_finite_looks_at_values_not_at_their_squares():
    fine = [torch.full((3,), 3e38), torch.zeros(0), torch.tensor(1.0, dtype=torch.bfloat16)]
    bad = [torch.tensor([1.0, math.nan]), torch.tensor([-math.inf])]
    assert all_finite([*fine, *bad]).tolist() == [True, True, True, False, False]
    assert all_finite([]).tolist() == []


@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ({}, {"speech_position_scale": math.nan}, "step 1: .*loss .*nan"),
        ({"learning_rate": math.inf, "save_steps": 1}, {}, "step 1: .*weights.*text_embedding"),
        ({"learning_rate": math.inf, "max_steps": 1}, {}, "step 1: .*weights.*text_embedding"),
        ({"optim": "scaled_adam", "learning_rate": math.inf}, {}, "step 2: .*weights"),
        (
            {"gradient_accumulation_steps": 2},
            {"speech_position_scale": math.nan},
            "step 1: .*loss .*nan, nan",
        ),
    ],
)
def test_training_that_turns_to_nan_stops(changes, model, message, data, tmp_path, monkeypatch):
    # such settings are refused by now
    for place in ("dcar.config.training.check", "dcar.model.car.check"):
        monkeypatch.setattr(place, lambda config: None)
    settings = tiny_config(data, tmp_path, **changes)
    for name, value in model.items():  # no setting of this value is accepted by name any more
        object.__setattr__(settings.model, name, value)
    with pytest.raises(TrainingError, match=message):
        run(settings)
    assert not (tmp_path / "model.safetensors").exists() and latest_checkpoint(tmp_path) is None


def with_callback(monkeypatch, callback: TrainerCallback) -> None:
    """From now on, trainers ask this callback before all others."""

    class Watched(CARTrainer):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            self.callback_handler.callbacks.insert(0, callback)

    monkeypatch.setattr(car, "CARTrainer", Watched)


def test_the_error_names_step_tensor_batch_and_the_last_good_checkpoint(
    data, tmp_path, monkeypatch
):
    class Poison(TrainerCallback):
        """Breaks the gradient of one parameter at step 5."""

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            if state.global_step == 4:
                model.norm.bias.grad[0] = math.inf

    with_callback(monkeypatch, Poison())
    with pytest.raises(
        TrainingError, match="step 5: .*gradient.*norm.bias.* 4 utterances.*checkpoint-4"
    ):
        run(tiny_config(data, tmp_path, save_steps=2))
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    assert all(math.isfinite(line["loss"]) for line in log_of(tmp_path, "loss"))


@pytest.fixture
def lagging(monkeypatch):
    """Updates are checked when the next one is queued, as on a GPU."""
    create = CARTrainer.__init__

    def late(self, *given, **named):
        create(self, *given, **named)
        self.unread = 1

    monkeypatch.setattr(CARTrainer, "__init__", late)


@pytest.mark.usefixtures("lagging")
@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        (
            {"logging_steps": 4, "max_steps": 1},
            {"speech_position_scale": math.nan},
            "step 1: the loss is nan",
        ),
        (
            {"save_steps": 1, "logging_steps": 4},
            {"speech_position_scale": math.nan},
            "step 1: the loss is nan",
        ),
        ({"learning_rate": math.inf, "logging_steps": 4}, {}, "step 2: the loss is nan"),
        (
            {"learning_rate": math.inf, "save_steps": 1},
            {},
            "step 1: the weights are not finite .* not saved",
        ),
    ],
)
def test_a_check_that_is_read_late_neither_logs_nor_saves(
    changes, model, message, data, tmp_path, monkeypatch
):
    test_training_that_turns_to_nan_stops(changes, model, message, data, tmp_path, monkeypatch)
    log = tmp_path / "log.jsonl"
    assert not log.exists() or all(math.isfinite(line["loss"]) for line in log_of(tmp_path, "loss"))


# --- signals --------------------------------------------------------------------------------------


class Signal(TrainerCallback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, step: int, number: signal.Signals):
        self.step, self.number = step, number

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), self.number)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> str:
    """The checksum after a run that nothing stopped."""
    return run(tiny_config(data, tmp_path_factory.mktemp("whole"))).checksum()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize("step", [3, 5])  # within an epoch, and at its end
def test_a_signal_saves_at_the_end_of_the_step(
    number, status, step, whole, data, tmp_path, monkeypatch
):
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        with_callback(patch, Signal(step, number))
        with pytest.raises(StoppedError, match=f"{number.name}.*checkpoint-{step}") as caught:
            run(tiny_config(data, tmp_path / "stopped"))
    assert caught.value.status == status and signal.getsignal(number) == before
    assert latest_checkpoint(tmp_path / "stopped") == tmp_path / "stopped" / f"checkpoint-{step}"
    assert not why_incomplete(tmp_path / "stopped" / f"checkpoint-{step}")
    assert run(tiny_config(data, tmp_path / "stopped")).checksum() == whole


@pytest.mark.usefixtures("lagging")
def test_a_signal_that_is_read_late_saves_at_the_end_of_the_next_step(
    whole, data, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        with_callback(patch, Signal(3, signal.SIGTERM))
        with pytest.raises(StoppedError, match="SIGTERM.*checkpoint-4 is saved"):
            run(tiny_config(data, tmp_path))
    assert run(tiny_config(data, tmp_path)).checksum() == whole


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: not enough memory: you "
            "tried to allocate"
        ),
        MemoryError(),
        RuntimeError("shapes do not fit"),
    ],
    ids=["cuda", "cpu", "python", "other"],
)
def test_out_of_memory_names_batch_length_and_setting(error, data, tmp_path, monkeypatch):
    """Another error of the model stays what it is."""

    def forward(self, *inputs):
        raise error

    monkeypatch.setattr(CARDecoder, "forward", forward)
    said = "step 1: .* 4 utterances of .*[0-9]+ phonemes .*per_device_train_batch_size .*gradient_accumulation_steps"
    kind, message = (
        (RuntimeError, "^shapes do not fit$")
        if str(error).startswith("shapes")
        else (TrainingError, said)
    )
    with pytest.raises(kind, match=message):
        run(tiny_config(data, tmp_path))


# --- numbers --------------------------------------------------------------------------------------


class Gradients(TrainerCallback):
    """Keeps what the optimiser sees at the first update."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            self.value = torch.cat([p.grad.flatten() for p in model.parameters()]).double().clone()


@pytest.mark.parametrize(("batch", "accumulation"), [(4, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("speech", [noise, counting], ids=["equal", "unequal"])
def test_gradients_do_not_depend_on_how_a_batch_is_divided(speech, batch, accumulation, tmp_path):
    """Eight utterances as one batch or as several: an update sees the mean over its batches. For
    equal lengths that is the gradient of the large batch but for rounding; where they hold
    unequally many targets it is near it."""
    data = write_prepared(tmp_path / "data", train=8, speech=speech)

    def one_step(batch: int, accumulation: int) -> tuple[torch.Tensor, float, torch.Tensor]:
        """The gradient and the loss of the first update, and the mean of its batches' gradients
        without Trainer."""
        config = tiny_config(
            data,
            tmp_path / f"{batch}x{accumulation}",
            {"dropout": 0.0},
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            max_grad_norm=0.0,
        )
        torch.manual_seed(0)
        model = CARDecoder(dataclasses.replace(config.model, speech_vocab_size=CODES))
        trainer, by_hand = trainer_of(config, model), []
        for inputs in trainer.get_train_dataloader():
            by_hand.append(
                torch.cat(
                    [
                        g.flatten()
                        for g in torch.autograd.grad(model(inputs).loss, list(model.parameters()))
                    ]
                ).double()
            )
        assert len(by_hand) == accumulation
        trainer.add_callback(kept := Gradients())
        trainer.train()
        return (
            kept.value,
            log_of(tmp_path / f"{batch}x{accumulation}")[0]["loss"],
            sum(by_hand) / accumulation,
        )

    (whole, loss, _), (divided, other, mean) = one_step(8, 1), one_step(batch, accumulation)
    assert torch.allclose(divided, mean, atol=1e-5 * float(divided.abs().max()))
    deviation = (whole - divided).abs() / whole.abs().max()
    if speech is noise:
        assert deviation.max() < 1e-5 and deviation.mean() < 1e-7, (
            float(deviation.max()),
            float(deviation.mean()),
        )
        assert other == pytest.approx(loss, rel=1e-5)
    else:
        assert deviation.max() > 1e-5 and torch.cosine_similarity(divided, whole, dim=0) > 0.98
