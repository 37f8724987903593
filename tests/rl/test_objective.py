"""The maths of DCPO: advantages, clipping, KL, agreement with TRL."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from trl import GRPOTrainer

from heads.policy import HiddenPolicy, HiddenPolicyConfig
from rl import objective as o

NAN = float("nan")


def example(rollouts: int = 6, decisions: int = 5, actions: int = 4, seed: int = 0):
    """Log-probabilities of a policy, the policy of the rollouts and a reference, actions, a
    ragged mask, advantages."""
    g = torch.Generator().manual_seed(seed)
    probs = [
        torch.randn(rollouts, decisions, actions, generator=g).double().log_softmax(-1)
        for _ in range(3)
    ]
    taken = torch.randint(0, actions, (rollouts, decisions), generator=g)
    lengths = torch.randint(1, decisions + 1, (rollouts,), generator=g)
    mask = (torch.arange(decisions) < lengths[:, None]).double()
    return (
        probs[0].requires_grad_(),
        probs[1],
        probs[2],
        taken,
        mask,
        torch.randn(rollouts, generator=g).double(),
    )


def on_policy(
    advantages=None, weights=None, rollouts: int = 6, **how
) -> tuple[o.PolicyLoss, torch.Tensor]:
    """The loss on the example as in the first update, whose denominators are the policy's own,
    and its gradient."""
    probs, _, reference, actions, mask, given = example(rollouts)
    out = o.policy_loss(
        probs,
        actions,
        o.taken(probs, actions).detach(),
        reference,
        given if advantages is None else advantages,
        mask,
        torch.ones(rollouts) if weights is None else weights,
        **how,
    )
    return out, torch.autograd.grad(out.loss, probs)[0]


def trl_loss(loss_type: str, log_probs, old, advantages, mask) -> torch.Tensor:
    """TRL's own GRPO loss on given log-probabilities: its method on an object that was never
    initialised."""
    trainer = object.__new__(GRPOTrainer)
    trainer.__dict__.update(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=0.0,
        use_vllm=False,
        importance_sampling_level="token",
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=0.2,
        max_completion_length=50,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(cpu=True),
        args=SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            log_probs,
            torch.zeros_like(log_probs),
            None,
        ),
    )
    ids = torch.zeros(mask.shape, dtype=torch.long)
    return trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids[:, :0],
            "prompt_mask": ids[:, :0],
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": old,
            "num_items_in_batch": mask.sum(),
        },
    )


@pytest.mark.parametrize("loss_type", o.LOSS_TYPES)
def test_loss_and_gradient_equal_those_of_trl(loss_type):
    probs, old_log_probs, reference, actions, mask, advantages = example()
    old = o.taken(old_log_probs, actions)
    normalizer = {"dapo": mask.sum(), "dr_grpo": 50.0}.get(loss_type, 1.0)
    ours = o.policy_loss(
        probs,
        actions,
        old,
        reference,
        advantages,
        mask,
        torch.ones(6),
        epsilon=0.2,
        loss_type=loss_type,
        normalizer=normalizer,
    ).loss
    mine = torch.autograd.grad(ours, probs)[0]
    theirs = trl_loss(loss_type, o.taken(probs, actions), old, advantages, mask)
    assert torch.allclose(ours, theirs) and ours.abs() > 1e-3
    assert torch.allclose(mine, torch.autograd.grad(theirs, probs)[0])


def test_exact_kl_is_the_expectation_of_the_sampled_estimator():
    probs, _, reference, *_ = example()
    probs = probs.detach()
    difference = reference - probs
    k3 = difference.exp() - difference - 1  # the estimator that GRPO takes at the sampled action
    assert torch.allclose(o.exact_kl(probs, reference), (probs.exp() * k3).sum(-1))
    assert (o.exact_kl(probs, reference) >= 0).all()
    assert torch.allclose(o.exact_kl(probs, probs), torch.zeros(()).double())
    assert torch.allclose(o.entropy(torch.zeros(4).log_softmax(-1)), torch.tensor(4.0).log())


def test_kl_enters_with_its_weight_and_grows_from_zero():
    probs, _, reference, _, mask, _ = example()
    plain, with_kl = (on_policy(beta=b)[0] for b in (0.0, 0.3))
    kl = o.aggregate(o.exact_kl(probs, reference), mask, torch.ones(6))
    assert torch.allclose(with_kl.loss - plain.loss, 0.3 * kl)
    assert [o.kl_weight(0.04, e, 3) for e in range(3)] == [0, 0.02, 0.04]
    assert o.kl_weight(0.04, 0, 1) == 0


def test_advantages_have_zero_mean_and_unit_std_in_every_group():
    rewards = torch.tensor([1.0, 2, 3, 6, -5, 0, 5, 1]).double()
    out = o.group_advantages(rewards, 4)
    groups = out.values.view(2, 4)
    assert torch.allclose(groups.mean(1), torch.zeros(2), atol=1e-6)
    # ddof 1, up to the 1e-4 in the denominator
    assert torch.allclose(groups.std(1), torch.ones(2), atol=1e-3)
    assert torch.allclose(o.group_advantages(rewards + 100, 4).values, out.values, atol=1e-5)
    centred = rewards.view(2, 4) - rewards.view(2, 4).mean(1, keepdim=True)
    assert torch.allclose(o.group_advantages(rewards, 4, "none").values, centred.view(-1).float())
    batch = o.group_advantages(rewards, 4, "batch").values
    assert torch.allclose(batch, (centred.view(-1) / (rewards.std() + 1e-4)).float())


def test_missing_rewards_count_nowhere():
    rewards = torch.tensor([1.0, NAN, 3, 5, NAN, NAN, NAN, NAN, NAN, NAN, NAN, 2]).double()
    out = o.group_advantages(rewards, 4)
    present = o.group_advantages(torch.tensor([1.0, 3, 5]).double(), 3)
    assert torch.allclose(out.values[[0, 2, 3]], present.values)
    assert out.values[[1, 4, 5, 6, 7, 8, 9, 10, 11]].tolist() == [0] * 9
    assert out.valid.tolist() == [True, False, True, True] + [False] * 7 + [True]
    assert out.zero_std.tolist() == [False, True, True]
    _, gradient = on_policy(out.values.double(), out.valid.float(), 12)
    assert gradient.isfinite().all()
    assert gradient[~out.valid].abs().sum() == 0 and gradient[0].abs().sum() > 0


def test_a_group_without_spread_teaches_nothing():
    # the mean of 0.1 three times over is not 0.1 in floating point: the spread is tiny instead of
    # zero
    out = o.group_advantages(torch.full((6,), 0.1), 3)
    assert out.zero_std.all() and out.values.abs().sum() == 0
    assert on_policy(out.values)[1].abs().sum() == 0  # a backward pass exists, and it is zero


def test_a_scale_or_a_kind_of_loss_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="loss_type .*'grpoo'"):
        on_policy(weights=torch.ones(6), loss_type="grpoo")
    with pytest.raises(ValueError, match="scale .*'groups'"):
        o.group_advantages(torch.rand(6), 3, "groups")


@pytest.mark.parametrize("loss_type", o.LOSS_TYPES)
def test_nothing_left_to_learn_still_has_a_backward_pass(loss_type):
    out, gradient = on_policy(weights=torch.zeros(6), loss_type=loss_type, beta=0.1)
    assert out.loss.item() == 0 and gradient.abs().sum() == 0


def test_first_inner_step_has_ratio_one_and_the_clip_bites_later():
    probs, old_log_probs, reference, actions, mask, advantages = example()
    first, _ = on_policy()
    assert torch.allclose(first.ratio, torch.ones(()).double()) and not first.clipped.any()
    later = o.policy_loss(
        probs, actions, o.taken(old_log_probs, actions), reference, advantages, mask, torch.ones(6)
    )
    assert later.clipped.any()
    ratio = (o.taken(probs, actions) - o.taken(old_log_probs, actions)).exp()
    gradient = torch.autograd.grad(o.clipped_surrogate(ratio, advantages, 0.2).sum(), probs)[0]
    assert gradient[later.clipped].abs().sum() == 0 and gradient[~later.clipped].abs().sum() > 0
    assert ratio.detach().allclose(later.ratio)


def test_a_collapsed_policy_gives_no_nan():
    probs = torch.tensor([[[0.0, -200.0]]]).log_softmax(-1).requires_grad_()
    old = torch.tensor([[-200.0]])
    out = o.policy_loss(
        probs,
        torch.tensor([[0]]),
        old,
        probs.detach(),
        torch.zeros(1),
        torch.ones(1, 1),
        torch.ones(1),
        beta=0.1,
    )
    assert torch.autograd.grad(out.loss, probs)[0].isfinite().all() and out.loss.isfinite()


def test_advantages_of_decisions_equal_those_of_rollouts_where_they_are_alike():
    torch.manual_seed(0)
    probs, reference = torch.randn(4, 3, 5).log_softmax(-1), torch.randn(4, 3, 5).log_softmax(-1)
    actions, mask, weights = torch.randint(5, (4, 3)), torch.ones(4, 3), torch.ones(4)
    behaviour, advantages = o.taken(probs, actions) + 0.3 * torch.randn(4, 3), torch.randn(4)
    whole = o.policy_loss(probs, actions, behaviour, reference, advantages, mask, weights)
    each = o.policy_loss(
        probs, actions, behaviour, reference, advantages[:, None].expand(4, 3), mask, weights
    )
    assert torch.equal(whole.loss, each.loss) and torch.equal(whole.clipped, each.clipped)


def test_decision_distribution_is_a_distribution():
    policy = HiddenPolicy(HiddenPolicyConfig(8, 3, width=8, num_attention_heads=2))
    probs = policy.log_probs(torch.randn(2, 6, 3).half())
    assert probs.dtype == torch.float32 and torch.allclose(probs.exp().sum(-1), torch.ones(2, 6))
