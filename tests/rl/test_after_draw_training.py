"""DCPO with policies that see the candidates, the token reward, and credit by decision."""

import numpy as np
import pytest
import torch
from tiny_training import log_of
from toy_training import EVERY_STEP, NEVER, check_said, toy_config, toy_parts, toy_trainer
from toy_world import (
    ToyCTC,
    ToyDecoder,
    ToyRecognizer,
    ToyVocoder,
    faster,
    toy_items,
    toy_token_recognizer,
)

from dcar.errors import CheckpointError, ConfigError
from dcar.text.wer import score_corpus
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig
from heads.policy import (
    CandidatePolicy,
    CandidatePolicyConfig,
    HiddenPolicy,
    HiddenPolicyConfig,
)
from rl.credit import LengthReward
from rl.policies import make_policy
from rl.rewards import LikelihoodReward, RangePenalty, TokenLikelihoodReward, WERReward, needs_sound
from rl.trainer import DCPOTrainer

RUN = {
    "chunk_range": [],
    "forced_rows": "none",
    **EVERY_STEP,
    "metric_for_best_model": "eval_reward",
}
LEARN = {
    "learning_rate": 0.02,
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "beta": 0.0,
    **NEVER,
}


class Deaf(ToyVocoder):
    def synthesize(self, token_lists, speaker):
        raise AssertionError("nothing hears these rollouts")


def trainer_of(out, rewards, reads="candidates", vocoder=None, **changes) -> DCPOTrainer:
    torch.manual_seed(1)
    policy = (
        HiddenPolicy(HiddenPolicyConfig(24, 4, width=16, num_attention_heads=2))
        if reads == "hidden"
        else CandidatePolicy(CandidatePolicyConfig(24, 4))
    )
    parts = toy_parts(16, 5, model=policy, reward_funcs=rewards, vocoder=vocoder or ToyVocoder())
    return toy_trainer(out, parts, **{**RUN, **changes})


def test_rollouts_say_what_the_policy_said(tmp_path):
    """The distribution recomputed from the recorded states and candidates is the one that the
    sizes were drawn from."""
    trainer = trainer_of(
        tmp_path, [WERReward(ToyRecognizer())], forced_rows="policy_ratio", chunk_range=[2, 3]
    )
    torch.nn.init.normal_(trainer.policy.scores.linear.weight, std=0.2)
    batch = trainer._rollouts(next(iter(trainer.get_train_dataloader()))).batch
    assert batch.features.shape == (*batch.actions.shape, 1, 4, 3) and batch.forced.any()
    check_said(trainer.rollout_policy, batch)


def stopped_and_whole(tmp_path, rewards, stop, **changes) -> tuple[DCPOTrainer, DCPOTrainer]:
    """A run of four updates, and the same stopped after `stop` of them and resumed; their
    weights are alike and not those of the beginning."""
    whole = trainer_of(tmp_path / "whole", rewards(), max_steps=4, **changes)
    before = whole.policy.checksum()
    whole.train()
    stopped = trainer_of(tmp_path / "part", rewards(), max_steps=4, **changes)
    stopped.args.max_steps = stop
    stopped.train()
    again = trainer_of(tmp_path / "part", rewards(), max_steps=4, **changes)
    again.train(resume_from_checkpoint=True)
    ends = [
        CandidatePolicy.from_pretrained(tmp_path / n / "checkpoint-4").checksum()
        for n in ("whole", "part")
    ]
    assert ends[0] == ends[1] != before
    return whole, again


@pytest.mark.parametrize(
    ("credit", "price"),
    [("utterance", 0.0), ("decision", 0.0), ("utterance", 2.5), ("decision", 2.5)],
)
def test_tokens_alone_train_without_a_sound_and_resume_bit_for_bit(tmp_path, credit, price):
    def rewards():
        return [TokenLikelihoodReward(toy_token_recognizer(), locate=credit == "decision"), faster]

    # two updates on the rollouts of two micro-batches: the stop is inside a window, whose rollouts
    # are made again
    more = (
        {"tokens_per_pass": price, "num_iterations": 2, "gradient_accumulation_steps": 2}
        if price
        else {}
    )
    whole, again = stopped_and_whole(
        tmp_path, rewards, 1 if price else 2, vocoder=Deaf(), credit=credit, **more
    )
    if price:
        assert whole.length_reward.state().tolist() == again.length_reward.state().tolist()
        assert whole.length_reward.value > 0
    lines = log_of(tmp_path / "whole", "eval_reward")
    assert lines and all("eval_wer" not in line and line["eval_reward"] < 0.3 for line in lines)


