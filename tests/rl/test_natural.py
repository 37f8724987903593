"""Natural policy gradient: a step of known length, the same in whatever weights a policy is
written, and stage two with it."""

import pytest
import torch
from test_after_draw_training import stopped_and_whole, trainer_of
from torch import nn
from toy_world import ToyRecognizer

from rl.natural import NaturalGradient, fisher_product
from rl.rewards import WERReward
from rl.trainer import log_probs_of

NATURAL = {"optim": "natural", "learning_rate": 0.2, "gradient_accumulation_steps": 2}


class Softmax(nn.Module):
    """A distribution over K actions of every decision, linear in features [M, K, F] that differ
    by `scale` in size."""

    def __init__(self, features: torch.Tensor, scale: float = 1.0):
        super().__init__()
        torch.manual_seed(3)
        self.scale = torch.logspace(0, 1, features.shape[-1], scale)
        self.weight = nn.Parameter(torch.randn(features.shape[-1]) / 3 / self.scale)
        self.features = features * self.scale

    def forward(self) -> torch.Tensor:
        return (self.features @ self.weight).log_softmax(-1)


def features(decisions: int = 200, actions: int = 5, size: int = 4) -> torch.Tensor:
    return torch.randn(decisions, actions, size, generator=torch.Generator().manual_seed(0))


def curvature_of(probs: Softmax):
    def curvature():
        with torch.enable_grad():
            return fisher_product(probs(), torch.mean, list(probs.parameters()))

    return curvature


def gradient(probs: Softmax, advantages: torch.Tensor) -> None:
    """Of minus the expected advantage [M, K]."""
    probs.zero_grad()
    (-(probs().exp() * advantages).sum(-1).mean()).backward()


@pytest.mark.parametrize("length", [0.05, 0.2])
def test_a_step_moves_the_distribution_so_far_and_towards_the_advantages(length):
    probs = Softmax(features())
    advantages = torch.randn(probs().shape, generator=torch.Generator().manual_seed(1))
    before = probs().detach()
    gradient(probs, advantages)
    NaturalGradient(probs.parameters(), curvature_of(probs), length, damping=1e-6).step()
    after = probs().detach()
    kl = (before.exp() * (before - after)).sum(-1).mean()
    assert float(kl) == pytest.approx(length**2 / 2, rel=0.15)
    gained = ((after.exp() - before.exp()) * advantages).sum(-1).mean()
    euclidean = Softmax(features())
    gradient(euclidean, advantages)
    with torch.no_grad():  # as far along the plain gradient
        for weight in euclidean.parameters():
            (image,) = curvature_of(euclidean)()([weight.grad])
            weight.sub_(length * weight.grad / (weight.grad @ image).sqrt())
    assert gained > ((euclidean().exp() - before.exp()) * advantages).sum(-1).mean() > 0


def test_weights_in_other_units_give_the_same_distribution():
    """Features up to a hundred times as large: the step of Adam would be another one."""
    advantages = torch.randn(200, 5, generator=torch.Generator().manual_seed(1))
    all_probs = []
    for scale in (1.0, 100.0):
        probs = Softmax(features(), scale).double()
        probs.features = probs.features.double()
        gradient(probs, advantages.double())
        NaturalGradient(
            probs.parameters(), curvature_of(probs), 0.2, damping=1e-12, iterations=200
        ).step()
        all_probs.append(probs().detach())
    assert torch.allclose(all_probs[0], all_probs[1], atol=2e-2)
    assert (all_probs[0] - Softmax(features())()).abs().max() > 0.1


@pytest.mark.parametrize("reads", ["hidden", "candidates"])
def test_stage_two_moves_the_distribution_by_what_was_asked(tmp_path, reads):
    """One update, all micro-batches of a window together; the whole policy, attention and all."""
    trainer = trainer_of(tmp_path, [WERReward(ToyRecognizer())], reads, max_steps=1, **NATURAL)
    output = trainer.policy.scores.linear if reads == "candidates" else trainer.policy.output
    nn.init.normal_(output.weight, std=0.5)
    for copy in (trainer.reference, trainer.rollout_policy):
        copy.load_state_dict(trainer.policy.state_dict())
    before = trainer.policy.checksum()
    trainer.train()
    assert trainer.policy.checksum() != before and len(trainer._window) == 2
    kl = []
    for made in trainer._window:
        old = log_probs_of(trainer.rollout_policy, made.batch)
        new = log_probs_of(trainer.policy, made.batch).detach()
        by_rollout = ((old.exp() * (old - new)).sum(-1) * made.batch.mask).sum(
            -1
        ) / made.batch.mask.sum(-1)
        kl.append(float(by_rollout.mean()))
    assert sum(kl) / len(kl) == pytest.approx(NATURAL["learning_rate"] ** 2 / 2, rel=0.5)


def test_resumes_bit_for_bit(tmp_path):
    def rewards():
        return [WERReward(ToyRecognizer())]

    stopped_and_whole(tmp_path, rewards, 2, reads="candidates", **NATURAL)
