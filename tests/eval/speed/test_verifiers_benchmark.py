"""The benchmark of the verifiers' bookkeeping covers every kind of verifying or path-choosing method."""

from __future__ import annotations

import json

import pytest
import torch

from dcar.errors import ConfigError
from eval.methods.registry import METHODS
from eval.speed.verification import BENCHMARKS, BenchmarkConfig, main


def test_every_method_is_timed_and_the_last_line_is_json(capsys):
    main(["codes=64", "repeats=2", "step_repeats=0", "viterbi_k=3", "viterbi_heads=3", "tree_nodes=6"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["bookkeeping_ms"]) == set(BENCHMARKS)
    assert set(BENCHMARKS) >= {*(m for m, kind in METHODS.items() if kind.verifies), "mtp-viterbi"}
    assert all(0 < t["least"] <= t["median"] for t in result["bookkeeping_ms"].values())
    assert result["step_ms"] is None


def test_settings_reach_the_cases():
    config = BenchmarkConfig(codes=64, viterbi_heads=4, viterbi_k=3, tree_nodes=5)
    tokens, _ = BENCHMARKS["mtp-viterbi"](config)()
    assert tokens.shape == (1, 4) and int(tokens.max()) <= 64
    path, counts = BENCHMARKS["vadusa"](config)()
    assert path.shape[0] == 1 and torch.all(counts <= path.shape[1]) and path.shape[1] <= 5
    with pytest.raises(ConfigError, match="unknown benchmarks"):
        BenchmarkConfig(only=["viterbi"])
