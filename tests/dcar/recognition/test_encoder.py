"""The recogniser on a frozen encoder's states: likelihoods, waveforms of any length and rate,
what it refuses, and the one that ships."""

import json

import numpy as np
import pytest
import torch
from fake_gpu import fake_gpu
from tones import noise

from dcar.corpus.read import load_corpus
from dcar.errors import AssetError, AudioError, CheckpointError, TextError
from dcar.recognition import encoder
from dcar.recognition.base import ctc_collapse
from dcar.recognition.ctc import likelihood, viterbi
from dcar.recognition.encoder import (
    EncoderRecognizer,
    EncoderRecognizerConfig,
    encoder_states,
    state_count,
)
from dcar.recognition.load import load_recognizer
from dcar.text.wer import corpus_wer, word_errors
from dcar.tokens.whisper import WhisperEncoder
from dcar.tokens.whisper_states import _mel_filters, shared_states
from dcar.vocoder.resynthesize import ResynthesizeConfig, run

RATE = 16_000


def tiny(seed: int = 0, alphabet: str = " ab") -> EncoderRecognizer:
    """Random, sharpened so that its distributions are far from uniform."""
    torch.manual_seed(seed)
    model = EncoderRecognizer(
        EncoderRecognizerConfig(hidden_size=8, dilations=(1, 2), alphabet=alphabet)
    ).eval()
    with torch.no_grad():
        model.output.weight.mul_(6)
    return model


@pytest.mark.parametrize("text", ["a b", "aa"])
def test_texts_are_told_by_what_it_makes_of_the_states(text):
    model, wave = tiny(), noise(0.12)  # six states
    states = encoder_states(WhisperEncoder(), [wave], RATE)[0]
    assert states.shape == (6, 512) and state_count(len(wave)) == 6
    probs = model(states[None], torch.tensor([6]))[0].detach()
    assert np.exp(probs.numpy()).sum(-1) == pytest.approx(1.0)
    symbols = [1 + " ab".index(c) for c in text]
    [told] = model.log_likelihood([wave], RATE, [text])
    assert told * len(text) == pytest.approx(likelihood(probs, symbols, 0), rel=1e-4)
    [alignment] = model.align([wave], RATE, [text.title() + "!"])  # as the words are spoken
    assert alignment.costs == pytest.approx(viterbi(probs.numpy(), symbols, 0)[0], rel=1e-4)
    assert alignment.log_likelihood == told and alignment.characters == len(text)
    best = "".join(" ab"[s - 1] for s in ctc_collapse(probs.argmax(-1).tolist(), (0,)))
    assert model.transcribe([wave], RATE) == [alignment.transcript] == [" ".join(best.split())]


def test_a_waveform_says_much_the_same_at_another_rate():
    model, tone = tiny(1), np.sin(np.arange(24_000) * 0.05).astype(np.float32)
    [low] = model.log_likelihood([tone[::2]], RATE // 2, ["ab"])
    [high] = model.log_likelihood([tone], RATE, ["ab"])
    assert low == pytest.approx(high, rel=0.05)


def test_what_is_longer_than_the_encoder_hears_is_heard_in_pieces(monkeypatch):
    whisper, wave = WhisperEncoder(), noise(3.5, 3)
    [whole] = encoder_states(whisper, [wave], RATE)
    monkeypatch.setattr(encoder, "PIECE_SECONDS", 2)
    states, short = encoder_states(whisper, [wave, wave[:8000]], RATE)
    assert len(states) == state_count(len(wave)) == 175 and len(short) == 25
    assert np.array_equal(
        states, np.concatenate(whisper.batch([wave[:32_000], wave[32_000:]], RATE))
    )
    assert not torch.equal(states, whole)


def test_batches_on_a_gpu_give_what_single_waveforms_give_on_the_cpu(monkeypatch):
    model, waves = tiny(4), [noise(0.7, 1), noise(0.3, 2), np.zeros(10, np.float32), noise(0.7, 3)]
    alone = dict(model._log_probs(waves, RATE))
    texts = model.transcribe(waves, RATE)
    with fake_gpu(monkeypatch) as device:
        model.to(device)
        together = dict(model._log_probs(waves, RATE))
        assert model.transcribe(waves, RATE) == texts
    shared_states.cache_clear()
    _mel_filters.cache_clear()
    for i in range(len(waves)):
        torch.testing.assert_close(together[i], alone[i], atol=1e-3, rtol=1e-3)


def test_what_cannot_be_heard_or_spelled_is_refused():
    model = tiny()
    for broken in (np.zeros(0, np.float32), np.full(400, np.nan, np.float32)):
        with pytest.raises(AudioError):
            model.transcribe([broken], RATE)
    with pytest.raises(TextError, match=r"\['c'\]"):
        model.log_likelihood([noise(0.2)], RATE, ["abc"])
    with pytest.raises(TextError, match="log_likelihood: "):
        model.align([noise(0.2)], RATE, ["…"])
    assert model.log_likelihood([noise(0.1)], RATE, ["abababab"]) == [-np.inf]  # five states


def test_a_folder_holds_it_whole_and_another_encoder_is_refused(tmp_path):
    model = tiny(2)
    model.save_pretrained(tmp_path / "ear")
    again = load_recognizer(f"encoder:{tmp_path / 'ear'}")
    # what is kept by the name is of these weights
    assert again.name == f"encoder-ctc:ear@{model.checksum()[:8]}"
    wave = noise(0.5)
    assert again.log_likelihood([wave], RATE, ["ab"]) == model.log_likelihood([wave], RATE, ["ab"])
    settings = json.loads((tmp_path / "ear/config.json").read_text())
    (tmp_path / "ear/config.json").write_text(
        json.dumps(settings | {"encoder": "whisper-large 123 tail=0.5"})
    )
    with pytest.raises(CheckpointError, match=r"config.json: .*whisper-large.*whisper-base"):
        load_recognizer(f"encoder:{tmp_path / 'ear'}")
    with pytest.raises(CheckpointError, match="config.json"):
        load_recognizer(f"encoder:{tmp_path / 'absent'}")
    with pytest.raises(AssetError, match="encoder:…"):
        load_recognizer("encoder:")


def test_the_shipped_one_hears_what_the_shipped_vocoder_says(tmp_path, monkeypatch):
    said = load_corpus(
        "jsonl", run(ResynthesizeConfig("starter", "dev", limit=16, out=str(tmp_path)))
    )
    waves, texts, rate = [u.load()[0] for u in said], [u.text for u in said], said[0].load()[1]
    recognizer = load_recognizer("starter")
    assert recognizer.name.startswith("encoder-ctc:starter@")
    heard = list(recognizer._log_probs(waves, rate))  # once for all three questions
    monkeypatch.setattr(recognizer, "_log_probs", lambda waves, rate: iter(heard))
    errors = map(word_errors, texts, recognizer.transcribe(waves, rate))
    assert corpus_wer(list(errors)).wer < 0.35
    own, others = (
        recognizer.log_likelihood(waves, rate, said) for said in (texts, texts[1:] + texts[:1])
    )
    assert min(own) > -1.5 and max(others) < -3  # nats a character
