"""The attack as a standing test: killed jobs that are run again end as if nothing had been (docs/reliability.md).

ATTACK_KILLS sets the kills of each job (10), ATTACK_SEED the seed.
"""

import os
import random

import harness
import pytest

KILLS, SEED = int(os.environ.get("ATTACK_KILLS", "10")), int(os.environ.get("ATTACK_SEED", "0"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "dcpo", "prepare", "compare", "train2", "compare2"])
def test_nothing_is_lost(name, jobs, tmp_path, capsys):
    ends, lost = harness.attack(jobs[name], tmp_path, KILLS, random.Random(f"{SEED} {name}"))
    with capsys.disabled():
        print(f"\n{name}: {dict(ends)}, {len(lost)} lost")
    assert not lost, "\n".join(lost)
    assert ends["resumed"]


@pytest.mark.slow
def test_the_attack_sees_what_is_lost(jobs, tmp_path):
    """A bit of the weights, a line of the log and a piece left behind are differences."""
    out = tmp_path / "whole"
    assert harness.run(jobs["train"], out).status == [0]
    expected = harness.outcome(jobs["train"], out)
    assert not harness.differences(expected, harness.outcome(jobs["train"], out))
    weights = bytearray((out / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (out / "model.safetensors").write_bytes(weights)
    with (out / "log.jsonl").open("a") as log:
        log.write('{"step": 6, "eval_loss": 1}\n')
    (out / "left.part").write_text("")
    found = harness.differences(expected, harness.outcome(jobs["train"], out))
    assert {line.partition(":")[0].partition("/")[0] for line in found} == {
        "model.safetensors", "log.jsonl", "left.part"}
    killed = harness.run(jobs["train"], tmp_path / "killed", harness.Kill("write", 30))
    assert killed.status == [-9]
