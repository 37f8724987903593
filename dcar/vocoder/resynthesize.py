"""Resynthesis of a prepared split from its own tokens (`dcar prepare mode=resynthesize`): training
speech for the reward recogniser, which must know the sound of the vocoder, and a measure of the
loss by tokens and vocoder.

    dcar prepare mode=resynthesize data=runs/prepared split=train \\
        vocoder=runs/vocoder/export out=runs/spoken

The result is a corpus of kind jsonl: a manifest `<out>/train.jsonl` and recordings
`<out>/train/NUMBER.wav`. `dcar score audio=<out>/train.jsonl` measures it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dcar.audio import save_audio
from dcar.config import load_config, setting
from dcar.config.commands import RunSettings, SeedSettings, UtteranceSettings, VocoderSettings
from dcar.prepare.prepared import load_prepared, prepared_info
from dcar.process import own_device, run_claimed
from dcar.progress import Progress
from dcar.storage import write_text
from dcar.vocoder.base import check_speaks
from dcar.vocoder.load import load_vocoder


@dataclass
class ResynthesizeConfig(SeedSettings, RunSettings, VocoderSettings, UtteranceSettings):
    """Settings of `dcar prepare mode=resynthesize`."""

    out: str = "runs/resynthesis"
    split: str = "train"
    batch_size: int = 8
    other_voices: bool = setting(
        False, "Synthesise every utterance in the voice of another one, drawn at random (seeded)."
    )


def run(config: ResynthesizeConfig) -> Path:
    """Write the recordings and then the manifest, and return the path of the manifest. Raises
    CheckpointError if the vocoder does not accept the corpus' tokens."""
    dataset = load_prepared(config.data, config.split)
    if config.limit:
        dataset = dataset.select(range(min(config.limit, len(dataset))))
    out = Path(config.out)
    (out / config.split).mkdir(parents=True, exist_ok=True)
    voices = np.asarray(dataset["voice"], np.float32)
    vocoder: Any = load_vocoder(config.vocoder, own_device(config.device))
    check_speaks(vocoder, prepared_info(config.data).tokenizer)
    if config.other_voices:
        voices = voices[np.random.default_rng(config.seed).permutation(len(voices))]
    order = np.argsort([len(tokens) for tokens in dataset["speech"]])
    lines = []
    for start in Progress(
        range(0, len(order), config.batch_size), desc=f"resynthesize {config.split}", unit="batch"
    ):
        chosen = order[start : start + config.batch_size].tolist()
        batch = [dataset[i] for i in chosen]
        waves = vocoder.synthesize([row["speech"] for row in batch], voices[chosen])
        for number, row, wave in zip(chosen, batch, waves, strict=True):
            audio = f"{config.split}/{number:06}.wav"
            save_audio(out / audio, wave, int(vocoder.sample_rate))
            entry = {
                "id": row["id"],
                "audio": audio,
                "text": row["text"],
                "speaker": row["speaker"],
            }
            lines.append(json.dumps(entry))
    manifest = out / f"{config.split}.jsonl"
    write_text(manifest, "\n".join(lines) + "\n")
    return manifest


CONFIG = ResynthesizeConfig


def main(arguments: list[str] | None = None) -> None:
    print(run_claimed(run, load_config(CONFIG, arguments)))
