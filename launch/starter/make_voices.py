"""Make the file of shipped voices, by which `dcar speak` needs no corpus: of every voice of a
prepared corpus' test and dev split, the prompt and the features of its first utterance.

    python -m launch.starter.make_voices data=starter out=dcar/assets/voices.safetensors
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dcar.config import load_config, setting
from dcar.prepare.prepared import load_prepared, prepared_info
from dcar.storage import replacing

START, PROMPT_TOKENS = 20, 50  # the first tokens of an utterance are often silence


@dataclass
class VoicesConfig:
    """Settings of this script."""

    data: str = setting("starter", "Prepared corpus.", place="folder")
    out: str = setting("runs/voices.safetensors", "File to write.", place="file")


def main(arguments: list[str]) -> None:
    """Write the voices of a corpus; the voices of "test" were never trained on and come first."""
    config = load_config(VoicesConfig, arguments)
    names: dict[str, str] = {}  # voice -> split
    tokens, features = [], []
    for split in ("test", "dev"):
        for row in load_prepared(config.data, split):
            if row["speaker"] not in names:
                names[row["speaker"]] = split
                tokens.append(row["speech"][START : START + PROMPT_TOKENS])
                features.append(row["voice"])
    about = {
        "names": json.dumps(names),
        "tokenizer": prepared_info(config.data).tokenizer.checksum,
    }
    arrays = {"tokens": np.array(tokens, np.int32), "features": np.array(features, np.float32)}
    with replacing(Path(config.out)) as part:
        save_file(arrays, part, about)


if __name__ == "__main__":
    main(sys.argv[1:])
