"""MTP with Viterbi: best and sampled paths against all paths, transitions, end of speech."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from scipy.stats import chi2
from tiny_decoders import eos_decoder, tiny_decoder

from dcar.decoding import ChunkMethod, FixedChunk, decode
from dcar.errors import ConfigError, DataError
from dcar.sampling import SamplingConfig, sample, uniform, utterance_keys
from eval.methods.registry import Models, make_methods
from eval.verifiers.mtp_viterbi import MTPViterbi, best_path, bookkeeping_case, candidate_ids, choose, sampled_path
from eval.verifiers.statistics import VerifierStatistics
from eval.verifiers.transitions import Transitions, count_bigrams

SAMPLING = SamplingConfig(max_tokens=60, max_tokens_per_text_unit=6)
CODES = 12


def lattice(n, m, seed, zeros=0.0):
    """Random S [1, n, m], Q [1, m, m] with a share of zeros, and a start [1, m]."""
    rng = torch.Generator().manual_seed(seed)

    def law(*shape):
        p = torch.rand(*shape, dtype=torch.float64, generator=rng)
        p = p * (torch.rand(*shape, generator=rng) >= zeros)
        p[..., 0] += 0.01  # no empty row
        return p / p.sum(-1, keepdim=True)

    return law(1, n, m), law(1, m, m), law(1, m)


def weights(s, q, start=None):
    """Every path and its product, slow and obvious."""
    n, m = s.shape[1:]
    found = {}
    for path in itertools.product(range(m), repeat=n):
        weight = float(s[0, 0, path[0]]) * (1.0 if start is None else float(start[0, path[0]]))
        for t in range(1, n):
            weight *= float(q[0, path[t - 1], path[t]]) * float(s[0, t, path[t]])
        found[path] = weight
    return found


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("n", "m", "zeros"), [(1, 5, 0), (2, 3, 0), (3, 4, 0.3), (4, 5, 0), (4, 5, 0.5)])
def test_the_best_path_is_the_best_of_all_paths(n, m, zeros, seed):
    s, q, start = lattice(n, m, seed, zeros)
    for first in (None, start):
        path, score = best_path(s.log(), q.log(), None if first is None else first.log())
        every = weights(s, q, first)
        assert every[tuple(path[0].tolist())] == pytest.approx(max(every.values()), rel=1e-12)
        assert math.exp(float(score)) == pytest.approx(max(every.values()), rel=1e-12)


def test_rows_of_a_batch_do_not_touch_each_other():
    rows = [lattice(4, 5, seed) for seed in range(6)]
    together = best_path(torch.cat([r[0] for r in rows]).log(), torch.cat([r[1] for r in rows]).log())[0]
    assert together.tolist() == [best_path(r[0].log(), r[1].log())[0][0].tolist() for r in rows]


def test_ties_go_to_the_lowest_state():
    s, q = torch.full((1, 3, 4), 0.25).log(), torch.full((1, 4, 4), 0.25).log()
    assert best_path(s, q)[0].tolist() == [[0, 0, 0]]


def test_uniform_transitions_leave_every_head_its_own_best():
    s, _, _ = lattice(4, 6, 0)
    assert torch.equal(best_path(s.log(), torch.full((1, 6, 6), 1 / 6).log())[0], s.argmax(-1))


@pytest.mark.parametrize(("n", "m", "zeros", "use_start"), [(3, 3, 0.3, False), (2, 4, 0, True), (4, 3, 0, False)])
def test_sampled_paths_have_the_law_of_the_lattice(n, m, zeros, use_start):
    """20000 paths against the normalised products: chi-square, false alarms 1e-6; impossible paths never."""
    s, q, start = lattice(n, m, 1, zeros)
    first = start if use_start else None
    every = weights(s, q, first)
    total = sum(every.values())
    count = 20_000
    u = uniform(utterance_keys(0, [str(i) for i in range(count)]), "token", torch.arange(n).expand(count, -1))
    paths, log_total = sampled_path(s.log().expand(count, -1, -1), q.log().expand(count, -1, -1), u,
                                    None if first is None else first.log().expand(count, -1))
    assert math.exp(float(log_total[0])) == pytest.approx(total, rel=1e-9)
    seen = dict.fromkeys(every, 0)
    for path in paths.tolist():
        seen[tuple(path)] += 1
    assert all(seen[p] == 0 for p, w in every.items() if w == 0)
    expected = {p: count * w / total for p, w in every.items() if w > 0}
    common = [p for p, e in expected.items() if e >= 5]
    rest = count - sum(expected[p] for p in common), count - sum(seen[p] for p in common)
    statistic = sum((seen[p] - expected[p]) ** 2 / expected[p] for p in common)
    statistic += (rest[1] - rest[0]) ** 2 / rest[0] if rest[0] >= 5 else 0.0
    assert statistic < chi2.ppf(1 - 1e-6, len(common))


# ---------------------------------------------------------------------------------------------------------- transitions

UTTERANCES = [[0, 1, 1, 2], [0, 1, 0], [3]]


def transitions(alpha=0.01, dense=True, codes=4):
    return Transitions(*count_bigrams(UTTERANCES, codes), codes + 2, alpha, dense)


def test_bigrams_with_ends_and_starts_counted_by_hand():
    keys, counts = count_bigrams(UTTERANCES, 4)
    found = {(int(k) // 6, int(k) % 6): int(c) for k, c in zip(keys, counts, strict=True)}
    assert found == {(5, 0): 2, (5, 3): 1, (0, 1): 2, (1, 1): 1, (1, 2): 1, (1, 0): 1, (0, 4): 1, (2, 4): 1, (3, 4): 1}


def test_smoothed_rows_are_laws_and_the_formula_holds():
    alpha = 0.2
    q = transitions(alpha).table.double().exp()
    assert torch.allclose(q.sum(-1), torch.ones(6, dtype=torch.float64), atol=1e-6)
    assert q[4].tolist() == [0, 0, 0, 0, 1]  # behind the end only the end
    for i, (row, total) in {0: ([0, 2, 0, 0, 1], 3), 5: ([2, 0, 0, 1, 0], 3), 1: ([1, 1, 1, 0, 0], 3)}.items():
        expected = (torch.tensor(row) + alpha) / (total + alpha * 5)
        assert torch.allclose(q[i].float(), expected, atol=1e-6)


def test_sparse_lookup_equals_the_dense_matrix():
    dense, sparse = transitions(0.05, True), transitions(0.05, False)
    assert sparse.table is None
    previous, following = torch.tensor([[0, 1, 2, 3, 4, 5]] * 2), torch.tensor([[4, 3, 2, 1, 0], [0, 0, 1, 4, 4]])
    assert torch.allclose(dense.log_prob(previous, following), sparse.log_prob(previous, following), atol=1e-6)
    assert dense.log_prob(previous, following).shape == (2, 6, 5)


def test_transitions_that_cannot_be_used():
    with pytest.raises(ConfigError, match=r"1 rows of the transition matrix are empty \(token 2 .* alpha > 0"):
        Transitions(*count_bigrams([[0, 1], [1, 3], [3, 0]], 4), 6, alpha=0)
    assert Transitions(*count_bigrams([[0, 1, 2, 3]], 4), 6, alpha=0).table[0].exp().tolist() == [0, 1, 0, 0, 0]
    with pytest.raises(ConfigError, match="alpha >= 0"):
        transitions(-1)
    with pytest.raises(DataError, match="utterance 1 has a token outside the codebook of 4"):
        count_bigrams([[0], [4]], 4)
    with pytest.raises(DataError, match="no utterances"):
        count_bigrams([], 4)


# ----------------------------------------------------------------------------------------------------------- the choice


def laws(n, vocabulary, seed):
    law = torch.rand(2, n, vocabulary, generator=torch.Generator().manual_seed(seed)) ** 3
    return law / law.sum(-1, keepdim=True)


def slow_choice(law, q, k, previous=None, own=False):
    """The best path over the union of candidates of one row, by trying them all."""
    tops = [row.topk(k).indices.tolist() for row in law]
    union = sorted({i for top in tops for i in top})
    best = (-1.0, None)
    for path in itertools.product(union, repeat=len(law)):
        weight = 1.0 if previous is None else float(q[previous, path[0]])
        for t, j in enumerate(path):
            if 4 in path[:t]:  # has ended
                weight *= float(law[: t + 1, 4].max()) * (j == 4)
                continue
            weight *= float(law[t, j]) if not own or j in tops[t] else 0.0
            weight *= float(q[path[t - 1], j]) if t else 1.0
        if weight > best[0]:
            best = (weight, list(path))
    return best


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n", "k"), [(1, 2), (3, 1), (3, 2), (2, 5)])
@pytest.mark.parametrize("own", [False, True])
def test_choice_equals_brute_force_over_the_union(n, k, own, seed):
    table, law = transitions(0.3), laws(n, 5, seed)
    law[:, :, 4] *= [0.02, 1, 3, 0][seed]  # ends: hardly, sometimes, often, never
    q = table.table.exp()
    for previous in (None, torch.tensor([5, 1])):
        tokens, score = choose(law, law.topk(k).indices, table, previous, own=own)
        for b in range(2):
            weight, path = slow_choice(law[b], q, k, None if previous is None else int(previous[b]), own)
            assert math.exp(float(score[b])) == pytest.approx(weight, rel=1e-4)
            assert tokens[b].tolist() == path


def test_the_union_never_does_worse_than_own_candidates():
    table, law = transitions(0.3), laws(3, 5, 7)
    proposed = law.topk(2).indices
    assert (choose(law, proposed, table)[1] >= choose(law, proposed, table, own=True)[1]).all()


def test_a_candidate_of_two_heads_counts_once():
    """Otherwise a sampled path would see its weight twice."""
    ids, repeated = candidate_ids(torch.tensor([[[3, 1], [1, 2]]]))
    assert ids.tolist() == [[1, 1, 2, 3]] and repeated.tolist() == [[False, True, False, False]]
    law = torch.tensor([[[0.0, 0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0, 0.0]]]).expand(4000, -1, -1)
    flat = Transitions(torch.tensor([0]), torch.tensor([1]), 6, alpha=1e9)
    proposed = torch.tensor([[[1, 3], [1, 2]]]).expand(4000, -1, -1)
    u = uniform(utterance_keys(1, [str(i) for i in range(4000)]), "token", torch.arange(2).expand(4000, -1))
    tokens, _ = choose(law, proposed, flat, u=u)
    assert (tokens[:, 1] == 1).sum().item() == pytest.approx(2000, abs=160)  # 5 sigma: false alarms 6e-7


def test_no_possible_path_is_an_error():
    table = Transitions(*count_bigrams([[0, 1, 2, 3]], 4), 6, alpha=0)  # 1 never follows 3
    law = torch.zeros(1, 2, 5)
    law[0, 0, 3] = law[0, 1, 1] = 1
    with pytest.raises(DataError, match="smooth the transitions"):
        choose(law, law.topk(1).indices, table)
    with pytest.raises(DataError, match="smooth the transitions"):
        choose(law, law.topk(1).indices, table, u=torch.rand(1, 2))


# ------------------------------------------------------------------------------------------------------------- decoding


def flat_table():
    """Transitions without any information, those behind the end included."""
    table = Transitions(torch.tensor([0]), torch.tensor([1]), CODES + 2, alpha=1e12)
    table.table.fill_(-math.log(CODES + 1))
    return table


def spoken_table(alpha=0.5):
    rng = random.Random(0)
    return Transitions(*count_bigrams([[rng.randrange(CODES) for _ in range(20)] for _ in range(30)], CODES),
                       CODES + 2, alpha)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_all_candidates_and_flat_transitions_sample_like_car(decoder, prompts, n):
    """ffbs without transitions and restriction draws each head alone: the tokens of CAR-n, with the same draws (the end
    is forbidden, as what follows it is never drawn alone)."""
    endless = SamplingConfig(max_tokens=40, min_tokens=50) if n > 1 else SAMPLING
    got = decode(decoder, prompts, MTPViterbi(n, flat_table(), k=13, mode="ffbs"), endless, seed=2)
    plain = decode(decoder, prompts, ChunkMethod(FixedChunk(n)), endless, seed=2)
    assert [(r.tokens, r.emitted) for r in got] == [(r.tokens, r.emitted) for r in plain]


@pytest.mark.parametrize("mode", ["argmax", "ffbs"])
def test_candidates_of_equal_probability_are_those_of_lowest_id(decoder, prompts, mode):
    """Heads that find everything equally likely propose the first k ids, whatever order torch.topk has."""
    with torch.no_grad():
        for weight in (decoder.heads.base.weight, decoder.heads.projection):
            weight.zero_()
    sampling = SamplingConfig(max_tokens=12, min_tokens=20)
    spoken = {t for r in decode(decoder, prompts, MTPViterbi(3, flat_table(), k=4, mode=mode), sampling)
              for t in r.tokens}
    assert spoken == ({0} if mode == "argmax" else {0, 1, 2, 3})


def test_one_head_with_one_candidate_is_greedy_decoding(decoder, prompts):
    got = decode(decoder, prompts, MTPViterbi(1, spoken_table(), k=1), SAMPLING)
    greedy = SamplingConfig(temperature=0, max_tokens=60, max_tokens_per_text_unit=6)
    plain = decode(decoder, prompts, ChunkMethod(FixedChunk(1)), greedy)
    assert [r.tokens for r in got] == [r.tokens for r in plain]


@pytest.mark.parametrize("mode", ["argmax", "ffbs", "sampled_candidates"])
@pytest.mark.parametrize("use_previous", [False, True])
def test_decoding_follows_the_rule_step_by_step(decoder, prompts, mode, use_previous):
    """Every chunk again, from recomputed states, one utterance at a time."""
    table, n, k = spoken_table(), 3, 4
    for prompt, result in zip(prompts, decode(decoder, prompts, MTPViterbi(n, table, k, mode, use_previous), SAMPLING,
                                              seed=3), strict=True):
        key = utterance_keys(3, [prompt.utterance_id])
        done = 0
        for emitted in result.emitted:
            speech = torch.tensor([[*prompt.prompt_ids, 13, *result.tokens[:done]]])
            length = torch.tensor([len(prompt.prompt_ids) + 1])
            text, text_length = torch.tensor([prompt.text_ids]), torch.tensor([len(prompt.text_ids)])
            hidden = decoder.speech_hidden(text, text_length, speech, torch.tensor([speech.shape[1]]), length)[0, -1]
            logits = decoder.heads(hidden[None], n)
            if done == 0:
                logits[:, 0, 12] = -torch.inf  # min_tokens
            law, position = logits.softmax(-1), torch.arange(done, done + n)
            proposed = law.topk(k).indices
            if mode == "sampled_candidates":
                proposed = torch.stack([gumbel_top(law[0, t], key, done + t, k) for t in range(n)])[None]
            previous = torch.tensor([result.tokens[done - 1] if done else 13]) if use_previous else None
            u = uniform(key, "token", position[None]) if mode == "ffbs" else None
            tokens = choose(law, proposed, table, previous, u)[0][0].tolist()
            assert result.tokens[done : done + emitted] == tokens[:emitted]
            done += emitted
        assert done == len(result.tokens)


def gumbel_top(law, key, position, k):
    noise = [float(uniform(key, "token", torch.tensor([position]), 1 + i)) for i in range(len(law))]
    value = law.double().log() - (-torch.tensor(noise, dtype=torch.float64).log()).log()
    return value.topk(k).indices


def test_sampled_candidates_are_draws_without_replacement(decoder):
    """First of two candidates has the head's law, the second that law without the first: chi-square at 1e-6."""
    law = torch.tensor([0.4, 0.3, 0.2, 0.1])
    count = 8000
    keys = utterance_keys(0, [str(i) for i in range(count)])

    class Now:
        token_keys = keys

    method = MTPViterbi(1, spoken_table(), k=2, mode="sampled_candidates")
    pairs = method._candidates(Now(), law.expand(count, 1, -1), torch.zeros(count, 1, dtype=torch.long))[:, 0]
    assert (pairs[:, 0] != pairs[:, 1]).all()
    statistic, cells = 0.0, 0
    for i, j in itertools.permutations(range(4), 2):
        expected = count * float(law[i] * law[j] / (1 - law[i]))
        seen = int(((pairs[:, 0] == i) & (pairs[:, 1] == j)).sum())
        statistic, cells = statistic + (seen - expected) ** 2 / expected, cells + 1
    assert statistic < chi2.ppf(1 - 1e-6, cells - 1)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batch_size_and_order_change_nothing(decoder, prompts, batch_size):
    for mode in ("argmax", "ffbs", "sampled_candidates"):
        def method(mode=mode):
            return MTPViterbi(3, spoken_table(), 4, mode, use_previous=True)

        expected = {r.utterance_id: r.tokens for r in decode(decoder, prompts, method(), SAMPLING, seed=4)}
        shuffled = random.Random(batch_size).sample(prompts, len(prompts))
        got = decode(decoder, shuffled, method(), SAMPLING, seed=4, batch_size=batch_size)
        assert {r.utterance_id: r.tokens for r in got} == expected


