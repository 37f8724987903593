"""Eden at points computed rule-based, ScaledAdam on a quadratic and through a state dict."""

import copy

import pytest
import torch

from dcar.optim import ScaledAdam, adamw, cosine, eden, eden_factor


def test_eden_at_points_computed_by_hand():
    assert eden_factor(0, 0) == 0.5
    assert eden_factor(100, 0) == pytest.approx(0.75 * (1 + 0.0004) ** -0.25)
    assert eden_factor(5000, 0) == pytest.approx(2**-0.25)
    assert eden_factor(5000, 4) == pytest.approx(2**-0.5)
    assert eden_factor(15000, 12) == pytest.approx(10**-0.5)


def test_schedules_set_the_rate():
    optimizer = ScaledAdam([torch.nn.Parameter(torch.ones(3))], lr=0.01)
    schedule = eden(optimizer, batches_per_epoch=10, warmup_batches=4)
    for _ in range(40):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr()[0] == pytest.approx(0.01 * eden_factor(40, 4, warmup_batches=4))
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    rates = []
    schedule = cosine(other, total=100, warmup=10)
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        other.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0) and rates[-1] < 0.03


def problem():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 4) * 0.5)
    scalar = torch.nn.Parameter(torch.tensor(2.0))
    target = torch.randn(8, 4)
    return [weight, scalar], lambda: ((weight - target) ** 2).mean() + (scalar - 1) ** 2


def train(parameters, loss, optimizer, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_scaled_adam_decreases_a_quadratic_and_outliers_are_clipped():
    parameters, loss = problem()
    losses = train(parameters, loss, ScaledAdam(parameters, lr=0.03), 300)
    assert losses[-1] < 0.05 * losses[0]
    optimizer = ScaledAdam(parameters, lr=0.03)
    train(parameters, loss, optimizer, 20)
    for p in parameters:
        p.grad = torch.full_like(p, 1e6)
    group = optimizer.param_groups[0]
    clip = optimizer._clip(group, parameters)
    assert clip == pytest.approx(2.0 * sorted(group["norms"])[len(group["norms"]) // 2] / group["norms"][-1])
    parameters[0].grad[0, 0] = float("nan")
    assert optimizer._clip(group, parameters) == 0.0


def test_step_is_relative_to_the_tensors_size():
    small, large = (torch.nn.Parameter(torch.full((4,), s)) for s in (0.01, 1.0))
    optimizer = ScaledAdam([small, large], lr=0.01, clipping_scale=None, scalar_lr_scale=0.0)
    before = [small.clone(), large.clone()]
    for p in (small, large):
        p.grad = torch.ones_like(p)
    optimizer.step()
    relative = [float(((a - b) / b).abs().mean()) for a, b in zip((small, large), before, strict=True)]
    assert relative == pytest.approx([0.01, 0.01], rel=1e-3)


def test_state_dict_round_trip_continues_bit_for_bit():
    parameters, loss = problem()
    optimizer = ScaledAdam(parameters, lr=0.02)
    train(parameters, loss, optimizer, 15)
    state, values = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in parameters]
    expected = train(parameters, loss, optimizer, 10)
    other = ScaledAdam(parameters, lr=0.5)
    other.load_state_dict(state)
    with torch.no_grad():
        for p, v in zip(parameters, values, strict=True):
            p.copy_(v)
    assert train(parameters, loss, other, 10) == expected


def test_adamw_decays_matrices_and_neither_biases_nor_norms():
    """With no gradient but zeros a step is the decay alone: by rate · decay of matrices, by nothing of vectors."""
    layer, norm = torch.nn.Linear(3, 2), torch.nn.LayerNorm(2)
    parameters = [*layer.parameters(), *norm.parameters()]
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    adamw(parameters, rate=0.1, decay=0.5).step()
    assert torch.allclose(layer.weight, before[0] * 0.95)
    assert all(torch.equal(p, b) for p, b in zip(parameters[1:], before[1:], strict=True))
