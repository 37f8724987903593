"""`dcar resynthesize`: speak a prepared split from its own tokens through the vocoder, as training speech for the
reward recogniser (which must know the sound of the vocoder) and for measuring what tokens and vocoder lose.

    dcar resynthesize data=runs/prepared split=train vocoder=runs/vocoder/export out=runs/resynthesis
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dcar.config import load_config
from dcar.prepare import load_prepared
from dcar.vocoders import load_vocoder


@dataclass
class ResynthesizeConfig:
    """Settings of `dcar resynthesize`."""

    data: str = "runs/prepared"
    split: str = "train"
    vocoder: str = "starter"
    out: str = "runs/resynthesis"
    batch_size: int = 8
    limit: int = 0  # utterances at most; 0 = all
    other_voices: bool = False  # speak every utterance in the voice of another one, drawn at random (seeded)
    seed: int = 0


def run(config: ResynthesizeConfig) -> Path:
    """Write `<out>/<split>.npz` (int16 waves by id) and `<out>/<split>.jsonl` (audio, key, text, tokens)."""
    dataset = load_prepared(config.data, config.split)
    if config.limit:
        dataset = dataset.select(range(min(config.limit, len(dataset))))
    vocoder = load_vocoder(config.vocoder)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    voices = np.asarray(dataset["voice"], np.float32)
    if config.other_voices:
        voices = voices[np.random.default_rng(config.seed).permutation(len(voices))]
    order = np.argsort([len(tokens) for tokens in dataset["speech"]])
    waves: dict[str, Any] = {}
    rows = []
    for start in tqdm(range(0, len(order), config.batch_size), desc=f"resynthesize {config.split}", unit="batch"):
        chosen = order[start : start + config.batch_size].tolist()
        batch = [dataset[i] for i in chosen]
        spoken = vocoder.synthesize([row["speech"] for row in batch], voices[chosen])
        for row, wave in zip(batch, spoken, strict=True):
            waves[row["id"]] = (np.clip(wave, -1, 1) * 32767).astype(np.int16)
            rows.append({"audio": f"{config.split}.npz", "key": row["id"], "text": row["text"],
                         "speaker": row["speaker"], "tokens": list(row["speech"])})
    np.savez(out / f"{config.split}.npz", sample_rate=vocoder.sample_rate, **waves)
    manifest = out / f"{config.split}.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return manifest


def main(arguments: list[str] | None = None) -> None:
    print(run(load_config(ResynthesizeConfig, arguments)))


if __name__ == "__main__":
    main()