@pytest.mark.parametrize("tokens_too", [False, True])
def test_credit_by_likelihood_trains_and_resumes_bit_for_bit(tmp_path, tokens_too):
    """Rollouts of a third of the lengths that occur cannot be voiced; they are masked."""

    def rewards():
        heard = LikelihoodReward(ToyCTC(), locate=True)
        return (
            [heard, TokenLikelihoodReward(toy_token_recognizer(), locate=True), faster]
            if tokens_too
            else [heard]
        )

    stopped_and_whole(
        tmp_path,
        rewards,
        1,
        vocoder=ToyVocoder(lambda tokens: len(tokens) % 3 == 0),
        credit="decision",
        max_failed_rewards=1.0,
        num_iterations=2,
        gradient_accumulation_steps=2,
    )
    lines = log_of(tmp_path / "whole")
    assert any(line.get("failed_rewards", 0) > 0 for line in lines) and all(
        line.get("loss", 0) < 9 for line in lines
    )


def test_credit_by_likelihood_masks_what_failed(tmp_path):
    trainer = trainer_of(
        tmp_path,
        [LikelihoodReward(ToyCTC(), locate=True)],
        credit="decision",
        credit_window=4,
        vocoder=ToyVocoder(lambda tokens: len(tokens) % 7 == 0),
        max_failed_rewards=1.0,
    )
    prepared = trainer._rollouts(next(iter(trainer.get_train_dataloader())))
    failed = prepared.batch.rewards.isnan()
    real = prepared.batch.mask > 0
    assert failed.any() and not failed.all() and prepared.advantages.isfinite().all()
    assert not prepared.advantages[failed].any() and not prepared.weights[failed].any()
    assert prepared.advantages[~failed].any(1).all()
    for row in (~failed).nonzero()[:, 0].tolist():
        # not one number a rollout
        assert len(set(prepared.advantages[row, real[row]].tolist())) > 1


def test_credit_by_likelihood_learns(tmp_path):
    """The reward hears no words; fewer of them are wrong."""
    trainer = trainer_of(
        tmp_path,
        [LikelihoodReward(ToyCTC(), locate=True)],
        credit="decision",
        credit_window=4,
        max_steps=40,
        **LEARN,
    )
    items = toy_items(30, 9, "heard")

    def errors() -> float:
        records = trainer.roller.collect(trainer.policy, items, range(30), seed=5).records
        heard = ToyRecognizer().transcribe(
            [np.asarray(r.result.tokens, np.float32) for r in records], 50
        )
        return score_corpus([r.item.text for r in records], heard).wer

    before = errors()
    trainer.train()
    assert errors() < 0.2 * before


def test_a_policy_after_the_draw_learns_to_end_on_what_is_certain(tmp_path):
    """In the toy world a unit's end makes the next token certain; tokens across a choice are
    drawn independently. A policy that sees the candidates beats every constant size in the toy's
    word error rate."""
    trainer_of(tmp_path, [WERReward(ToyRecognizer())], max_steps=60, **LEARN).train()
    losses = [line["wer"] for line in log_of(tmp_path, "wer")]
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])


def nothing(completions, **columns):
    return [0.0] * len(completions)


def test_a_length_reward_holds_chunks_at_a_length(tmp_path):
    """The reward pays for nothing, so only the price moves sizes: from 2.5 tokens a pass up to
    3.4, and down to 1.6."""
    for target in (3.4, 1.6):
        settings = {
            **LEARN,
            "per_device_train_batch_size": 32,
            "num_generations": 4,
            "tokens_per_pass": target,
        }
        trainer_of(
            tmp_path / str(target), [nothing], vocoder=Deaf(), max_steps=80, **settings
        ).train()
        lines = log_of(tmp_path / str(target), "tokens_per_pass")
        assert np.mean([line["tokens_per_pass"] for line in lines[-20:]]) == pytest.approx(
            target, abs=0.3
        )
        assert {line["length_reward"] > 0 for line in lines[1:5]} == {target > 2.5}


