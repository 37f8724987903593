"""From settings to the model that stage one trains: from scratch, from another decoder, or on a
language model.

`freeze_trunk` of `dcar train` adds heads to a decoder that does not change (Medusa-1):

    dcar train --config car_starter:shared out=runs/car_shared

The output of the base head stays the same, and with it CAR-1 and the target of every lossless
verifier. A step costs one pass without gradients and the heads at a share of its positions
(`head_positions`); with `keep_states` only the heads. On language models: `backbone.train=heads`.
"""

import dataclasses
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from dcar.errors import ConfigError, DataError
from dcar.model.backbones.decoder import (
    TEXT_TOKENIZER_FOLDER,
    BackboneConfig,
    BackboneDecoder,
    cast_backbone,
)
from dcar.model.backbones.lora import add_lora, merge, save_adapter, set_trainable
from dcar.model.base import DecoderConfig
from dcar.model.car import CARConfig, CARDecoder
from dcar.model.companions import text_units
from dcar.model.load import Shipped, load_decoder
from dcar.prepare.prepared import PreparedInfo, prepared_info
from dcar.text.base import SymbolUnits
from dcar.text.units import TEXT_TOKENIZER, UNITS_FILE, Characters
from dcar.tokens.codebook import codebook_of
from dcar.tracking import write_json
from dcar.train.checkpoints import config_differences
from dcar.train.settings import TrainConfig

logger = logging.getLogger(__name__)

HEADS = ("num_prediction_heads", "heads", "head_blocks")
"""Fields of a configuration that describe its heads."""


def plan(
    config: TrainConfig, identity: dict[str, Any]
) -> tuple[TrainConfig, DecoderConfig, Callable[[], CARDecoder]]:
    """Return the resolved settings, the configuration that a checkpoint of this run has, and a
    function that makes the model.

    identity: see `data_identity`. Raises ConfigError or DataError, here or in that function, if
    settings, data and weights do not belong together.
    """
    if config.backbone.path:
        return plan_backbone(config, identity)
    wanted = dataclasses.replace(config.model, **identity)

    def make() -> CARDecoder:
        if not config.init_from:
            model = CARDecoder(wanted)
            if config.codebook_init:
                codebook = codebook_of(prepared_info(config.data).tokenizer, config.data)
                if codebook is None:
                    raise ConfigError(
                        f"{config.data}: its tokenizer has no k-means codebook to start from; set "
                        "codebook_init=false"
                    )
                model.start_from_codebook(codebook)
            return model
        starter: Shipped = "far" if wanted.num_prediction_heads == 1 else "decoder"
        loaded = load_decoder(config.init_from, starter=starter)
        if not isinstance(loaded, CARDecoder):
            raise ConfigError(
                f"init_from {config.init_from}: is a {loaded.model_type}, which has a shape of "
                "its own; to train a decoder on a language model, set backbone.path=… and omit "
                "init_from and `model`"
            )
        read_as(loaded, wanted, prepared_info(config.data), config.init_from, starter)
        model = on_frozen_trunk(loaded, wanted) if config.freeze_trunk else loaded
        if differences := config_differences(model.config, wanted):
            raise ConfigError(
                f"init_from {config.init_from} does not fit the configured model and data: "
                f"{differences}"
            )
        return model

    return dataclasses.replace(config, model=wanted), wanted, make


def read_as(
    model: CARDecoder, wanted: CARConfig, prepared: PreparedInfo, source: str, starter: Shipped
) -> None:
    """Make a decoder read the text units of a corpus, in place. Symbols that both inventories have
    keep their embeddings; the others get new ones, as large as those."""
    found = model.config
    found.languages = wanted.languages
    if found.phonemes == wanted.phonemes or not found.phonemes:
        return
    if TEXT_TOKENIZER in found.phonemes + wanted.phonemes:
        return  # what differs is named with everything else
    before, after = text_units(source, starter), prepared.units
    assert isinstance(before, SymbolUnits)
    old = model.text_embedding.weight.detach()
    rows = torch.randn(wanted.text_vocab_size, old.shape[1]) * old.std()
    kept = {symbol: before.ids[symbol] for symbol in after.symbols if symbol in before.ids}
    for symbol, row in kept.items():
        rows[after.ids[symbol]] = old[row]
    model.text_embedding = nn.Embedding.from_pretrained(rows, freeze=False)
    found.phonemes, found.text_vocab_size = wanted.phonemes, wanted.text_vocab_size
    logger.info(
        "%s reads %s instead of %s: %d of %d symbols keep their embeddings, the others start anew",
        source, after.name, before.name, len(kept), after.size,
    )  # fmt: skip


def head_settings(config: CARConfig) -> dict[str, Any]:
    """Return the settings of a configuration that describe its heads."""
    return {name: getattr(config, name) for name in HEADS}


