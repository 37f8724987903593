"""`dcar prepare mode=resynthesize`: speak a prepared split from its own tokens through the vocoder, as training speech
for the reward recogniser (which must know the sound of the vocoder) and for measuring what tokens and vocoder lose.

    dcar prepare mode=resynthesize data=runs/prepared split=train vocoder=runs/vocoder/export out=runs/resynthesis

With `wavs=true` every utterance is a file to listen to as well, `<out>/<split>/ID.wav`, with its text beside it in
`ID.txt`, as `dcar score audio=<out>/<split>` reads them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dcar.audio import save_audio
from dcar.config import load_config, setting
from dcar.config.schema import seed_setting
from dcar.prepare.prepared import load_prepared, prepared_info
from dcar.vocoder.base import check_speaks
from dcar.vocoder.load import load_vocoder


@dataclass
class ResynthesizeConfig:
    """Settings of `dcar prepare mode=resynthesize`."""

    data: str = setting("runs/prepared", "Folder written by `dcar prepare`.", place="folder")
    split: str = setting("train", "Split that is spoken.")
    vocoder: str = setting("starter", "Folder, or a name that dcar.vocoder.load lists.")
    out: str = setting("runs/resynthesis", "Folder to write.", place="folder")
    batch_size: int = setting(8, "Utterances spoken at once.", minimum=1)
    limit: int = setting(0, "Utterances at most; 0 = all.", minimum=0)
    other_voices: bool = setting(False, "Speak every utterance in the voice of another one, drawn at random (seeded).")
    wavs: bool = setting(False, "Also write a .wav and a .txt of every utterance.")
    seed: int = seed_setting(0, "Of other_voices.")


def run(config: ResynthesizeConfig) -> Path:
    """Write `<out>/<split>.npz` (int16 waves by id) and `<out>/<split>.jsonl` (audio, key, text, tokens)."""
    dataset = load_prepared(config.data, config.split)
    if config.limit:
        dataset = dataset.select(range(min(config.limit, len(dataset))))
    out = Path(config.out)
    (out / config.split if config.wavs else out).mkdir(parents=True, exist_ok=True)
    voices = np.asarray(dataset["voice"], np.float32)
    vocoder: Any = load_vocoder(config.vocoder)
    check_speaks(vocoder, prepared_info(config.data))
    if config.other_voices:
        voices = voices[np.random.default_rng(config.seed).permutation(len(voices))]
    rate = int(vocoder.sample_rate)
    order = np.argsort([len(tokens) for tokens in dataset["speech"]])
    waves: dict[str, Any] = {}
    rows = []
    for start in tqdm(range(0, len(order), config.batch_size), desc=f"resynthesize {config.split}", unit="batch"):
        chosen = order[start : start + config.batch_size].tolist()
        batch = [dataset[i] for i in chosen]
        spoken = vocoder.synthesize([row["speech"] for row in batch], voices[chosen])
        for row, wave in zip(batch, spoken, strict=True):
            if config.wavs:
                file = out / config.split / f"{row['id'].replace('/', '_')}.wav"
                save_audio(file, wave, rate)
                file.with_suffix(".txt").write_text(row["text"] + "\n", encoding="utf-8")
            waves[row["id"]] = (np.clip(wave, -1, 1) * 32767).astype(np.int16)
            rows.append({"audio": f"{config.split}.npz", "key": row["id"], "text": row["text"],
                         "speaker": row["speaker"], "tokens": list(row["speech"])})
    np.savez(out / f"{config.split}.npz", sample_rate=rate, **waves)
    manifest = out / f"{config.split}.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return manifest


def main(arguments: list[str] | None = None) -> None:
    print(run(load_config(ResynthesizeConfig, arguments)))
