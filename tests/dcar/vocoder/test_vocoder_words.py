"""The loss that asks whisper-base whether a spectrum sounds like its words, and what measures a
vocoder's words."""

import itertools
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from tiny_data import tiny_vocoder, write_prepared
from tiny_vocoder import harmonic, toy_config, toy_data

from dcar.errors import ConfigError
from dcar.prepare.prepared import load_prepared
from dcar.vocoder.acoustic import VocoderConfig
from dcar.vocoder.renderer import mel_transform
from dcar.vocoder.training.losses import VoiceLoss, WordLoss
from dcar.vocoder.training.trainer import Trainer
from dcar.voices.features import SAMPLE_RATE
from eval.analysis.vocoder_quality import (
    Heard,
    VocoderQualityConfig,
    nearest_voice,
    run,
    table,
)


def chirps(count: int, seconds: float = 1.0) -> torch.Tensor:
    """Buzzes whose pitch moves, each in its own way: [count, samples] at 24 kHz."""
    steps = np.linspace(0, 1, int(seconds * SAMPLE_RATE))
    pitch = [150 + 60 * np.sin(2 * np.pi * (i + 2) * steps) for i in range(count)]
    waves = [
        harmonic(f0, seconds, seed=i) * (0.2 + np.abs(np.sin(9 * i + 7 * steps)))
        for i, f0 in enumerate(pitch)
    ]
    return torch.from_numpy(np.stack(waves).astype(np.float32))


def test_loss_is_zero_at_the_truth_grows_with_the_error_and_teaches_only_inside_the_mask():
    torch.manual_seed(0)
    waves = chirps(4)
    log_mel = mel_transform(VocoderConfig())(waves).transpose(1, 2)
    loss = WordLoss(waves, log_mel)
    mask = torch.ones(4, 100)
    assert float(loss(log_mel, log_mel, mask)) == 0
    noise = torch.randn_like(log_mel)
    errors = [float(loss(log_mel + size * noise, log_mel, mask)) for size in (0.05, 0.2, 0.8)]
    assert 0 < errors[0] < errors[1] < errors[2]

    mask[:, 60:] = 0
    said = (log_mel + 0.2 * noise).requires_grad_()
    loss(said, log_mel, mask).backward()
    assert float(said.grad[:, :60].norm()) > 0 and float(said.grad[:, 60:].norm()) == 0
    assert not any(p.requires_grad for p in loss.parameters())
    # tokens of 100 Hz
    odd = loss(log_mel[:, :99] + 0.2 * noise[:, :99], log_mel[:, :99], torch.ones(4, 99))
    assert torch.isfinite(odd)

    # Descent on the loss alone brings a damaged spectrum nearer to what Whisper heard.
    damaged = (log_mel + 0.2 * noise)[:1].requires_grad_()
    optimizer, found = torch.optim.Adam([damaged], 0.02), []
    for _ in range(21):
        optimizer.zero_grad()
        error = loss(damaged, log_mel[:1], mask[:1])
        error.backward()
        optimizer.step()
        found.append(float(error.detach()))
    assert found[-1] < 0.7 * found[0]


@pytest.mark.slow
def test_training_with_the_losses_is_logged_and_exports_nothing_of_it(tmp_path):
    config = toy_config(
        tmp_path,
        words_weight=1.0,
        voice_weight=1.0,
        renderer_every=0,
        learning_rate=4e-3,
        bf16=False,
    )  # minutes on a processor without instructions for it
    data = toy_data(tmp_path)
    trainer = Trainer(config, data, torch.device("cpu"))
    logs = [trainer.step() for _ in range(40)]
    for name, share in (("words", 0.8), ("voices", 0.96)):  # buzzes hardly have a voice
        values = [float(log[name]) for log in logs]
        assert all(np.isfinite(values)), name
        assert np.mean(values[-8:]) < share * np.mean(values[:8]), (name, values)
    plain = Trainer(toy_config(tmp_path, renderer_every=0), data, torch.device("cpu"))
    assert trainer.state().keys() == plain.state().keys()
    assert trainer.generator.state_dict().keys() == plain.generator.state_dict().keys()
    with pytest.raises(ConfigError, match="acoustic_tokens=500"):
        Trainer(
            toy_config(tmp_path, words_weight=1.0, acoustic_tokens=500), data, torch.device("cpu")
        )


