"""The attack as a standing test: killed jobs that are run again end as if nothing had been (docs/reliability.md).

ATTACK_KILLS sets the kills of each job (10), ATTACK_SEED the seed.
"""

from __future__ import annotations

import os
import random

import harness
import pytest

KILLS, SEED = int(os.environ.get("ATTACK_KILLS", "10")), int(os.environ.get("ATTACK_SEED", "0"))
NAMES = ("train", "dcpo", "prepare", "compare", "train2", "compare2")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, harness.Job]:
    return harness.jobs(harness.make_data(tmp_path_factory.mktemp("attack")))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost(name, jobs, tmp_path, capsys):
    result = harness.attack(jobs[name], tmp_path, KILLS, random.Random(f"{SEED} {name}"))
    with capsys.disabled():
        print(f"\n{name}: {dict(result.kills)} kills, {result.resumed} runs gone on, {len(result.lost)} lost")
    assert sum(result.kills.values()) >= KILLS and result.resumed
    assert not result.lost, "\n".join(result.lost)


@pytest.mark.slow
def test_the_attack_sees_what_is_lost(jobs, tmp_path):
    """A bit of the weights, a line of the log and a piece left behind are differences."""
    job = jobs["train"]
    assert harness.run(job, tmp_path / "whole").status == [0]
    expected = harness.outcome(job, tmp_path / "whole")
    assert not harness.differences(expected, harness.outcome(job, tmp_path / "whole"))
    out = tmp_path / "whole"
    weights = bytearray((out / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (out / "model.safetensors").write_bytes(weights)
    (out / "log.jsonl").write_text((out / "log.jsonl").read_text() + '{"step": 6, "eval_loss": 1}\n')
    (out / "left.part").write_text("")
    found = harness.differences(expected, harness.outcome(job, out))
    assert len(found) == 3 and all(any(name in line for line in found) for name in (
        "model.safetensors", "log.jsonl", "left.part: is left over"))
    killed = harness.run(job, tmp_path / "killed", harness.Kill("write", 30))
    assert killed.status == [-9]