def test_what_a_length_reward_pays():
    length_reward = LengthReward(3.0)
    length_reward.advance()
    assert length_reward.value == 0.0  # nothing was seen
    length_reward.seen = {0: (10.0, 5.0), 1: (10.0, 5.0)}
    twin = LengthReward(3.0)
    twin.restore(length_reward.state())
    for p in (length_reward, twin):
        p.advance()
        assert p.value == pytest.approx(1.05) and p.kept == pytest.approx(0.05) and not p.seen
    actions, mask = torch.tensor([[0, 1, 3], [2, 0, 0]]), torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    assert torch.allclose(
        length_reward.of_decisions(actions, mask), torch.tensor([[-1.05, 0, 0], [1.05, 0, 0]])
    )
    low = LengthReward(3.0, gain=0.1, seen={0: (10.0, 5.0)})
    low.advance()
    assert low.value == pytest.approx(0.105) and low.kept == pytest.approx(0.005)
    # no size to prefer
    assert not length_reward.of_decisions(
        torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3)
    ).any()


def test_impossible_together(tmp_path):
    located = TokenLikelihoodReward(toy_token_recognizer(), locate=True)
    for rewards, why in (
        ([WERReward(ToyRecognizer()), located], " wer "),
        ([faster], "credit=utterance"),
        ([TokenLikelihoodReward(toy_token_recognizer()), faster], "credit=utterance"),
        ([located, LikelihoodReward(ToyCTC())], " log_likelihood "),
    ):
        with pytest.raises(ConfigError, match=f"credit=decision .*{why}"):
            trainer_of(tmp_path, rewards, credit="decision")
    with pytest.raises(ConfigError, match=r"chunk_range \[1, 2\] .*policy_sizes"):
        policy = CandidatePolicy(CandidatePolicyConfig(24, 4, sizes=(2, 3)))
        toy_trainer(tmp_path, {"model": policy}, chunk_range=[1, 2], forced_rows="policy_ratio")
    assert not needs_sound([RangePenalty([2]), faster, located]) and needs_sound(
        [located, WERReward(ToyRecognizer())]
    )


@pytest.mark.parametrize("num_candidates", [1, 3])
def test_a_chunk_scorer_is_taken_along_and_stays_as_it_is(tmp_path, num_candidates):
    """It is read at every decision, comes back with checkpoints, and no reward changes it. Of
    several chunks drawn side by side candidate and size are one action."""
    base, checksum = ToyDecoder(), "toy"
    base.checksum = lambda: checksum
    torch.manual_seed(0)
    chunk_scorer = ChunkScorer(
        ChunkScorerConfig(base.config.hidden_size, 4, base.config.output_size, 4, 8, checksum)
    )
    chunk_scorer.save_pretrained(tmp_path / "chunk_scorer")

    def config(**changes):
        settings = {
            **RUN,
            "max_steps": 2,
            "policy_reads": "candidates",
            "num_candidates": num_candidates,
            "chunk_scorer": str(tmp_path / "chunk_scorer"),
        }
        return toy_config(tmp_path / "out", **{**settings, **changes})

    policy = make_policy(config(), base, checksum)
    features = torch.tensor([[-1.0, 0, 0, 0.5], [-2.0, 0, 0, -3.0], [0, 0, 0, 0], [0, 0, 0, 0]])
    start = policy.log_probs(features[None]).tolist()
    assert start[1] - start[0] == pytest.approx((2 * -2.0 - 2.5) - (2 * -1.0 + 0.5))
    trainer = DCPOTrainer(
        policy, [WERReward(ToyRecognizer())], config(), **toy_parts(16, 5, decoder=base)
    )
    scores = trainer.policy.scores.linear.weight.clone()
    batch = trainer._rollouts(next(iter(trainer.get_train_dataloader()))).batch
    assert (
        batch.features.shape[2:] == (num_candidates, 4, 4)
        and batch.features[..., 3].abs().max() > 0
    )
    probs = check_said(trainer.rollout_policy, batch)
    assert probs.shape[-1] == 4 * num_candidates and bool((batch.actions >= 4).any()) == (
        num_candidates > 1
    )
    trainer.train()
    assert not torch.equal(trainer.policy.scores.linear.weight, scores)
    assert torch.equal(policy.scores.linear.weight, scores)  # the caller's policy is not trained
    trained = CandidatePolicy.from_pretrained(tmp_path / "out" / "checkpoint-2")
    assert (
        trained.chunk_scorer.checksum() == chunk_scorer.checksum()
        and trained.config.num_features == 4
    )
    with pytest.raises(ConfigError, match="chunk_scorer .*policy_reads=hidden"):
        make_policy(config(policy_reads="hidden"), base, "")
    alone = make_policy(config(chunk_scorer=""), base, "")
    first = alone.log_probs(features[None, :, :3]).tolist()
    assert first[1] - first[0] == pytest.approx(-2.0)  # the rule-based policy
    with pytest.raises(CheckpointError, match="train-chunk-scorer"):
        make_policy(config(), base, "another")
