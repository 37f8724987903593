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
from dcar.sources.shipped import shipped
from dcar.train.car import run as train
from eval.results.training import compare_training, training_note, training_summary

ORIGIN = {
    "steps": 1000,
    "processes": 1,
    "data": {
        "corpus": {"kind": "starter", "path": None},
        "fingerprint": "f1",
        "counts": {"train": {"utterances": 1878, "seconds": 6423.13, "speakers": 24}},
        "files": {"train/data-00000.arrow": "d1", "train/state.json": "s1"},
    },
    "config": {
        "data": "runs/prepared",
        "out": "runs/car",
        "batch_size": 16,
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
    found = compare_training(checkpoint(tmp_path / "car"), checkpoint(tmp_path / "far", *HEADS))
    assert found["differences"] == [] and training_note(found) is None
    assert found["decoder"]["facts"]["steps"] == 1000


@pytest.mark.parametrize(
    ("change", "said"),
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
        (("config/init_from", "starter"), "started from starter against from scratch"),
        (("config/model/hidden_size", 256), "model.hidden_size 256 against 192"),
        (("config/model/num_attention_heads", 8), "model.num_attention_heads 8 against 4"),
        (("config/input_corruption", 0.1), "input_corruption 0.1 against not set"),
        (
            (
                "resumed",
                [
                    {
                        "step": 400,
                        "changed": {"max_steps": [400, 1000], "learning_rate": [1e-2, 1e-3]},
                    }
                ],
            ),
            "changed when resumed: learning_rate 0.01 → 0.001 at step 400 against not set",
        ),
    ],
)
def test_a_difference_is_named(tmp_path, change, said):
    found = compare_training(
        checkpoint(tmp_path / "car"), checkpoint(tmp_path / "far", *HEADS, change)
    )
    assert found["differences"] == [said]
    assert said in training_note(found)


def test_what_they_started_from_counts(tmp_path):
    """CAR and FAR cannot start from the same weights, so it is the training of those that is
    compared."""

    def tuned(name: str, origin: str) -> str:
        return checkpoint(tmp_path / name, ("config/init_from", origin))

    shipped_car, shipped_far = (str(shipped(kind)) for kind in ("decoder", "far"))
    assert compare_training(tuned("a", "starter"), tuned("b", shipped_far))["differences"] == []
    assert compare_training(tuned("c", shipped_car), tuned("d", "starter"))["differences"] == []
    car, far = checkpoint(tmp_path / "car"), checkpoint(tmp_path / "far", *HEADS)
    assert compare_training(tuned("e", car), tuned("f", far))["differences"] == []
    short = checkpoint(tmp_path / "short", ("steps", 10))
    assert compare_training(tuned("g", car), tuned("h", short))["differences"] == [
        "before that, steps 10 against 1000"
    ]
    (said,) = compare_training(tuned("i", car), tuned("j", "/gone"))["differences"]
    assert "/gone" in said
    itself = tuned("k", str(tmp_path / "k"))
    assert compare_training(itself, itself)["differences"] == []


def test_the_same_rows_prepared_elsewhere_are_the_same_data(tmp_path):
    """The fingerprint counts times of files, so a copied corpus has another one; state.json has
    a name by chance."""
    car = checkpoint(tmp_path / "car")
    copied = [
        ("data/fingerprint", "f2"),
        ("data/files", {"train/data-00000.arrow": "d1", "train/state.json": "s2"}),
    ]
    assert compare_training(car, checkpoint(tmp_path / "copied", *copied))["differences"] == []
    other = [("data/fingerprint", "f2"), ("data/files", {"train/data-00000.arrow": "d2"})]
    (said,) = compare_training(car, checkpoint(tmp_path / "other", *other))["differences"]
    assert "prepared" in said


def test_checkpoints_within_a_run_have_their_own_steps(tmp_path):
    run_folder = Path(checkpoint(tmp_path / "far"))
    (run_folder / "checkpoint-250").mkdir()
    assert training_summary(str(run_folder / "checkpoint-250"), "far")["facts"]["steps"] == 250
    (run_folder / "other").mkdir()
    assert not training_summary(str(run_folder / "other"), "far")["known"]


def test_what_is_not_known_is_said(tmp_path):
    (tmp_path / "bare").mkdir()
    found = compare_training(str(tmp_path / "bare"), checkpoint(tmp_path / "far"))
    assert found["differences"] == []
    assert "not known" in training_note(found) and "bare" in training_note(found)
    assert "shipped decoders" in training_note(compare_training("starter", "starter"))
    assert "FAR decoder (starter)" in training_note(
        compare_training(str(tmp_path / "bare"), "starter")
    )
    (tmp_path / "bare" / "provenance.json").write_text('{"steps": 3}')
    with pytest.raises(CheckpointError, match="bare/provenance.json: .*'data'"):
        training_summary(str(tmp_path / "bare"), "far")


def test_what_training_writes_is_understood(tmp_path):
    data = write_prepared(tmp_path / "data", train=9, dev=9, speech=counting)
    for name, shape, steps in (("car", {}, 3), ("far", {"num_prediction_heads": 1}, 2)):
        train(train_config(data, tmp_path / name, shape, max_steps=steps))
    found = compare_training(str(tmp_path / "car"), str(tmp_path / "far"))
    assert found["decoder"]["known"] and found["decoder"]["facts"]["trained on"].startswith(
        "9 utterances"
    )
    assert found["differences"] == ["steps 2 against 3"]


def test_table_json_and_report_say_it(tmp_path, caplog):
    tools = tiny_tools(count=2)
    tools.training = compare_training(
        checkpoint(tmp_path / "car"), checkpoint(tmp_path / "far", ("steps", 400))
    )
    spoken(tmp_path / "out", tools, methods=["far", "car-2"], report=True)
    assert "steps 400 against 1000" in caplog.text
    for name in ("compare.json", "compare.txt", "report.html"):
        assert "steps 400 against 1000" in (tmp_path / "out" / name).read_text()
    assert spoken(tmp_path / "two", tools, methods=["car-1", "car-2"])["training"] is None
