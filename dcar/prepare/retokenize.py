"""`dcar prepare mode=retokenize`: a prepared corpus with a language model's own text tokens instead
of phonemes.

    dcar prepare mode=retokenize data=runs/prepared decoder=runs/cosyvoice2 out=runs/prepared_2

All later steps (training, DCPO, comparison) read it like any other prepared corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcar.config import load_config, setting
from dcar.errors import ConfigError, TextError
from dcar.model.backbones.causal_lm import TextTokenizer
from dcar.model.companions import text_units
from dcar.prepare.prepared import (
    check_out_dir,
    features,
    load_prepared,
    partial_folder,
    prepared_info,
    save_splits,
)
from dcar.process import run_claimed

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass
class RetokenizeConfig:
    """Settings of `dcar prepare mode=retokenize`."""

    data: str = setting(
        meaning="Prepared corpus to read, written by `dcar prepare`.", place="folder"
    )
    decoder: str = setting(
        meaning="Decoder whose text tokenizer is used, written by `dcar convert-backbone`."
    )
    out: str = setting(meaning="Prepared corpus to write.", place="folder")


def retokenize(config: RetokenizeConfig) -> Path:
    """Write the corpus with the decoder's own text ids and return its folder. Raises
    ConfigError, DataError, CheckpointError, TextError."""
    out = Path(config.out)
    check_out_dir(out, read=config.data)
    tokenizer = text_units(config.decoder)
    if not isinstance(tokenizer, TextTokenizer):
        raise ConfigError(
            f"{config.decoder}: reads {tokenizer.name}, not the tokens of a language model; "
            f"{config.data} has {prepared_info(config.data).phonemes}: prepare the corpus in the "
            "decoder's language and units"
        )
    info = prepared_info(config.data)

    def ids(row: dict[str, Any]) -> dict[str, Any]:
        try:
            prompt = tokenizer(row["prompt_text"]) if row["prompt_text"] else []
            return {"text_ids": tokenizer(row["text"]), "prompt_text_ids": prompt}
        except TextError as error:
            raise TextError(f"{row['source']}: utterance {row['id']}: {error}") from error

    text = features(info.tokenizer.vocab_size, tokenizer.size)["text_ids"]

    def retokenized(split: str) -> Dataset:
        rows = load_prepared(config.data, split)
        columns = rows.features.copy()
        columns |= {"text_ids": text, "prompt_text_ids": text}
        # not next to the rows that are read, where the library would write its cache file
        work = partial_folder(out)
        work.mkdir(parents=True, exist_ok=True)
        return rows.map(
            ids,
            features=columns,
            desc=f"text of {split}",
            cache_file_name=str(work / f"{split}.arrow"),
            load_from_cache_file=False,
        )

    phonemes = {"version": tokenizer.name, "size": tokenizer.size}
    save_splits(
        out,
        ((split, retokenized(split)) for split in info.counts),
        {**info.content, "phonemes": phonemes},
    )
    return out


CONFIG = RetokenizeConfig


def main(arguments: Sequence[str] | None = None) -> None:
    print(f"written to {run_claimed(retokenize, load_config(CONFIG, arguments))}")
