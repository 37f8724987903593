"""Recognisers of NeMo, CTC and transducer, on tiny models that are built from configs and saved
by NeMo."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_nemo import save_ctc, save_transducer
from tones import noise

from dcar.errors import AssetError, AudioError
from dcar.recognition.base import Recognizer
from dcar.recognition.ctc import viterbi
from dcar.recognition.encoder import CHARACTERS
from dcar.recognition.load import load_recognizer
from dcar.recognition.nemo import NemoCTCRecognizer, NemoTransducerRecognizer, quiet_nemo

RATE = 16_000
pytestmark = pytest.mark.needs("nemo")


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """The file of a tiny CTC model."""
    return save_ctc(tmp_path_factory.mktemp("published") / "first.nemo")


@pytest.fixture(scope="module")
def nemo(published) -> NemoCTCRecognizer:
    recognizer = load_recognizer(f"nemo:{published}")
    assert isinstance(recognizer, NemoCTCRecognizer) and recognizer.name.startswith(
        "nemo-ctc:first@"
    )
    return recognizer


@pytest.fixture(scope="module")
def transducer(tmp_path_factory) -> NemoTransducerRecognizer:
    recognizer = load_recognizer(
        f"nemo:{save_transducer(tmp_path_factory.mktemp('nemo') / 'rnnt.nemo')}"
    )
    assert isinstance(recognizer, NemoTransducerRecognizer)
    return recognizer


def test_a_model_of_the_catalogue_is_identified_by_its_weights(published, tmp_path, monkeypatch):
    with quiet_nemo():
        from nemo.collections.asr.models import ASRModel

        other = ASRModel.restore_from(str(published), map_location="cpu")
        torch.nn.init.ones_(next(other.parameters()))
        other.save_to(str(tmp_path / "other.nemo"))
    names = []
    for file in (published, published, tmp_path / "other.nemo"):
        monkeypatch.setattr(
            ASRModel,
            "from_pretrained",
            lambda name, map_location, file=file: ASRModel.restore_from(
                str(file), map_location=map_location
            ),
        )
        names.append(load_recognizer("nemo:stt_en_toy").name)
    assert names[0].startswith("nemo-ctc:stt_en_toy@") and names[0] == names[1] != names[2]


def test_ctc_equals_the_pass_and_the_loss_of_nemo(published, nemo):
    with quiet_nemo():
        from nemo.collections.asr.models import ASRModel

        model = ASRModel.restore_from(str(published), map_location="cpu").eval()
    model.preprocessor.featurizer.dither, model.preprocessor.featurizer.pad_to = 0.0, 0
    waves = [noise(s, i) for i, s in enumerate((0.9, 1.4))]
    texts = ["a boat", "it's grey"]
    blank = len(CHARACTERS)
    heard = nemo.transcribe(waves, RATE)
    for wave, text, transcript, score in zip(
        waves, texts, heard, nemo.log_likelihood(waves, RATE, texts), strict=True
    ):
        with torch.no_grad():
            log_probs, frames, best = model(
                input_signal=torch.from_numpy(wave)[None],
                input_signal_length=torch.tensor([len(wave)]),
            )
            loss = model.loss(
                log_probs=log_probs,
                input_lengths=frames,
                target_lengths=torch.tensor([len(text)]),
                targets=torch.tensor([[CHARACTERS.index(c) for c in text]]),
            )
        path = best[0, : int(frames[0])].tolist()
        kept = [s for i, s in enumerate(path) if s != blank and (i == 0 or s != path[i - 1])]
        assert transcript == " ".join("".join(CHARACTERS[s] for s in kept).split())
        assert score * len(text) == pytest.approx(-float(loss), rel=1e-4)
    assert all(heard)  # the test would say nothing if nothing were transcribed


def test_alignments_are_those_of_nemo():
    with quiet_nemo():
        from nemo.collections.asr.parts.utils.aligner_utils import viterbi_decoding
    rng, blank = np.random.default_rng(0), len(CHARACTERS)
    for seed, (frames, length) in enumerate([(60, 20), (90, 35), (60, 45)]):
        logits = torch.randn(frames, blank + 1, generator=torch.Generator().manual_seed(seed))
        log_probs, target = torch.log_softmax(2 * logits, -1), rng.integers(0, blank, length)
        states = torch.full((1, 2 * length + 1), blank)
        states[0, 1::2] = torch.from_numpy(target)
        [path] = viterbi_decoding(
            log_probs[None],
            states,
            torch.tensor([frames]),
            torch.tensor([2 * length + 1]),
            torch.device("cpu"),
        )
        _, units = viterbi(log_probs.numpy(), target, blank)
        assert units.tolist() == (np.maximum(np.array(path) - 1, 0) // 2).tolist()


def slow_greedy(model: Any, wave: np.ndarray, max_symbols: int) -> str:
    """Greedy transducer search by its definition: frame by frame, symbol by symbol."""
    blank, labels = len(model.joint.vocabulary), model.joint.vocabulary
    with torch.no_grad():
        encoded, frames = model(
            input_signal=torch.from_numpy(wave)[None], input_signal_length=torch.tensor([len(wave)])
        )
        out: list[int] = []
        state, last = None, None
        for t in range(int(frames[0])):
            for _ in range(max_symbols):
                label = None if last is None else torch.tensor([[last]])
                g, next_state = model.decoder.predict(label, state, add_sos=False, batch_size=1)
                logits = model.joint.joint(encoded[:, :, t : t + 1].transpose(1, 2), g)
                symbol = int(logits[0, 0, 0].argmax())
                if symbol == blank:
                    break
                out.append(symbol)
                state, last = next_state, symbol
    return "".join(labels[i] for i in out).strip()


def test_transducer_equals_greedy_search_by_definition(transducer):
    assert isinstance(transducer, Recognizer) and transducer.name.startswith(
        "nemo-transducer:rnnt@"
    )
    waves = [noise(s, i) for i, s in enumerate((0.6, 1.5, 0.9))]
    texts = transducer.transcribe(waves, RATE)
    assert texts == [slow_greedy(transducer._model, w, 3) for w in waves]
    assert len(set(texts)) > 1 and all(texts)  # the test would say nothing if nothing were heard
    assert (
        transducer.transcribe([], RATE) == []
        and len(transducer.transcribe([noise(0.5, 1, 24_000)], 24_000)) == 1
    )
    with pytest.raises(AudioError):
        transducer.transcribe([np.zeros(0, np.float32)], RATE)


def test_missing_or_broken_models_name_the_way_out(tmp_path):
    (tmp_path / "broken.nemo").write_bytes(b"not a tar file")
    for name, message in (
        (f"nemo:{tmp_path / 'absent.nemo'}", "absent.nemo: "),
        (f"nemo:{tmp_path / 'broken.nemo'}", "broken.nemo: "),
        ("siri", "'siri'.*moonshine"),
    ):
        with pytest.raises(AssetError, match=message):
            load_recognizer(name)
