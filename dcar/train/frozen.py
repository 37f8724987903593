"""Additional heads on a decoder that stays as it is (Medusa-1): `freeze_trunk` of `dcar train`.

    dcar train --config car_starter:shared out=runs/car_shared

What the base head says, and so CAR-1 and every lossless verifier's target, does not change. A step costs one pass
without gradients, and the heads of a share of its positions (`head_positions`); with `keep_states` the heads alone. On
language models: `backbone.train=heads`.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import torch

from dcar.model.car import CARConfig, CARDecoder
from dcar.train.batches import SpeechDataset, collate

logger = logging.getLogger(__name__)

HEADS = ("num_prediction_heads", "heads", "head_blocks", "share_head_blocks", "zero_init_heads", "head_width",
         "tie_heads")
"""What a configuration says of its heads."""


def head_settings(config: CARConfig) -> dict[str, Any]:
    """Those of its settings that are of its heads."""
    return {name: getattr(config, name) for name in HEADS}


def on_frozen_trunk(trunk: CARDecoder, wanted: CARConfig) -> CARDecoder:
    """`trunk` with the heads that are `wanted`, ready to train them alone.

    Heads of another number or kind than its own are new, and their output layers start from the base head; heads of the
    same shape go on from where they are.
    """
    if head_settings(trunk.config) != head_settings(wanted):
        trunk = with_new_heads(trunk, wanted)
        logger.info("the %d additional heads (%s) are new", wanted.num_prediction_heads - 1, wanted.heads)
    trunk.freeze_trunk()
    return trunk


def with_new_heads(trunk: CARDecoder, wanted: CARConfig) -> CARDecoder:
    """A decoder with everything of `trunk` but its additional heads, which are as `wanted` and new."""
    model = CARDecoder(dataclasses.replace(trunk.config, **head_settings(wanted)))
    kept = {name: tensor for name, tensor in trunk.state_dict().items()
            if not name.startswith("heads.") or name.startswith("heads.base.")}
    model.load_state_dict(kept, strict=False)
    model.heads.start_outputs(model.heads.base.weight)
    return model


class FrozenStates(SpeechDataset):
    """The examples of the first epoch, in every epoch, with the hidden states of a frozen trunk (float16, on the CPU).

    They are computed once, in batches that do not depend on the order of training, so a resumed run repeats itself.
    """

    def __init__(self, data: SpeechDataset, model: CARDecoder, batch_size: int):
        vars(self).update(vars(data))
        self.states: list[torch.Tensor] = [torch.empty(0)] * len(data)
        device, training = model.norm.weight.device, model.training
        model.eval()
        order = np.argsort(self.lengths, kind="stable")
        logger.info("computing the hidden states of %d utterances", len(order))
        with torch.no_grad():
            for start in range(0, len(order), batch_size):
                which = [int(i) for i in order[start : start + batch_size]]
                batch = {name: part.to(device) for name, part in collate([data[0, i] for i in which]).items()}
                hidden = model.speech_hidden(**batch)
                for index, row, length in zip(which, hidden, batch["speech_lengths"].tolist(), strict=True):
                    self.states[index] = row[:length].half().cpu()
        model.train(training)
        logger.info("they are kept in %.0f MB", sum(s.nbytes for s in self.states) / 1e6)

    def __getitem__(self, address: tuple[int, int]) -> dict[str, Any]:
        return {**super().__getitem__((0, address[1])), "states": self.states[address[1]]}