def on_frozen_trunk(trunk: CARDecoder, wanted: CARConfig) -> CARDecoder:
    """Return `trunk` with the heads of the configuration `wanted`, ready to train the heads alone.

    Heads of another number or kind than the trunk's own are new, and their output layers start from
    the base head; heads of the same shape keep their weights.
    """
    if head_settings(trunk.config) != head_settings(wanted):
        frozen = {
            name: tensor
            for name, tensor in trunk.state_dict().items()
            if not name.startswith("heads.") or name.startswith("heads.base.")
        }
        trunk = CARDecoder(dataclasses.replace(trunk.config, **head_settings(wanted)))
        trunk.load_state_dict(frozen, strict=False)
        trunk.heads.start_outputs(trunk.heads.base.weight)
        logger.info(
            "created %d additional heads (%s)", wanted.num_prediction_heads - 1, wanted.heads
        )
    trunk.freeze_trunk()
    return trunk


def plan_backbone(
    config: TrainConfig, identity: dict[str, Any]
) -> tuple[TrainConfig, BackboneConfig, Callable[[], CARDecoder]]:
    """Return `plan` for a pretrained language model. Raises ConfigError or DataError if settings
    or data do not belong to it."""
    settings = config.backbone
    backbone = BackboneDecoder.load_config(settings.path)
    for name, what in (
        ("speech_vocab_size", "the number of speech codes"),
        ("tokenizer", "the speech tokenizer"),
        ("phonemes", "the text tokenizer"),
    ):
        ours = getattr(backbone, name)
        if not ours or ours == identity[name]:
            continue
        remedy = "prepare the corpus with the model's own speech tokenizer"
        if name == "phonemes":
            remedy = (
                f"run `dcar prepare mode=retokenize data={config.data} decoder={settings.path} "
                "out=…`"
            )
        raise DataError(
            f"{config.data}: {what} is {identity[name]}, but {settings.path} has {ours}; {remedy}"
        )
    wanted = dataclasses.replace(
        backbone,
        tokenizer=identity["tokenizer"],
        phonemes=identity["phonemes"],
        languages=identity["languages"],
        lora=dataclasses.asdict(settings.lora) if settings.train == "lora" else None,
    )
    shape = decoder_shape(wanted)
    given, default = (dataclasses.replace(m, **identity) for m in (config.model, CARConfig()))
    if given not in (default, shape):
        raise ConfigError(
            "`model` describes a decoder from scratch, but backbone.path names one that already "
            "has its shape: remove the settings of `model`"
        )
    if config.init_from:
        raise ConfigError(
            "init_from and backbone.path both name weights to start from: set only one of them"
        )

    def make() -> CARDecoder:
        model = BackboneDecoder.from_pretrained(settings.path)
        model.config.tokenizer, model.config.phonemes = wanted.tokenizer, wanted.phonemes
        model.config.languages = wanted.languages
        if settings.train == "lora":
            add_lora(model, settings.lora)
        set_trainable(model, settings.train)
        return cast(CARDecoder, cast_backbone(model, getattr(torch, settings.dtype)))

    return dataclasses.replace(config, model=shape), wanted, make


def decoder_shape(config: DecoderConfig) -> CARConfig:
    """Return the part of a configuration that the trainer reads: a CARConfig unchanged, or the
    fields that a language model shares with it."""
    if isinstance(config, CARConfig):
        return config
    return CARConfig(
        **{
            f.name: getattr(config, f.name)
            for f in dataclasses.fields(CARConfig)
            if hasattr(config, f.name)
        },
        dropout=0.0,
    )


def finish_backbone(decoder: BackboneDecoder, origin: Path, out: Path) -> None:
    """Merge the adapters into the decoder in `out`, keep a copy of them next to it, and copy the
    text tokenizer."""
    if decoder.config.lora:
        save_adapter(decoder, out / "adapter")
        merge(decoder).save_pretrained(out)
    if (tokenizer := origin / TEXT_TOKENIZER_FOLDER).is_dir():
        shutil.copytree(tokenizer, out / TEXT_TOKENIZER_FOLDER, dirs_exist_ok=True)


def write_units(prepared: PreparedInfo, out: Path) -> None:
    """Write the inventory that was collected from a corpus into the folder of a decoder."""
    if "symbols" in prepared.content["phonemes"] and isinstance(prepared.units, Characters):
        write_json(out / UNITS_FILE, prepared.units.stored())


def data_identity(prepared: PreparedInfo) -> dict[str, Any]:
    """Return the vocabulary size, the names that tie a decoder to its tokenizer and text units, and
    its languages."""
    return {
        "speech_vocab_size": prepared.tokenizer.vocab_size,
        "tokenizer": prepared.tokenizer.identity,
        "phonemes": prepared.phonemes,
        "languages": prepared.languages,
    }
