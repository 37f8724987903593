"""What the optimiser sees does not depend on the number of processes."""

from pathlib import Path

import harness
import pytest
import torch
from tiny_data import write_prepared
from tiny_training import log_of, tiny_config
from transformers import TrainerCallback

from dcar.train import car


class Gradients(TrainerCallback):
    """Writes what the optimiser sees at the first update."""

    def __init__(self, out: Path):
        self.out = out

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0 and state.is_world_process_zero:
            found = {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}
            torch.save(found, self.out / "gradients.pt")


@pytest.mark.parametrize(("batch", "accumulation"), [(4, 1), (2, 2)])
def test_gradients_of_two_processes_are_those_of_one(batch, accumulation, tmp_path):
    """Eight utterances of equal length on one process, or as twice four: deviations are those of rounding."""
    data = write_prepared(tmp_path / "data", train=8)

    def job(name: str, processes: int, batch: int, accumulation: int) -> dict[str, torch.Tensor]:
        def train(out: Path) -> None:
            class Watched(car.CARTrainer):
                def __init__(self, *arguments, **keywords):
                    super().__init__(*arguments, **keywords)
                    self.add_callback(Gradients(out))

            car.CARTrainer = Watched  # in the forked process alone
            car.run(tiny_config(data, out, {"dropout": 0.0}, batch_size=batch, gradient_accumulation=accumulation,
                                max_steps=1, max_grad_norm=0.0, wait_minutes=1))

        end = harness.run(harness.Job(name, train, processes), tmp_path / name)
        assert set(end.status) == {0}, end.said[-3000:]
        return torch.load(tmp_path / name / "gradients.pt")

    one, two = job("one", 1, 8, 1), job("two", 2, batch, accumulation)
    largest = max(float(g.abs().max()) for g in one.values() if g.numel())
    deviations = torch.cat([(one[name] - two[name]).flatten().abs() for name in one]) / largest
    assert deviations.max() < 1e-5 and deviations.mean() < 1e-7, (float(deviations.max()), float(deviations.mean()))
    assert log_of(tmp_path / "two")[0]["loss"] == pytest.approx(log_of(tmp_path / "one")[0]["loss"], rel=1e-5)