@pytest.mark.parametrize("head", [1, 2, 3])
def test_the_end_of_speech_cuts_the_path(prompts, head):
    """One head says the end, those behind it do not: it has ended all the same, also where their laws exclude it."""
    for change in ({}, {"temperature": 0}, {"top_k": 1}):
        sampling = SamplingConfig(max_tokens=50, max_tokens_per_text_unit=50, min_tokens=0, **change)
        for mode in ("argmax", "ffbs", "sampled_candidates"):
            for result in decode(eos_decoder(head), prompts, MTPViterbi(4, spoken_table(), mode=mode), sampling):
                assert len(result.tokens) == head - 1 and not result.truncated and result.emitted == [head - 1]


def test_a_forbidden_end_is_no_end(prompts):
    sampling = SamplingConfig(max_tokens=50, min_tokens=6)
    for result in decode(eos_decoder(2), prompts, MTPViterbi(4, spoken_table(), mode="ffbs"), sampling):
        assert len(result.tokens) >= 6


def test_nothing_follows_an_end_in_any_path():
    table, law = spoken_table(), laws(4, 13, 3)
    u = torch.rand(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for draw in range(200):
        tokens, _ = choose(law, law.topk(6).indices, table, u=(u + draw * 0.618) % 1)
        for row in tokens.tolist():
            assert 12 not in row or set(row[row.index(12) :]) == {12}


def test_impossible_settings_say_what_to_do(decoder, prompts):
    with pytest.raises(ConfigError, match="14 candidates of each head, but the vocabulary has 13"):
        decode(decoder, prompts, MTPViterbi(2, spoken_table(), k=14), SAMPLING)
    with pytest.raises(ConfigError, match="needs 5 heads"):
        decode(decoder, prompts, MTPViterbi(5, spoken_table()), SAMPLING)
    with pytest.raises(ConfigError, match="among 4 codes for a decoder with 12"):
        decode(decoder, prompts, MTPViterbi(2, transitions()), SAMPLING)
    with pytest.raises(ConfigError, match="argmax, ffbs, sampled_candidates"):
        MTPViterbi(2, spoken_table(), mode="beam")
    with pytest.raises(ConfigError, match="at least one"):
        MTPViterbi(2, spoken_table(), k=0)


def statistics_of(decoder):
    keys, counts = count_bigrams([[0, 1, 2], [2, 1]], CODES)
    return VerifierStatistics(decoder.checksum(), decoder.config.tokenizer, CODES + 2, torch.full((3, 4), 0.2), keys,
                              counts, torch.tensor([0.0, 2.0]), torch.tensor([1.0, 4.0]))


def test_names_of_a_comparison(decoder):
    models = Models(decoder, statistics=statistics_of(decoder))
    names = ["mtp-viterbi-3", "mtp-viterbi-4-5", "mtp-viterbi-4-5-ffbs", "mtp-viterbi-2-2-sampled_candidates-prev-own"]
    built = [e.build() for e in make_methods(names, models)]
    assert [(m.heads, m.k, m.mode, m.use_previous, m.own) for m in built] == [
        (3, 3, "argmax", False, False), (4, 5, "argmax", False, False), (4, 5, "ffbs", False, False),
        (2, 2, "sampled_candidates", True, True)]
    for wrong in ("mtp-viterbi", "mtp-viterbi-3-beam", "mtp-viterbi-3-2-1", "mtp-viterbi-3-ffbs-argmax",
                  "mtp-viterbi-3-prev-4", "mtp-viterbi-3-prev-prev"):
        with pytest.raises(ConfigError, match="write mtp-viterbi-4"):
            make_methods([wrong], models)
    with pytest.raises(ConfigError, match="1..4 heads"):
        make_methods(["mtp-viterbi-5"], models)
    with pytest.raises(ConfigError, match="vocabulary has 13"):
        make_methods(["mtp-viterbi-3-14"], models)
    with pytest.raises(ConfigError, match="`dcar fit-verifiers`"):
        make_methods(["mtp-viterbi-3"], Models(decoder))


def test_benchmark_case_is_the_real_work():
    case = bookkeeping_case(heads=3, k=2, vocabulary=20)
    tokens, score = case()
    assert tokens.shape == (1, 3) and torch.isfinite(score).all()


def test_law_restricted_by_top_k_still_has_a_path(prompts):
    """A head whose warped law knows few tokens leaves zeros in the lattice; its own best is always possible."""
    sampling = SamplingConfig(temperature=0.5, top_k=2, max_tokens=30)
    for result in decode(tiny_decoder(seed=5), prompts, MTPViterbi(4, spoken_table(), 5), sampling):
        assert len(result.tokens) > 0 or not result.truncated


def test_inverse_cdf_is_the_one_of_all_decoders():
    law, u = torch.tensor([[0.25, 0.75]]), torch.tensor([0.3])
    s = law.log()[:, None].double()
    assert sampled_path(s, torch.zeros(1, 2, 2).double(), u[:, None])[0].tolist() == [[int(sample(law, u)[0])]]
