"""Settings that may change when a run is resumed: one rule for all trainers."""

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from dcar.config.load import plain
from dcar.config.schema import settings_of
from dcar.errors import CheckpointError

TAKE_EFFECT = frozenset(
    (
        "max_steps num_train_epochs max_minutes learning_rate lr_scheduler_type "
        "warmup_steps weight_decay max_grad_norm bf16 per_device_train_batch_size "
        "per_device_train_batch_tokens gradient_accumulation_steps renderer_batch_size"
    ).split()
)
"""Settings that a resumed run uses from its first step on: length, rate and schedule, batch,
precision."""

NO_EFFECT = frozenset(
    (
        "out device resume_from_checkpoint eval_steps save_steps logging_steps report_to "
        "dataloader_num_workers ddp_timeout half_weights torch_compile "
        "gradient_checkpointing max_failed_rewards data decoder guidance"
    ).split()
)
"""Settings that do not change what is learned. The contents of data, decoder and guidance are
compared, not their names. No other setting may change within a run."""


START_AGAIN = (
    "choose another out, or start again with resume_from_checkpoint=never (a vocoder: remove "
    "checkpoint.pt)"
)


def settings_stamp(config: Any) -> dict[str, Any]:
    """Return the settings of a run as a checkpoint records them, by the keys that users write."""
    schema: Any = type(config)
    return {
        key: plain(reduce(getattr, s.path, config))
        for key, s in settings_of(schema).items()
        if not s.group
    }


def check_data(where: str | Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint `where` was trained on other data. before, now: as in
    `changed_settings`."""
    old, new = (run.get("data") or {} for run in (before, now))
    if changed := [name for name in old.keys() & new.keys() - {"path"} if old[name] != new[name]]:
        raise CheckpointError(
            f"{where}: trained on data other than those now in {new.get('path', 'place')} "
            f"({', '.join(sorted(changed))} changed); {START_AGAIN}"
        )


def changed_settings(
    where: str | Path, before: Mapping[str, Any], now: Mapping[str, Any], step: int, steps: int
) -> dict[str, list[Any]]:
    """Return the settings that take effect from here on in a resumed run: name -> [former value,
    value].

    where: the checkpoint, after `step` steps; steps: those of the whole run; before, now: records
    (`settings`, `data`) of the checkpoint's run and of the resumed one. Raises CheckpointError for
    other data, fewer steps, a setting that cannot change within a run, and one that could take
    effect only in steps that are already done.
    """
    check_data(where, before, now)
    if step > steps:
        raise CheckpointError(
            f"{where}: has {step} steps, but max_steps of this run is {steps}; set max_steps to "
            f"{step} or more, {START_AGAIN}"
        )
    old, new = (run.get("settings") or {} for run in (before, now))
    differing = {
        name: [old[name], new[name]]
        for name in old.keys() & new.keys() - NO_EFFECT
        if old[name] != new[name]
    }
    lasting = differing.keys() - (TAKE_EFFECT if step < steps else {"max_steps"})
    if lasting:
        why = (
            "which cannot change within a run"
            if lasting - TAKE_EFFECT
            else f"and all {step} steps are done: nothing would be trained so; raise max_steps"
        )
        differences = ", ".join(
            f"{name}={differing[name][0]!r} (here {differing[name][1]!r})"
            for name in sorted(lasting)
        )
        raise CheckpointError(f"{where}: trained with {differences}, {why}; {START_AGAIN}")
    return differing
