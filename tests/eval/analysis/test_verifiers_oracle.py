"""The oracle: dynamic programming against all chunkings, shares of best and worst heads, the command."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from tiny_backbones import tiny_backbone, tiny_prompts
from tiny_decoders import tiny_decoder

from dcar.decoding import decode
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig
from dcar.text.phonemes import PHONEME_VERSION
from eval.analysis import fit_verifiers, oracle
from eval.methods.registry import load_models, make_methods


def random_losses(heads, n, seed):
    losses = np.random.default_rng(seed).exponential(size=(heads, n))
    for k in range(heads):
        losses[k, n - k :] = np.inf  # past the end
    return losses


def chunkings(n, heads):
    """Every way to cover n tokens by chunks of 1..heads."""
    if n == 0:
        yield ()
    for k in range(1, min(heads, n) + 1):
        for rest in chunkings(n - k, heads):
            yield (k, *rest)


def cost_of(losses, sizes):
    place, total = 0, 0.0
    for size in sizes:
        total += sum(losses[i, place] for i in range(size))
        place += size
    return total


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("heads", "n"), [(1, 4), (2, 5), (3, 7), (4, 3), (4, 9)])
def test_cheapest_equals_brute_force_for_every_number_of_passes(heads, n, seed):
    losses = random_losses(heads, n, seed)
    totals = oracle.cheapest(oracle.chunk_costs(losses))
    ways = list(chunkings(n, heads))
    for passes in range(n + 1):
        costs = [cost_of(losses, sizes) for sizes in ways if len(sizes) == passes]
        if not costs:
            assert totals[passes] == np.inf
            continue
        assert totals[passes] == pytest.approx(min(costs))


def test_no_schedule_beats_the_oracle_in_as_many_passes():
    losses = random_losses(4, 40, 0)
    costs = oracle.chunk_costs(losses)
    totals = oracle.cheapest(costs)
    rng = np.random.default_rng(1)
    for _ in range(200):
        cost, passes = oracle.walk(costs, lambda t: int(rng.integers(1, 5)))
        assert cost >= totals[passes] - 1e-9
    assert oracle.walk(costs, lambda t: 1) == (pytest.approx(losses[0].sum()), 40)
    assert oracle.walk(costs, lambda t: 3)[1] == 14  # 13 threes and one token left
    assert totals[40] == pytest.approx(losses[0].sum())  # every token by the base head is the only way


def test_head_ranks_compare_the_heads_on_the_same_token():
    losses = np.full((2, 4), np.inf)
    losses[0] = [0.1, 1.0, 1.0, 9.0]  # base head for tokens 1, 2, 3, 4
    losses[1, :3] = [2.0, 0.5, 3.0]  # second head for tokens 2, 3, 4
    best, worst = oracle.head_ranks(losses)
    assert best.tolist() == [1, 2] and worst.tolist() == [2, 1]
    assert [x.tolist() for x in oracle.head_ranks(losses[:, :1])] == [[0, 0], [0, 0]]


def test_loss_matrix_is_the_cross_entropy_of_the_token_ahead(decoder):
    hidden, targets = torch.randn(5, 32), torch.tensor([3, 1, 4, 1, 12])
    losses, entropy = oracle.loss_matrix(decoder, hidden, targets)
    assert losses.shape == (4, 5) and entropy.shape == (5, 3)
    for k, t in itertools.product(range(1, 5), range(5)):
        if t + k > 5:
            assert losses[k - 1, t] == np.inf
        else:
            probs = decoder.heads.single(hidden[t], k).double().log_softmax(-1)
            assert losses[k - 1, t] == pytest.approx(-float(probs[targets[t + k - 1]]), abs=1e-5)


def test_costs_of_a_decoder_that_knows_the_next_token_only():
    """Additional heads that know nothing: the base head is always best, and every further head costs ln(V + 1)."""
    model = tiny_decoder(heads=3)
    with torch.no_grad():
        model.heads.projection.zero_()
        model.heads.base.weight.zero_()
        for token in range(12):
            model.heads.base.weight[token, token] = 50.0
    targets = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    hidden = torch.eye(32)[targets]
    result = oracle.analyse(model, [(hidden, targets)], oracle.OracleConfig("", "", random_sizes=[1, 2]))
    assert result["best_share"] == [1, 0, 0] and result["worst_share"][0] == 0
    rows = {r["schedule"]: r for r in result["rows"]}
    assert rows["car-1"]["nats_per_token"] == pytest.approx(0, abs=1e-4)
    assert rows["car-2"]["nats_per_token"] == pytest.approx(3 * np.log(13) / 7, rel=1e-4)
    assert all(r["gain"] >= -1e-9 for r in rows.values())
    assert result["unconstrained"]["tokens_per_pass"] == pytest.approx(6 / 7)


def test_decoders_on_language_models_are_analysed_alike(files, tmp_path, capsys):  # noqa: F811
    """`oracle` and `fit-verifiers` on a backbone; the statistics then serve its methods."""
    model = tiny_backbone(tokenizer="tiny@abc", phonemes=PHONEME_VERSION)
    model.save_pretrained(tmp_path / "decoder")
    arguments = [f"decoder={tmp_path / 'decoder'}", f"data={files / 'data'}", "prompt_tokens=5"]
    oracle.main([*arguments, f"out={tmp_path / 'oracle'}"])
    result = json.loads((tmp_path / "oracle" / "oracle.json").read_text())
    assert result["decoder"] == model.checksum() and result["heads"] == 4
    fit_verifiers.main([*arguments, f"out={tmp_path / 'stats'}", "thresholds=3", "ranks=4", "sampling.max_tokens=20"])
    assert "head 4:" in capsys.readouterr().out
    models = load_models(str(tmp_path / "decoder"), "", [], statistics=str(tmp_path / "stats"))
    names = ["vadusa-2", "mtp-viterbi-3", "entropy@2.0"]
    for entry in make_methods(names, models):
        spoken = decode(entry.decoder, tiny_prompts(), entry.build(), SamplingConfig(max_tokens=20))
        assert sum(len(r.tokens) for r in spoken) > 0


def test_command_writes_json_and_plot(files, tmp_path, capsys):  # noqa: F811
    arguments = [f"decoder={files / 'decoder'}", f"data={files / 'data'}", f"out={tmp_path}", "prompt_tokens=5"]
    oracle.main(arguments)
    shown = capsys.readouterr().out
    assert "car-4" in shown and "head best for a token" in shown and "entropy-" in shown
    result = json.loads((tmp_path / "oracle.json").read_text())
    assert sum(result["best_share"]) == pytest.approx(1) and sum(result["worst_share"]) == pytest.approx(1)
    assert result["teacher_forced"] and len(result["decoder"]) == 64 and result["utterances"] == 5
    rows = {r["schedule"]: r for r in result["rows"]}
    assert rows["car-1"]["gain"] == pytest.approx(0) and rows["car-3"]["gain"] > 0
    assert all(r["oracle_nats_per_token"] >= result["unconstrained"]["nats_per_token"] - 1e-9 for r in rows.values())
    lengths = [p["tokens_per_pass"] for p in result["frontier"]]
    assert lengths == sorted(lengths) and len(lengths) == 13
    assert (tmp_path / "oracle.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="keeps 1..4 tokens"):
        oracle.main([*arguments, "random_sizes=[2,9]"])
    with pytest.raises(ConfigError, match="data is not set"):
        oracle.main(["decoder=x"])
