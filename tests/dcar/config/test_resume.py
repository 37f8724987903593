"""Which settings of a run may change when it is resumed."""

import pytest

from dcar.config.resume import NO_EFFECT, TAKE_EFFECT, changed_settings, settings_stamp
from dcar.errors import CheckpointError
from dcar.train.chunk_scorer import TrainChunkScorerConfig
from dcar.train.draft import TrainDraftConfig
from dcar.train.settings import TrainConfig
from dcar.train.token_recognizer import TrainTokenRecognizerConfig
from dcar.vocoder.training.trainer import TrainVocoderConfig
from rl.config import DCPOConfig, resumed_settings

BEFORE = {
    "max_steps": 8,
    "learning_rate": 0.01,
    "seed": 0,
    "model.width": 4,
    "save_steps": 2,
    "out": "a",
}


@pytest.mark.parametrize(
    ("step", "steps", "changes", "expected"),
    [
        (8, 8, {}, {}),
        (8, 8, {"save_steps": 1, "out": "b"}, {}),
        (4, 8, {"learning_rate": 0.02}, {"learning_rate": [0.01, 0.02]}),
        (
            8,
            12,
            {"max_steps": 12, "learning_rate": 0.02, "save_steps": 1},
            {"max_steps": [8, 12], "learning_rate": [0.01, 0.02]},
        ),
        (6, 6, {"max_steps": 6}, {"max_steps": [8, 6]}),  # ended early
        (8, 4, {"max_steps": 4}, "max_steps to 8"),
        (8, 8, {"learning_rate": 0.02}, r"learning_rate=0.01 \(here 0.02\).*max_steps"),
        (
            4,
            8,
            {"seed": 1, "model.width": 5, "learning_rate": 1.0},
            r"model.width=4 \(here 5\), seed=0 \(here 1\).*resume_from_checkpoint=never",
        ),
    ],
    ids=str,
)
def test_a_changed_setting_takes_effect_has_none_or_is_refused_by_name(
    step, steps, changes, expected
):
    runs = [
        {"settings": settings, "data": {"path": path, "digest": 1}}
        for path, settings in (("x", BEFORE), ("y", BEFORE | changes))
    ]
    if isinstance(expected, dict):
        assert changed_settings("checkpoint", *runs, step, steps) == expected
    else:
        with pytest.raises(CheckpointError, match=expected):
            changed_settings("checkpoint", *runs, step, steps)
    runs[1]["data"]["digest"] = 2
    with pytest.raises(CheckpointError, match=r" y \(digest"):
        changed_settings("checkpoint", *runs, step, steps)
    # of a trainer that was used without settings
    assert changed_settings("checkpoint", {}, runs[1], 4, 8) == {}


def test_every_name_of_the_rule_is_a_setting_of_a_trainer(tmp_path):
    stamps = [
        *(
            settings_stamp(schema())
            for schema in (
                TrainConfig,
                TrainDraftConfig,
                TrainChunkScorerConfig,
                TrainTokenRecognizerConfig,
            )
        ),
        settings_stamp(TrainVocoderConfig(data="pack")),
        resumed_settings(DCPOConfig(str(tmp_path), use_cpu=True)),
    ]
    assert {
        name for stamp in stamps for name in stamp
    } >= TAKE_EFFECT | NO_EFFECT and not TAKE_EFFECT & NO_EFFECT
    assert all(
        {"max_steps", "learning_rate", "weight_decay", "seed", "out"} <= stamp.keys()
        for stamp in stamps
    )
    assert "model.num_layers" in stamps[0] and {"optim", "adam_beta1", "beta"} <= stamps[-1].keys()
