"""Eden at points computed by hand; ScaledAdam against a slow reference, its kernels, and through
a state dict."""

import copy
import math

import pytest
import torch

from dcar import optim
from dcar.optim import ScaledAdam, cosine, eden, eden_factor


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


class Reference:
    """The rule of ScaledAdam, tensor by tensor and with numbers on the host."""

    def __init__(
        self,
        parameters,
        lr=0.03,
        betas=(0.9, 0.95),
        clipping_scale=2.0,
        clipping_update_period=1000,
        scalar_lr_scale=0.1,
        eps=1e-8,
        min_rms=1e-5,
        max_rms=3.0,
    ):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})
        self.norms, self.clips, self.state = [], [], {}

    def step(self):
        pairs = [(p.data, p.grad) for p in self.parameters if p.grad is not None]
        norm = math.sqrt(
            sum(
                float((g * max(float(p.square().mean().sqrt()), self.min_rms)).square().sum())
                for p, g in pairs
            )
        )
        if not math.isfinite(norm):
            return
        self.norms = [*self.norms, norm][-self.clipping_update_period :]
        median = sorted(self.norms)[len(self.norms) // 2]
        self.clips.append(
            1.0 if len(self.norms) < 10 else min(1.0, self.clipping_scale * median / norm)
        )
        for p, g in pairs:
            self.update(p, g * self.clips[-1], self.state.setdefault(p.data_ptr(), {"step": 0}))

    def update(self, p, gradient, state):
        state["step"] += 1

        def direction(name, value):
            first, second = (
                state.setdefault(f"{name}{i}", torch.zeros_like(value)) for i in (1, 2)
            )
            first.lerp_(value, 1 - self.betas[0])
            second.lerp_(value.square(), 1 - self.betas[1])
            correction1, correction2 = (1 - beta ** state["step"] for beta in self.betas)
            return (first / correction1) / ((second / correction2).sqrt() + self.eps)

        change = direction("tensor", gradient)
        if p.numel() == 1:
            p.sub_(change, alpha=self.lr * self.scalar_lr_scale)
            return
        rms = p.square().mean().sqrt().clamp(min=self.min_rms)
        growth = self.lr * self.scalar_lr_scale * direction("scale", (p * gradient).sum())
        p.sub_(change * (self.lr * rms) + p * growth)
        p.mul_((self.max_rms / p.square().mean().sqrt()).clamp(max=1.0))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The operations that a GPU is given, computed on the CPU."""
    monkeypatch.setattr(optim, "paired", optim.spread)
    monkeypatch.setattr(optim, "sums", optim.signed_norms)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_scaled_adam_is_equal_to_a_slow_reference(device, request):
    """With outliers that are clipped, a step that is not finite, a tensor without gradient in
    some steps, single elements, and tensors at both bounds of the RMS."""
    if device == "gpu":
        request.getfixturevalue("as_on_a_gpu")
    torch.manual_seed(0)
    shapes = [(640, 160), (16,), (), (1, 1), (3, 4, 5), (8, 8), (8,)]
    sizes = [0.1, 1.0, 2.0, 0.1, 0.5, 2.99, 1e-7]
    ours, theirs = (
        [torch.nn.Parameter(v.clone()) for v in values]
        for values in [
            [torch.randn(shape) * size for shape, size in zip(shapes, sizes, strict=True)]
        ]
        * 2
    )
    settings = dict(lr=0.03, clipping_update_period=12)
    optimizer, reference = ScaledAdam(ours, **settings), Reference(theirs, **settings)
    for step in range(40):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = (
                None
                if i == 4 and step % 3 == 0
                else torch.randn_like(p) * (10 if step in (15, 33) else 1)
            )
            if (step, i) == (20, 1):
                p.grad[3] = math.inf
            q.grad = None if p.grad is None else p.grad.clone()
        optimizer.step()
        reference.step()
        for p, q in zip(ours, theirs, strict=True):
            assert (p - q).abs().max() <= 2e-6 * q.abs().max()
    assert len(reference.clips) == 39 and sum(clip < 0.5 for clip in reference.clips) == 2
    torch.testing.assert_close(
        optimizer.param_groups[0]["norms"], torch.tensor(reference.norms), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("clipping_scale", [2.0, None])
@pytest.mark.parametrize("steps", [0, 12])
def test_a_step_whose_gradient_is_not_finite_changes_nothing(value, clipping_scale, steps):
    """Neither weights nor state, at the first step as later; a norm that overflows (1e30) is not
    finite either."""
    parameters, loss = problem()
    optimizer = ScaledAdam(parameters, lr=0.03, clipping_scale=clipping_scale)
    with torch.no_grad():
        parameters[0].mul_(20)  # above max_rms, which the next step that is taken brings down
    train(parameters, loss, optimizer, steps)
    optimizer.zero_grad()
    loss().backward()
    parameters[0].grad[2, 1] = value
    before, state = [p.detach().clone() for p in parameters], copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    assert all(map(torch.equal, parameters, before))
    if steps:
        torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    else:
        assert not any(v.any() for s in optimizer.state.values() for v in s.values())
    train(parameters, loss, optimizer, 1)
    assert not any(map(torch.equal, parameters, before))


def test_step_is_relative_to_the_tensors_size():
    small, large = (torch.nn.Parameter(torch.full((4,), s)) for s in (0.01, 1.0))
    optimizer = ScaledAdam([small, large], lr=0.01, clipping_scale=None, scalar_lr_scale=0.0)
    before = [small.clone(), large.clone()]
    for p in (small, large):
        p.grad = torch.ones_like(p)
    optimizer.step()
    relative = [
        float(((a - b) / b).abs().mean()) for a, b in zip((small, large), before, strict=True)
    ]
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
