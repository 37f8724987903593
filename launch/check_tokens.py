"""Check that the shipped tokens are what the shipped tokenizer says of the shipped audio on this machine.

    python -m launch.check_tokens 12

Tokenising the whole corpus takes minutes, so the quickstart trains on the tokens in the package; this re-makes some.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.config import load_config, setting
from dcar.corpus.read import load_corpus
from dcar.errors import DataError
from dcar.prepare.prepared import load_prepared
from dcar.process import run_command
from dcar.sources.shipped import shipped
from dcar.tokens.load import load_tokenizer

# Encoder arithmetic differs in the last bits between processors, so a state between two codes may fall either way.
TOLERATED = 0.02


@dataclass
class CheckConfig:
    """Settings of `python -m launch.check_tokens`: are the shipped tokens those of the shipped tokenizer?"""

    count: int = setting(12, "Recordings that are tokenised again.", minimum=1, positional=True)


def main(arguments: list[str] | None = None) -> None:
    count = load_config(CheckConfig, arguments).count
    prepared = load_prepared(shipped("prepared"), "dev")
    utterances = {u.id: u for u in load_corpus("starter", None, "dev")}
    tokenizer = load_tokenizer("starter")
    total = different = 0
    for row in tqdm(prepared.select(range(min(count, len(prepared)))), desc="tokenise", unit="utterance"):
        wave, rate = utterances[row["id"]].load(ENCODER_SAMPLE_RATE)
        tokens, kept = tokenizer.encode([wave], rate)[0], np.asarray(row["speech"])
        total += len(kept)
        different += len(kept) if len(tokens) != len(kept) else int((tokens != kept).sum())
    if different > TOLERATED * total:
        raise DataError(f"{different} of {total} tokens differ from the shipped ones: corpus, tokenizer and tokens do "
                        "not belong together; run `dcar prepare out=runs/prepared` and train on that")
    print(f"{total} tokens made again from {count} recordings, {different} differ from the shipped ones")


if __name__ == "__main__":
    sys.exit(run_command("launch.check_tokens", main))
