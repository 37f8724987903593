"""DCPO with policies that see the candidates, the token reward, and credit by decision."""

from types import SimpleNamespace

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
from dcar.sampling import SamplingConfig
from dcar.text.wer import corpus_wer, word_errors
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig
from heads.policy import CandidatePolicy, CandidatePolicyConfig, HiddenPolicy, HiddenPolicyConfig
from rl import pass_cost
from rl.pass_cost import PassCost, measure_pass_cost
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
        {
            "points_per_percent": price,
            "pass_cost": [1.0, 0.2],
            "scale_rewards": "batch",
            "num_iterations": 2,
            "gradient_accumulation_steps": 2,
        }
        if price
        else {}
    )
    stopped_and_whole(tmp_path, rewards, 1 if price else 2, vocoder=Deaf(), credit=credit, **more)
    lines = log_of(tmp_path / "whole", "eval_reward")
    assert lines and all("eval_wer" not in line and line["eval_reward"] < 0.3 for line in lines)


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


def test_of_rewards_by_rollout_what_failed_is_left_out_of_the_groups_mean(tmp_path):
    """Beside a located reward without weight."""
    trainer = trainer_of(
        tmp_path,
        [LikelihoodReward(ToyCTC(), locate=True), faster],
        credit="decision",
        reward_weights=[0.0, 1.0],
        vocoder=ToyVocoder(lambda tokens: len(tokens) % 7 == 0),
        max_failed_rewards=1.0,
    )
    prepared = trainer._rollouts(next(iter(trainer.get_train_dataloader())))
    groups, kept = prepared.advantages[:, 0].view(-1, 4), prepared.weights.view(-1, 4)
    assert 0 < kept.sum() < kept.numel() and groups.abs().max() > 0.5
    assert (groups * kept).sum(1).abs().max() < 1e-5


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
        return corpus_wer(list(map(word_errors, [r.item.text for r in records], heard))).wer

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


@pytest.mark.parametrize("credit", ["utterance", "decision"])
def test_a_pass_that_costs_makes_chunks_longer(tmp_path, credit):
    """Nothing else is rewarded, so sizes grow from 2.5 tokens on average."""
    located = TokenLikelihoodReward(toy_token_recognizer(), locate=True, scale=0.0)
    rewards = [located if credit == "decision" else nothing]
    settings = {"points_per_percent": 0.1, "pass_cost": [1.0, 0.2], "scale_rewards": "batch"}
    trainer_of(
        tmp_path, rewards, vocoder=Deaf(), max_steps=40, credit=credit, **{**LEARN, **settings}
    ).train()
    lines = log_of(tmp_path, "tokens_per_pass")
    assert np.mean([line["tokens_per_pass"] for line in lines[-10:]]) > 3.0
    for line in lines:
        expected = PassCost(1.0, 0.2).per_token_at(line["tokens_per_pass"])
        assert line["ms_per_token"] == pytest.approx(expected)


def test_the_cost_of_a_pass_is_measured_when_a_run_starts(tmp_path):
    def cost(**changes):
        settings = {"points_per_percent": 0.1, "scale_rewards": "batch", **changes}
        trainer = trainer_of(tmp_path, [WERReward(ToyRecognizer())], **settings)
        assert tuple(trainer.args.pass_cost) == trainer.pass_cost
        return trainer.pass_cost

    first = cost()
    assert first.fixed > 0 < first.per_token < first.fixed
    assert cost() == first  # that of the resumed run
    assert cost(resume_from_checkpoint="never") != first
    assert cost(pass_cost=[2.0, 0.5]) == PassCost(2.0, 0.5)
    for wrong in ([1.0], [0.0, 1.0]):
        with pytest.raises(ConfigError, match="pass_cost"):
            cost(pass_cost=wrong)
    with pytest.raises(ConfigError, match="scale_rewards=batch"):
        cost(scale_rewards="group")


def test_what_chunks_save():
    """Summed over an utterance, the shares are that of its time; chunks of the mean size save
    nothing."""
    cost, sizes, window = PassCost(0.8, 0.2), [np.array([4, 8, 12]), np.array([8, 8])], 5
    mean = 8.0
    first, second = cost.saved(sizes, mean, window)
    assert second.tolist() == [0, 0] and first[0] == -first[2] < 0 == first[1]
    (short,) = cost.saved([np.full(6, 4)], mean, window)
    time = cost.per_token_at(4) / cost.per_token_at(mean) - 1
    assert short.sum() * window / 24 == pytest.approx(-time)
    assert PassCost(1.0, 0.0).per_token_at(16) == 1 / 16


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
        ChunkScorerConfig(
            base.config.hidden_size, 4, base.config.output_size, 4, 8, base_checksum=checksum
        )
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


def test_the_cost_of_a_pass_is_recovered_from_times_of_this_process(monkeypatch):
    """What a decoder takes for a pass and for a token is found, whatever precedes the passes; time
    that passes without this process, on a CPU, is not counted."""
    spent, elsewhere = [0.0], iter(range(10**6))

    class TimedEngine:
        def __init__(self, base, method, sampling, rows):
            self.size, self.tokens = method.forced["u"][0], sampling.max_tokens

        def decode(self, prompts):
            passes = -(-self.tokens // self.size) - 1  # the last chunk is not read
            spent[0] += 1e-3 * (7 + 2.0 * passes + 0.25 * max(0, self.tokens - self.size))
            return [SimpleNamespace(tokens=[1] * self.tokens)]

    def speak(vocoder, tokens, embeddings, texts):
        spent[0] += 1e-3 * 0.1 * len(tokens[0])

    policy = SimpleNamespace(config=SimpleNamespace(sizes=[4, 6, 12], num_actions=16))
    monkeypatch.setattr(pass_cost, "Engine", TimedEngine)
    monkeypatch.setattr(
        pass_cost, "PolicyChunk", lambda policy, mode, forced, **_: SimpleNamespace(forced=forced)
    )
    monkeypatch.setattr(pass_cost, "voice", speak)
    monkeypatch.setattr(pass_cost.time, "process_time", lambda: spent[0])
    monkeypatch.setattr(pass_cost.time, "perf_counter", lambda: next(elsewhere))
    item = SimpleNamespace(utterance_id="u", speaker_embedding=None, text="", language="en")
    cost = measure_pass_cost(torch.nn.Linear(1, 1), policy, None, item, SamplingConfig(), 4)
    assert cost == pytest.approx((2.0, 0.35))
