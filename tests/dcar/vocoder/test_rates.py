"""Tokenizers of 25 tokens a second, all the way: tokens, stage one with three heads, vocoder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import torch
from tiny_data import ToyEncoder, ToyTokenizer

from dcar.errors import CheckpointError, DataError
from dcar.model.car import CARConfig
from dcar.prepare.prepared import prepared_info
from dcar.prepare.run import PrepareConfig, load_prepared, run
from dcar.train.car import TrainConfig
from dcar.train.car import run as train
from dcar.vocoder.base import check_rates
from dcar.vocoder.model import TokenVocoder, VocoderConfig


class Slow(ToyTokenizer):
    """The toy tokenizer at 25 Hz: one code per 40 ms."""

    name, rate_hz, checksum = "toy25", 25.0, "sha-toy25"

    def _codes(self, wave: np.ndarray) -> np.ndarray:
        frames = -(-len(wave) // 640)
        padded = np.pad(wave, (0, frames * 640 - len(wave))).reshape(frames, 640)
        return np.clip((np.diff(np.signbit(padded).astype(int), axis=1) != 0).sum(1), 0, 63).astype(np.int64)


def test_25_hz_with_three_heads(tmp_path: Path) -> None:
    rows = []
    for i in range(8):
        sf.write(tmp_path / f"{i}.wav", 0.3 * np.sin(np.arange(16_000 + 800 * i) / (9 + i)), 16_000)
        rows.append({"id": f"u{i}", "audio": f"{i}.wav", "text": f"Line {i}.", "speaker": f"s{i % 2}",
                     "split": "dev" if i % 4 == 3 else "train"})  # fmt: skip
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = PrepareConfig(out=str(tmp_path / "p"), corpus="jsonl", path=str(tmp_path / "m.jsonl"))
    run(config, tokenizer=Slow(), speaker_encoder=ToyEncoder(), progress=False)
    info = prepared_info(tmp_path / "p")["tokenizer"]
    assert info["rate_hz"] == 25.0
    assert [len(t) for t in load_prepared(tmp_path / "p", "train")["speech"]] == [25, 27, 28, 30, 32, 33]

    # codes of 20 ms under the name of a tokenizer of 25 a second are refused, as any wrong number is
    class Wrong(ToyTokenizer):
        rate_hz, checksum = 25.0, "wrong"

    other = PrepareConfig(out=str(tmp_path / "q"), corpus="jsonl", path=str(tmp_path / "m.jsonl"))
    with pytest.raises(DataError, match=r"tokens for 1.00 s, expected about 25 at 25 Hz"):
        run(other, tokenizer=Wrong(), speaker_encoder=ToyEncoder(), progress=False)

    model = CARConfig(hidden_size=16, num_layers=1, num_attention_heads=2, ffn_size=16, num_prediction_heads=3,
                      head_blocks=1, bos=True)  # fmt: skip
    decoder = train(TrainConfig(data=str(tmp_path / "p"), out=str(tmp_path / "car"), model=model, prompt_tokens=5,
                                batch_size=2, max_steps=2, warmup_steps=1, eval_steps=100, save_steps=100))  # fmt: skip
    assert decoder is None or decoder.config.num_prediction_heads == 3
    saved = json.loads((tmp_path / "car" / "config.json").read_text())
    assert (saved["num_prediction_heads"], saved["speech_vocab_size"], saved["tokenizer"]) == (3, 64, "toy25@sha-toy25")

    torch.manual_seed(0)
    small = dict(vocab_size=64, condition_size=8, mel_bands=20, acoustic_size=16, acoustic_ffn_size=16,
                 acoustic_dilations=(1,), renderer_size=16, renderer_ffn_size=16, renderer_dilations=(1,))  # fmt: skip
    vocoder = TokenVocoder(VocoderConfig(**small, token_rate=25))  # type: ignore[arg-type]
    check_rates(vocoder, info["rate_hz"], info["name"])
    [wave] = vocoder.synthesize([load_prepared(tmp_path / "p", "train")[0]["speech"]], np.zeros((1, 298), np.float32))
    assert len(wave) == 24_000  # one second again
    with pytest.raises(CheckpointError, match="speaks 50 tokens a second, toy25 makes 25"):
        check_rates(TokenVocoder(VocoderConfig(**small)), info["rate_hz"], info["name"])  # type: ignore[arg-type]
