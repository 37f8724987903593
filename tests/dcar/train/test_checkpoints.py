"""What a run leaves behind when it is killed, cut off, stopped, or repeated, and what it goes on
from."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import log_of, tiny_config

from dcar.errors import CheckpointError
from dcar.storage import MANIFEST
from dcar.train.car import run
from dcar.train.checkpoints import latest_checkpoint, remove_old, why_incomplete

NEEDED = (
    "model.safetensors optimizer.pt scheduler.pt rng_state.pth trainer_state.json config.json"
).split()
CHANGES = dict(max_steps=6, save_steps=2, eval_steps=2, input_corruption=0.2)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> tuple[Path, str]:
    """A run that never stopped, and the checksum of its weights."""
    out = tmp_path_factory.mktemp("whole")
    return out, run(tiny_config(data, out, **CHANGES)).checksum()


@pytest.fixture
def killed(whole, tmp_path) -> Path:
    """The same run, killed behind its checkpoint of step 4."""
    out = tmp_path / "killed"
    shutil.copytree(whole[0] / "checkpoint-4", out / "checkpoint-4")
    lines = (whole[0] / "log.jsonl").read_text().splitlines(keepends=True)
    (out / "log.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 5))
    return out


def figures(out: Path) -> list[dict]:
    """The log without its summary and what a clock says."""
    return [
        {k: v for k, v in line.items() if "_per_second" not in k and "runtime" not in k}
        for line in log_of(out)
        if "train_loss" not in line
    ]


# --- the log --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        ("", ""),
        ('{"step": 5, "lo', ""),
        ("\x00\x00", ""),
        ('{"step": 5, "loss": 1.0}', '{"step": 5, "loss": 1.0}\n'),  # lacks only its line break
    ],
)
def test_a_resumed_run_appends_to_its_log(tail, kept, whole, killed, data):
    """And says where it was resumed. Only a last line that was cut off goes."""
    before = (killed / "log.jsonl").read_text()
    (killed / "log.jsonl").write_text(before + tail)
    assert run(tiny_config(data, killed, **CHANGES)).checksum() == whole[1]
    after = (killed / "log.jsonl").read_text()
    assert after.startswith(before + kept + '{"step": 4, "resumed": true}\n{"step": 5, ')
    assert figures(killed) == figures(whole[0])


def test_a_finished_run_repeated_trains_nothing_and_evaluates_again(whole, data, tmp_path):
    out = shutil.copytree(whole[0], tmp_path / "again")
    before = (out / "log.jsonl").read_text()
    assert run(tiny_config(data, out, **CHANGES)).checksum() == whole[1]
    last = before.splitlines(keepends=True)[-1]
    assert "eval_loss" in last
    assert (out / "log.jsonl").read_text() == before + '{"step": 6, "resumed": true}\n' + last
    assert (
        run(tiny_config(data, out, resume_from_checkpoint="never", **CHANGES)).checksum()
        == whole[1]
    )
    # a new log
    assert len((out / "log.jsonl").read_text().splitlines()) == len(before.splitlines())


# --- manifests ------------------------------------------------------------------------------------


def test_every_checkpoint_has_a_manifest_of_all_its_files(whole):
    """Also holds that Trainer still saves through the method that seals."""
    out, _ = whole
    assert sorted(p.name for p in out.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    for folder in out.glob("checkpoint-*"):
        manifest = json.loads((folder / MANIFEST).read_text())
        assert (
            manifest["complete"]
            and manifest["step"] == int(folder.name[11:])
            and manifest["processes"] == 1
        )
        assert (
            set(manifest["files"]) == {p.name for p in folder.iterdir()} - {MANIFEST} >= set(NEEDED)
        )
        assert not why_incomplete(folder)


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_a_damaged_checkpoint_is_passed_over(name, damage, whole, tmp_path, caplog):
    out = shutil.copytree(whole[0], tmp_path / "out")
    path = out / "checkpoint-6" / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert latest_checkpoint(out) == out / "checkpoint-4"
    assert f"checkpoint-6 is passed over: {name} " in caplog.text


@pytest.mark.parametrize("damage", ["optimizer.pt", MANIFEST])
def test_a_run_goes_on_from_the_next_older_one_to_the_same_weights(
    damage, whole, data, tmp_path, caplog
):
    out = shutil.copytree(whole[0], tmp_path / "out")
    newest = out / "checkpoint-6"
    (newest / "of_another_run.bin").write_text("left over")
    if damage == "optimizer.pt":
        (newest / damage).unlink()
    else:
        (newest / MANIFEST).write_text(json.dumps({"complete": False}))
    assert run(tiny_config(data, out, **CHANGES)).checksum() == whole[1]
    assert "checkpoint-6 is passed over" in caplog.text
    # written again
    assert not why_incomplete(newest) and not (newest / "of_another_run.bin").exists()
    assert figures(out) == figures(whole[0])


@pytest.mark.parametrize(
    "manifest", [None, "", "[]", "null", '{"complete": true, "files": 3}', '{"files": {}}']
)
def test_a_broken_manifest_is_that_of_a_broken_checkpoint(manifest, whole, tmp_path):
    out = shutil.copytree(whole[0], tmp_path / "out")
    path = out / "checkpoint-6" / MANIFEST
    path.unlink() if manifest is None else path.write_text(manifest)
    assert latest_checkpoint(out) == out / "checkpoint-4"


def test_old_checkpoints_go_when_the_new_one_is_sealed(whole, tmp_path):
    for step in (1, 2, 3, 5, 9):
        shutil.copytree(whole[0] / "checkpoint-4", tmp_path / f"checkpoint-{step}")
    for step in (3, 9):  # cut off
        (tmp_path / f"checkpoint-{step}" / MANIFEST).write_text("{}")
    remove_old(tmp_path, None)
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["1", "2", "5", "9"]
    remove_old(tmp_path, 1, [tmp_path / "checkpoint-1"])
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["1", "5", "9"]


# --- what is not finite ---------------------------------------------------------------------------


def test_weights_that_are_not_finite_are_neither_saved_nor_loaded(decoder, tmp_path):
    decoder.save_pretrained(tmp_path / "good")
    with torch.no_grad():
        decoder.speech_embedding.weight[1, 1] = float("nan")
    with pytest.raises(CheckpointError, match="bad: .*speech_embedding.weight"):
        decoder.save_pretrained(tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    tensors = load_file(tmp_path / "good" / "model.safetensors")
    tensors["norm.bias"][0] = float("inf")
    save_file(tensors, tmp_path / "good" / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors: .*norm.bias"):
        type(decoder).from_pretrained(tmp_path / "good")
