"""How well the tokens of a chunk go together: the ratio that is learned, and what choosing by it
does to the distribution."""

import itertools

import pytest
import torch

from dcar.decoding.policy_chunk import choose_end
from dcar.errors import CheckpointError
from dcar.sampling import sample_several, shifted
from heads.candidates import (
    candidate_features,
    joint_log_probs,
    resampling_log_weights,
    select_candidate,
)
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig, scored_features
from heads.policy import CandidatePolicy, CandidatePolicyConfig, ChunkPolicy

CODES, LENGTH = 3, 3  # the end of speech is the id behind the codes


def joint() -> torch.Tensor:
    """A distribution over chunks of three codes, [3, 3, 3], far from the product of its margins."""
    probs = (
        torch.rand(CODES, CODES, CODES, generator=torch.Generator().manual_seed(3)).double() ** 3
        + 0.05
    )
    return probs / probs.sum()


def margins(probs: torch.Tensor) -> torch.Tensor:
    """[3, 4] of every place; the end of speech has no mass."""
    return torch.stack(
        [
            torch.nn.functional.pad(probs.sum([d for d in range(LENGTH) if d != place]), (0, 1))
            for place in range(LENGTH)
        ]
    )


CHUNKS = torch.tensor(list(itertools.product(range(CODES), repeat=LENGTH)))  # all of them, [27, 3]


def drawn_alone(probs: torch.Tensor) -> torch.Tensor:
    """Probability of the beginnings x_1, x_1 x_2, x_1 x_2 x_3 of every chunk [27, 3] where the
    heads draw them."""
    return margins(probs)[torch.arange(LENGTH), CHUNKS].cumprod(-1)


def log_ratios(probs: torch.Tensor) -> torch.Tensor:
    """r_1 … r_3 of every chunk, [27, 3]."""
    together = [probs[tuple(CHUNKS[:, :a].T)].flatten(1).sum(1) for a in range(1, LENGTH)]
    return (torch.stack([*together, probs.flatten()], -1) / drawn_alone(probs)).log()


def small(**changes) -> ChunkScorer:
    torch.manual_seed(0)
    return ChunkScorer(
        ChunkScorerConfig(
            **{
                "hidden_size": 4,
                "num_heads": LENGTH,
                "vocab_size": CODES + 1,
                "embedding_size": 4,
                "width": 16,
                "window": LENGTH,
            }
            | changes
        )
    )


def test_logistic_regression_learns_the_log_ratio():
    probs, chunk_scorer = joint(), small()
    heads = margins(probs)
    generator = torch.Generator().manual_seed(1)
    logits = heads.clamp(min=1e-30).log().float()
    optimizer = torch.optim.Adam(chunk_scorer.parameters(), 1e-2)
    for _ in range(400):
        real = CHUNKS[torch.multinomial(probs.flatten(), 1000, True, generator=generator)]
        drawn = torch.stack(
            [torch.multinomial(heads[j], 1000, True, generator=generator) for j in range(LENGTH)], 1
        )
        loss = torch.zeros(())
        for sign, tokens in ((-1, real), (1, drawn)):
            seen = candidate_features(logits.expand(1000, -1, -1), tokens)
            ratio = chunk_scorer(torch.zeros(1000, 4), tokens, seen).cumsum(-1)
            loss = loss + torch.nn.functional.softplus(sign * ratio).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        seen = candidate_features(logits.expand(len(CHUNKS), -1, -1), CHUNKS)
        learned = chunk_scorer(torch.zeros(len(CHUNKS), 4), CHUNKS, seen).cumsum(-1).double()
    wanted, share = log_ratios(probs), drawn_alone(probs)[:, -1:]
    error = ((learned - wanted).abs() * share).sum(0)  # nats, over what is drawn
    spread = ((wanted - (wanted * share).sum(0)).abs() * share).sum(0)
    assert error[0] < 0.1 and spread[0] < 1e-9  # one token alone cannot fail to go together
    assert (error[1:] < 0.2 * spread[1:]).all()


