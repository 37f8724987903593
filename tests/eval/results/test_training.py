"""A comparison says where FAR was trained otherwise than CAR, from what stands beside the
checkpoints."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
from compare_worker import spoken, tiny_tools
from tiny_data import counting, write_prepared
from tiny_training import tiny_config as train_config

from dcar.errors import CheckpointError
from dcar.train.car import run as train
from eval.results.training import SHIPPED, training_facts, training_note

ORIGIN = {
    "steps": 1000,
    "processes": 1,
    "data": {
        "corpus": {"kind": "starter", "path": None},
        "counts": {"train": {"utterances": 1878, "seconds": 6423.13, "speakers": 24}},
    },
    "config": {
        "data": "runs/prepared",
        "out": "runs/car",
        "per_device_train_batch_size": 16,
        "learning_rate": 1e-3,
        "seed": 0,
        "init_from": "",
        "max_steps": 1000,
        "head_positions": 0.25,
        "model": {
            "hidden_size": 192,
            "num_attention_heads": 4,
            "num_prediction_heads": 7,
            "head_blocks": 4,
        },
    },
}


def checkpoint(folder: Path, *changes: tuple[str, object]) -> str:
    """A folder with the provenance above; changes: (dotted path, value)."""
    origin = deepcopy(ORIGIN)
    for path, value in changes:
        *inner, last = path.split("/")
        place = origin
        for name in inner:
            place = place[name]
        place[last] = value
    folder.mkdir(parents=True)
    (folder / "provenance.json").write_text(json.dumps(origin))
    return str(folder)


HEADS = [
    ("config/model/num_prediction_heads", 1),
    ("config/head_positions", 1.0),
    ("config/out", "runs/far"),
    ("config/data", "/elsewhere"),
    ("config/seed", 3),
]


def test_what_far_and_car_are_meant_to_differ_in_is_no_difference(tmp_path):
    car = checkpoint(tmp_path / "car")
    assert training_note(car, checkpoint(tmp_path / "far", *HEADS)) == ""
    unspoken = ("config/spoken", {"sentences": 0, "chunk": 1})
    assert training_note(car, checkpoint(tmp_path / "last", *HEADS, unspoken)) == ""


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (("steps", 400), "steps 400 against 1000"),
        (("processes", 8), "processes 8 against 1"),
        (
            ("data/corpus", {"kind": "libritts", "path": "/data"}),
            "corpus libritts (/data) against starter",
        ),
        (
            ("data/counts/train", {"utterances": 100, "seconds": 360.0}),
            "trained on 100 utterances of 0.10 h against 1878 utterances of 1.78 h",
        ),
        (("config/learning_rate", 5e-4), "learning_rate 0.0005 against 0.001"),
        (("config/init_from", "starter"), "started from a checkpoint against random weights"),
        (("config/model/hidden_size", 256), "model.hidden_size 256 against 192"),
        (("config/model/num_attention_heads", 8), "model.num_attention_heads 8 against 4"),
        (("config/input_corruption", 0.1), "input_corruption 0.1 against not set"),
        (
            ("config/spoken", {"sentences": 40, "chunk": 1}),
            "spoken.sentences 40 against not set",
        ),
    ],
)
def test_a_difference_is_named(tmp_path, change, difference):
    car, far = checkpoint(tmp_path / "car"), checkpoint(tmp_path / "far", *HEADS, change)
    assert f": {difference}. Their difference" in training_note(car, far)


def test_checkpoints_within_a_run_have_their_own_steps(tmp_path):
    run_folder = Path(checkpoint(tmp_path / "far"))
    (run_folder / "checkpoint-250").mkdir()
    assert training_facts(str(run_folder / "checkpoint-250"), "far")["steps"] == 250
    (run_folder / "other").mkdir()
    assert training_facts(str(run_folder / "other"), "far") == {}


def test_unknown_training_is_reported(tmp_path):
    bare, far = tmp_path / "bare", checkpoint(tmp_path / "far")
    bare.mkdir()
    assert "not known" in training_note(str(bare), far) and "bare" in training_note(str(bare), far)
    assert training_note("starter", "starter") == SHIPPED
    assert "FAR decoder (starter)" in training_note(str(bare), "starter")
    (bare / "provenance.json").write_text('{"steps": 3}')
    with pytest.raises(CheckpointError, match="bare/provenance.json: .*'data'"):
        training_note(str(bare), far)


def test_provenance_of_a_real_training_is_read(tmp_path):
    data = write_prepared(tmp_path / "data", train=9, dev=9, speech=counting)
    for name, shape, steps in (("car", {}, 3), ("far", {"num_prediction_heads": 1}, 2)):
        train(train_config(data, tmp_path / name, shape, max_steps=steps))
    assert ": steps 2 against 3. Their" in training_note(
        str(tmp_path / "car"), str(tmp_path / "far")
    )


def test_table_json_and_report_have_the_sentence(tmp_path, caplog):
    tools = tiny_tools(count=2)
    tools.training = training_note(
        checkpoint(tmp_path / "car"), checkpoint(tmp_path / "far", ("steps", 400))
    )
    spoken(tmp_path / "out", tools, methods=["far", "car-2"], report=True)
    assert "steps 400 against 1000" in caplog.text
    for name in ("compare.json", "compare.txt", "report.html"):
        assert "steps 400 against 1000" in (tmp_path / "out" / name).read_text()
    assert spoken(tmp_path / "two", tools, methods=["car-1", "car-2"]).training == ""
