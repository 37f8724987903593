"""The recogniser of speech tokens: likelihoods, alignments, batches, what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dcar.errors import CheckpointError, DataError, TextError
from dcar.prepare.prepared import load_prepared, prepared_info
from dcar.recognition import tokens
from dcar.recognition.base import ctc_collapse
from dcar.recognition.ctc import likelihood, viterbi
from dcar.recognition.load import load_token_recognizer
from dcar.recognition.tokens import TokenRecognizer, TokenRecognizerConfig
from dcar.sources.shipped import shipped
from dcar.tokens.origin import Origin, TokenizerInfo

ORIGIN = Origin(TokenizerInfo("tiny", "abc", 5, 50.0), "p1")


def tiny(seed: int = 0, **changes) -> TokenRecognizer:
    """Random, sharpened so that its distributions are far from uniform."""
    torch.manual_seed(seed)
    settings = dict(
        speech_vocab_size=5,
        text_vocab_size=3,
        hidden_size=8,
        dilations=(1, 2),
        tokenizer="tiny@abc",
        phonemes="p1",
    )
    model = TokenRecognizer(TokenRecognizerConfig(**{**settings, **changes})).eval()
    with torch.no_grad():
        model.output.weight.mul_(6)
    return model


def speech_of(count: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 5, rng.integers(1, longest)).tolist() for _ in range(count)]


def test_an_utterance_does_not_depend_on_its_batch(monkeypatch):
    model, speech = tiny(), speech_of(30)
    texts = [[1, 2, 1][: 1 + i % 3] for i in range(30)]
    alone = [model(torch.tensor([s]), torch.tensor([len(s)])).detach()[0] for s in speech]
    assert np.exp(torch.cat(alone).numpy()).sum(-1) == pytest.approx(1.0)
    together = model.log_likelihood(speech, texts)
    wanted = [likelihood(row, text, 0) / len(text) for row, text in zip(alone, texts, strict=True)]
    assert together == pytest.approx(wanted, abs=1e-5) and len(set(np.round(together, 4))) > 20
    for aligned, told, row, text in zip(
        model.align(speech, texts), together, alone, texts, strict=True
    ):
        assert aligned.log_likelihood == told and aligned.characters == len(text)
        costs, units = viterbi(row.numpy(), text, 0)
        assert (
            aligned.costs == pytest.approx(costs, rel=1e-5)
            and aligned.units.tolist() == units.tolist()
        )
    read = model.read(speech)
    monkeypatch.setattr(tokens, "BATCH_TOKENS", 50)
    assert model.log_likelihood(speech, texts) == pytest.approx(together, abs=1e-5)
    assert (
        model.read(speech) == read == [ctc_collapse(row.argmax(-1).tolist(), (0,)) for row in alone]
    )
    padded = model(torch.tensor([[1, 2, 3, 4, 4]]), torch.tensor([3])).detach()[0, :3]
    assert torch.allclose(
        padded, model(torch.tensor([[1, 2, 3]]), torch.tensor([3])).detach()[0], atol=1e-6
    )


def test_speech_without_tokens_has_no_likelihood():
    model = tiny()
    assert model.log_likelihood([[], [1, 2]], [[1], [1]])[0] == -np.inf
    [empty] = model.align([[]], [[1, 2]])
    assert np.isinf(empty.costs).all() and len(empty.costs) == 2 and len(empty.units) == 0
    assert model.read([[]]) == [[]] and model.read([]) == [] and model.log_likelihood([], []) == []


def test_phoneme_errors_by_hand(monkeypatch):
    model = tiny()
    monkeypatch.setattr(model, "read", lambda speech: [[1, 2, 2], [], [12, 1]])
    found = model.error_rate([[0]] * 3, [[1, 2], [2, 1], [1, 2, 1]])
    # one inserted; two deleted; 12 is one id, not two: substituted, and one deleted
    assert found.wer == pytest.approx((1 + 2 + 2) / 7)
    assert (found.substitutions, found.deletions, found.insertions) == (1, 3, 1)


def test_what_cannot_be_read_is_refused():
    model = tiny()
    for speech, text, error, words in (
        ([[1, 5]], [[1]], DataError, "speech token 5"),
        ([[1, -1]], [[1]], DataError, "speech token -1"),
        ([[1, 1]], [[3]], DataError, "text id 3.* 1 to 2"),
        ([[1, 1]], [[0]], DataError, "text id 0"),
        ([[1, 1]], [[]], TextError, "phonemes"),
    ):
        for ask in (model.log_likelihood, model.align):
            with pytest.raises(error, match=words):
                ask(speech, text)
    model.check_reads(ORIGIN, "here")
    tokenizer = ORIGIN.tokenizer
    for change, message in (
        ({"tokenizer": replace(tokenizer, checksum="xyz")}, "tiny@xyz.*tiny@abc"),
        ({"tokenizer": replace(tokenizer, vocab_size=6)}, "has tokens"),
        ({"phonemes": "text-tokenizer:x"}, "text-tokenizer:x.*p1"),
        ({"phonemes": "p2"}, "p2.*p1.*dcar train-recognizer"),
    ):
        with pytest.raises(CheckpointError, match=f"here: .*{message}"):
            model.check_reads(replace(ORIGIN, **change), "here")


def test_a_folder_holds_it_whole(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "a")
    again = load_token_recognizer(str(tmp_path / "a"))
    assert (
        again.checksum() == model.checksum() and again.config == model.config and not again.training
    )
    assert again.log_likelihood([[1, 2, 3]], [[1]]) == model.log_likelihood([[1, 2, 3]], [[1]])
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model.safetensors: "):
        load_token_recognizer(str(tmp_path / "a"))


def test_the_shipped_one_reads_the_shipped_corpus():
    """Development sentences, and the same tokens with another text."""
    model = load_token_recognizer("starter")
    model.check_reads(prepared_info(shipped("prepared")), "the shipped corpus")
    rows = load_prepared(shipped("prepared"), "dev").select(range(12))
    speech, texts = list(rows["speech"]), list(rows["text_ids"])
    assert model.error_rate(speech, texts).wer < 0.15
    own = model.log_likelihood(speech, texts)
    other = model.log_likelihood(speech, [*texts[1:], texts[0]])
    assert min(own) > -0.8 and max(other) < -1