def test_voice_loss_knows_recordings_from_one_another_and_teaches_only_inside_the_mask():
    level = 0.3 + 0.2 * np.sin(np.arange(int(1.6 * SAMPLE_RATE)) / 900)
    waves = [harmonic(f0, 1.6, seed=i) * level for i, f0 in enumerate((90.0, 130.0, 190.0, 260.0))]
    waves = torch.from_numpy(np.stack(waves)).float()
    log_mel = mel_transform(VocoderConfig())(waves).transpose(1, 2)
    loss, mask = VoiceLoss(waves, log_mel), torch.ones(4, 160)
    assert abs(float(loss(log_mel, log_mel, mask, waves))) < 1e-6
    exchanged = float(loss(log_mel.flip(0), log_mel, mask, waves))
    torch.manual_seed(0)
    noise = torch.randn_like(log_mel)
    assert 0 < float(loss(log_mel + 0.1 * noise, log_mel, mask, waves)) < exchanged
    mask[:, 100:] = 0
    said = (log_mel + 0.1 * noise).requires_grad_()
    loss(said, log_mel, mask, waves).backward()
    assert float(said.grad[:, :100].norm()) > 0 and float(said.grad[:, 100:].norm()) == 0
    assert not any(p.requires_grad for p in loss.parameters())


# ------------------------------------------------------------------------------------------------ v


def test_nearest_voice_is_among_the_names_that_are_asked_for():
    voices = {"a": np.array([3.0, 0.0]), "b": np.array([0.0, 0.5]), "c": np.array([1.0, 1.0])}
    embeddings = np.array([[1.0, 0.0], [0.8, 0.6], [0.1, 0.995]])
    assert nearest_voice(embeddings, voices, ["a", "b"]) == ["a", "a", "b"]
    assert nearest_voice(embeddings, voices, ["a", "b", "c"]) == ["a", "c", "b"]


class Judge:
    """Hears every word of half of the waves, and of the vocoder's nothing else than noise."""

    name = "fake"

    def transcribe(self, waves, sample_rate):
        return ["a red house" if i % 2 else "a red mouse" for i, _ in enumerate(waves)]


class Voices:
    """The first samples of a wave say whose voice it is."""

    def __init__(self, device):
        assert device == "cpu"

    def embed_all(self, waves, rates):
        assert len(waves) == len(rates) == 2
        return np.eye(256)[[int(abs(float(wave[0])) > 0.5) for wave in waves]]


@pytest.mark.parametrize("speakers", [2, 1, 3])
def test_words_and_voices_of_a_split(speakers, tmp_path, monkeypatch):
    """In a corpus of one speaker, as every LJSpeech folder is, there is nobody to be taken for:
    those shares are not there, and all else is. Of three speakers, two have one utterance, which
    would be spoken in its own voice: they are left out."""
    data = write_prepared(tmp_path / "data", train=2, dev=4, speakers=speakers)
    tiny_vocoder().save_pretrained(tmp_path / "vocoder")
    speaker = {row["id"]: row["speaker"] for row in load_prepared(data, "dev")}
    count = itertools.count()

    def recording(name: str) -> tuple[np.ndarray, int]:
        """s1 is low, s0 high; no two waves are the same."""
        low = speaker.get(name) == "s1"
        wave = harmonic((120.0 if low else 240.0) + next(count), 1.0)
        wave[0] = 0.9 if low else 0.1
        return wave, 16_000

    for name, stand_in in (
        ("load_recognizer", lambda name, device: Judge()),
        ("SpeakerEncoder", Voices),
        ("corpus_recordings", lambda data: recording),
    ):
        monkeypatch.setattr(f"eval.analysis.vocoder_quality.{name}", stand_in)
    if speakers == 2:
        monkeypatch.setattr(
            "eval.analysis.vocoder_quality._voices",
            lambda data: {"s0": np.eye(256)[0], "s1": np.eye(256)[1]},
        )
    result = run(
        VocoderQualityConfig(
            data=str(data),
            split="dev",
            vocoder=str(tmp_path / "vocoder"),
            device="cpu",
            batch_size=2,
            out=str(tmp_path / "out"),
        )
    )
    written = json.loads((tmp_path / "out" / "vocoder_quality.json").read_text())
    assert asdict(result).items() <= written.items()
    if speakers == 3:
        assert (result.n, result.voices, result.voices_of_corpus) == (2, 1, 3)
        return
    assert result.n == 4
    assert result.utterances[0].recording == Heard("a red mouse", 1)
    for kind in (result.recording, result.resynthesised):
        # one word of three in two of four utterances
        assert kind.wer == pytest.approx(2 / 12)
        assert np.isfinite(kind.similarity)
    if speakers == 2:
        assert result.recording.right_voice == 1.0 and "resynthesised" in table(result)
        return
    assert (result.voices, result.voices_of_corpus) == (1, 1)
    for kind in (result.recording, result.resynthesised):
        assert kind.right_voice is None and kind.right_voice_of_corpus is None
    assert table(result).count("–") == 2 * 2 + 2  # and two intervals