@pytest.mark.parametrize("draws", [2, 8])
def test_choosing_by_the_ratio_moves_the_distribution_of_chunks_towards_the_joint_distribution(
    draws,
):
    """With the true ratio: the farther, the more chunks are drawn; one chunk alone has the
    distribution of the heads."""
    probs, many = joint(), 60_000
    u = torch.rand(many, LENGTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    # [many, N, 3]
    chunks = sample_several(margins(probs).expand(many, -1, -1), shifted(u, draws)).mT
    index = (chunks * torch.tensor([9, 3, 1])).sum(-1)
    ratios = log_ratios(probs).float()[index]  # [many, N, 3]
    added = ratios.diff(dim=-1, prepend=0 * ratios[..., :1]).unsqueeze(-1)
    features = torch.cat((torch.zeros(*ratios.shape, 3), added), -1)
    third = torch.full((many, draws, LENGTH), -1e9)
    third[..., -1] = 0.0  # a policy that keeps all three
    u = torch.rand(many, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    decision = choose_end(joint_log_probs(third, features), u, None, LENGTH)
    assert (decision.sizes == LENGTH).all()
    weights = select_candidate(
        ratios[..., -1].softmax(1), decision.chosen
    )  # a chunk's share of the density ratios
    assert torch.allclose(decision.log_probs.exp().double(), weights.double(), atol=1e-5)

    def far(which: torch.Tensor) -> float:
        return float((torch.bincount(which, minlength=27) / many - probs.flatten()).abs().sum() / 2)

    alone, chosen = far(index[:, 0]), far(select_candidate(index, decision.chosen))
    product = float((drawn_alone(probs)[:, -1] - probs.flatten()).abs().sum() / 2)
    assert alone == pytest.approx(product, abs=0.01)
    assert chosen < {2: 0.8, 8: 0.45}[draws] * alone


def test_shares_of_draws_compare_chunks_of_one_length():
    features = torch.zeros(1, 2, 2, 4)
    features[0, :, :, 3] = torch.tensor([[1.0, -3.0], [0.0, 0.0]])
    share = resampling_log_weights(features)[0]
    assert share.exp().sum(0).tolist() == pytest.approx([1, 1])
    assert (share[0] - share[1]).tolist() == pytest.approx([1.0, -2.0])
    scores = torch.tensor([[[0.6, 0.4], [0.4, 0.6]]]).log() + 1.7
    probs = joint_log_probs(scores, features)
    decision = choose_end(probs, None, None, 2)
    weights = scores[0].exp() * share.exp()
    assert (decision.sizes.tolist(), decision.chosen.tolist()) == ([2], [1])
    assert decision.log_probs.exp().item() == pytest.approx((weights[1, 1] / weights.sum()).item())
    assert probs[0].exp().tolist() == pytest.approx((weights / weights.sum()).flatten().tolist())
    decision = choose_end(probs, None, torch.tensor([1]), 2)
    assert (decision.sizes.tolist(), decision.chosen.tolist()) == ([1], [0])
    assert decision.log_probs.exp().item() == pytest.approx((weights[0, 0] / weights.sum()).item())


def test_several_draws_are_seen_as_each_alone():
    chunk_scorer = small()
    hidden, logits = torch.randn(5, 4), torch.randn(5, LENGTH, CODES + 1)
    chunks = torch.randint(0, CODES, (5, 4, LENGTH))
    together = scored_features(chunk_scorer, hidden, logits, chunks)
    assert together.shape == (5, 4, LENGTH, 4)
    for n in range(4):
        alone = scored_features(chunk_scorer, hidden, logits, chunks[:, n])
        assert torch.allclose(together[:, n], alone, atol=1e-5)
        assert torch.equal(alone[..., :3], candidate_features(logits, chunks[:, n]))
    shorter = scored_features(chunk_scorer, hidden, logits[:, :2], chunks[:, 0, :2])
    # what stands behind a token does not matter to it
    assert torch.allclose(shorter, together[:, 0, :2], atol=1e-5)


@pytest.mark.parametrize("window", [1, 2])
def test_a_token_is_read_with_those_in_its_window(window):
    """Any other token changes nothing, and after the end nothing is added."""
    chunk_scorer = small(window=window)
    chunks = torch.tensor([[0, 1, 2], [2, 1, 2], [0, 3, 2]])  # the second id, the first, the end
    features = torch.randn(1, LENGTH, 3).expand(3, -1, -1)
    first, other_first, ended = chunk_scorer(torch.zeros(3, 4), chunks, features)
    assert (first != other_first).tolist() == [True, window == 2, False]
    assert ended[0] == first[0] and ended[2] == 0


def test_a_policy_takes_it_along(tmp_path):
    chunk_scorer = small(base_checksum="aa", tokenizer="t")
    policy = CandidatePolicy(CandidatePolicyConfig(4, LENGTH, chunk_scorer=chunk_scorer.config))
    policy.chunk_scorer.load_state_dict(chunk_scorer.state_dict())
    policy.save_pretrained(tmp_path)
    loaded = ChunkPolicy.from_pretrained(tmp_path)
    assert loaded.config.num_features == 4 and loaded.checksum() == policy.checksum()
    tokens = torch.tensor([[0, 1, 2]])
    hidden, logits = torch.randn(1, 4), torch.randn(1, LENGTH, CODES + 1)
    features = scored_features(chunk_scorer, hidden, logits, tokens)
    assert torch.allclose(loaded.candidate_features(hidden, logits, tokens), features)
    policy.scores.end_on_scored()
    features = policy.candidate_features(hidden, logits, tokens)
    sums = features[..., 3].cumsum(-1)
    # a nat for a nat
    assert torch.allclose(policy.log_probs(features[:, None]), sums.log_softmax(-1), atol=1e-4)
    chunk_scorer.check_base("aa")
    with pytest.raises(CheckpointError, match="train-chunk-scorer"):
        chunk_scorer.check_base("bb")
