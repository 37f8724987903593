"""Recognisers of transformers on tiny random models saved in the real formats."""

import hashlib
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_pretrained import save_ctc, save_whisper
from tones import noise

from dcar.errors import AssetError, CheckpointError, TextError
from dcar.recognition import pretrained
from dcar.recognition.base import Recognizer, batches
from dcar.recognition.load import load_recognizer
from dcar.sources.hub import identified

RATE = 16_000


def slow_greedy(folder: Path, wave: np.ndarray, most: int) -> str:
    """At most `most` tokens of a window, by a loop over the model without a cache."""
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    processor = WhisperProcessor.from_pretrained(folder)
    features = processor(wave, sampling_rate=RATE, return_tensors="pt").input_features
    ids = [model.config.decoder_start_token_id]
    with torch.no_grad():
        while len(ids) <= most:
            ids.append(
                int(model(features, decoder_input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            )
            if ids[-1] == model.config.eos_token_id:
                break
    return processor.decode(ids, skip_special_tokens=True).strip()


def test_whisper_of_transformers(tmp_path):
    folder = save_whisper(tmp_path / "whisper-tiny-random")
    recognizer = load_recognizer(f"whisper:{folder}")
    assert isinstance(recognizer, Recognizer)
    assert re.fullmatch(r"whisper-hf:whisper-tiny-random@[0-9a-f]{8}", recognizer.name)
    # two batches
    waves = [noise(seconds, i) for i, seconds in enumerate((1.0, 0.2, 3.0, 0.2, 2.0, 1.5))]
    texts = recognizer.transcribe(waves, RATE)
    assert texts == [
        slow_greedy(folder, wave, 8 + math.ceil(8 * len(wave) / RATE)) for wave in waves
    ]
    # the caps are those of each length
    assert all(texts) and len({len(text) for text in texts}) > 2
    assert texts == [recognizer.transcribe([wave], RATE)[0] for wave in waves]
    long = np.tile(noise(1.0, 3), 30)
    both = recognizer.transcribe([waves[1], np.concatenate([long, waves[0]]), waves[0]], RATE)
    # cut at 30 s
    assert both == [texts[1], f"{recognizer.transcribe([long], RATE)[0]} {texts[0]}", texts[0]]
    assert recognizer.transcribe([], RATE) == []


@pytest.mark.parametrize("norm", ["group", "layer"])
@pytest.mark.parametrize("family", ["Hubert", "Wav2Vec2", "WavLM"])
def test_ctc_batches_give_what_single_waveforms_give(family: str, norm: str, tmp_path, monkeypatch):
    save_ctc(tmp_path / "m", family, norm)
    recognizer = load_recognizer(f"ctc:{tmp_path / 'm'}")
    waves = [noise(seconds, i) for i, seconds in enumerate((0.8, 0.3, 0.8, 0.5, 0.05))]
    sizes, run = [], recognizer._model.forward

    def counted(**inputs: torch.Tensor) -> Any:
        sizes.append(len(inputs["input_values"]))
        return run(**inputs)

    monkeypatch.setattr(recognizer._model, "forward", counted)
    alone = dict(recognizer._log_probs(waves, RATE))
    assert sizes == [1] * 5  # on a CPU
    monkeypatch.setattr(pretrained, "batches", partial(batches, cpu_seconds=20.0))  # as on a GPU
    together = dict(recognizer._log_probs(waves, RATE))
    assert sorted(sizes[5:]) == ([5] if norm == "layer" else [1, 1, 1, 2])
    for i in range(len(waves)):
        torch.testing.assert_close(together[i], alone[i], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["Hubert", "Wav2Vec2", "WavLM"])
def test_ctc_of_transformers(family: str, tmp_path):
    model, symbols = save_ctc(tmp_path / "m", family)
    recognizer = load_recognizer(f"ctc:{tmp_path / 'm'}")
    waves = [noise(0.8, 1), noise(0.5, 2)]
    texts = recognizer.transcribe(waves, RATE)
    for wave, text in zip(waves, texts, strict=True):
        values = (wave - wave.mean()) / np.sqrt(wave.var() + 1e-7)
        with torch.no_grad():
            best = model(torch.from_numpy(values)[None]).logits[0].argmax(-1).tolist()
        kept = [symbols[s] for i, s in enumerate(best) if i == 0 or s != best[i - 1]]
        assert text == " ".join("".join(k for k in kept if len(k) == 1).replace("|", " ").split())
        target = torch.tensor([[symbols.index(s) for s in "AB|C"]])
        with torch.no_grad():
            # transformers': over all paths
            loss = float(model(torch.from_numpy(values)[None], labels=target).loss)
        assert recognizer.log_likelihood([wave], RATE, ["ab c!"])[0] == pytest.approx(
            -loss / 4, rel=1e-4
        )
    assert any(texts)
    aligned = recognizer.align(waves, RATE, ["ab c", "c"])
    assert [a.transcript for a in aligned] == texts and [len(a.costs) for a in aligned] == [4, 1]
    with pytest.raises(TextError, match=r"\['X'\]"):
        recognizer.align(waves[:1], RATE, ["ax"])


def test_models_that_cannot_be_had_say_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(AssetError, match="hf download openai/whisper-large-v9 "):
        load_recognizer("whisper:openai/whisper-large-v9")
    with pytest.raises(AssetError, match="hf download facebook/nothing-ft"):
        load_recognizer("ctc:facebook/nothing-ft")
    with pytest.raises(CheckpointError, match="CTC"):
        load_recognizer(f"ctc:{tmp_path}")


def test_a_name_identifies_the_files_that_a_model_consists_of(tmp_path, monkeypatch):
    for run in ("a", "b"):
        save_ctc(tmp_path / run / "final")
    folder, copy = (tmp_path / run / "final" for run in ("a", "b"))
    first = identified("final", folder)
    assert re.fullmatch("final@[0-9a-f]{8}", first)
    (folder / "optimizer.pt").write_bytes(b"of the training that made it")
    assert identified("final", copy) == identified("final", folder) == first
    vocabulary = json.loads((copy / "vocab.json").read_text())
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (copy / "vocab.json").write_text(json.dumps(vocabulary))
    assert identified("final", copy) != first
    file = folder / "model.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    assert identified("one", file) == f"one@{digest}"
    # a model of the hub: the commit in the cache, which has no network here
    cached = tmp_path / "hub" / "models--facebook--some-ft"
    commit = "87654321" + 32 * "0"
    (cached / "snapshots" / commit).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert identified("some-ft", "facebook/some-ft") == "some-ft@87654321"
    assert identified("stt_en", "stt_en") == "stt_en"
    assert identified("of NeMo: x", "of NeMo: x") == "of NeMo: x"
