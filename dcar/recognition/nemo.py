"""NeMo recognisers of both families: CTC, and transducers such as
stt_en_fastconformer_transducer_large.

NeMo reads the weights in a `.nemo` file with `torch.load`, which unpickles nothing but tensors
(since torch 2.6). Importing NeMo takes 11 to 18 seconds, so it is imported only on use.
"""

import contextlib
import importlib
import logging
import platform
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.errors import AssetError
from dcar.recognition.base import batches, in_windows, to_recognizer_rate
from dcar.recognition.ctc import CTCRecognizer, spelled
from dcar.sources.hub import identified
from dcar.sources.packages import pip_extra
from dcar.text.languages import language_of
from heads.checkpoint import tensors_checksum

CPU_BATCH_SECONDS = 20.0
"""Padded audio in one batch on a CPU, in seconds."""


@contextlib.contextmanager
def quiet_nemo() -> Iterator[None]:
    """Import and build NeMo models without its banners: only errors are logged inside. Must not
    be used by several threads, because it changes state of the process."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Nemo:
    """NeMo model, run on batches of waveforms of similar length."""

    kind: str

    def __init__(self, model: Any, name: str, device: str) -> None:
        """Put `model` in evaluation mode and move it to `device`."""
        self.name, self.device = f"{self.kind}:{name}", device
        self._model = model.to(device).eval()
        # as in NeMo's own transcribe(): no dither and no extra padding, so that results repeat
        model.preprocessor.featurizer.dither = 0.0
        model.preprocessor.featurizer.pad_to = 0

    def _outputs(
        self, waves: list[np.ndarray], sample_rate: int
    ) -> Iterator[tuple[list[int], Any]]:
        """Yield (indices, outputs of the model) for batches of waveforms, in order of length."""
        ready = [to_recognizer_rate(wave, sample_rate) for wave in waves]
        for indices in batches(ready, self.device, CPU_BATCH_SECONDS):
            rows = [torch.from_numpy(ready[i]) for i in indices]
            with torch.inference_mode():
                outputs = self._model(
                    input_signal=pad_sequence(rows, batch_first=True).to(self.device),
                    input_signal_length=torch.tensor(
                        [len(row) for row in rows], device=self.device
                    ),
                )
            yield indices, outputs


class NemoCTCRecognizer(_Nemo, CTCRecognizer):
    """NeMo's `EncDecCTCModel`, of characters or subwords."""

    kind = "nemo-ctc"

    def __init__(self, model: Any, name: str, device: str) -> None:
        super().__init__(model, name, device)
        self._vocabulary = [str(symbol) for symbol in model.decoder.vocabulary]
        self.blank = len(self._vocabulary)
        self._subwords = getattr(model, "tokenizer", None)

    def _log_probs(
        self, waves: list[np.ndarray], sample_rate: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        for indices, (log_probs, frames, _) in self._outputs(waves, sample_rate):
            on_cpu, counts = log_probs.cpu(), frames.tolist()
            for row, index in enumerate(indices):
                yield index, on_cpu[row, : counts[row]]

    @property
    def alphabet(self) -> list[str]:
        return [] if self._subwords is not None else self._vocabulary

    def unknown(self, text: str) -> set[str]:
        if self._subwords is None:
            return super().unknown(text)
        of = self._subwords.text_to_ids
        strange = of("\ue000")  # a private character, which becomes the unknown subword
        return {c for c in language_of(self.language).words(text) if of(c) == strange}

    def spell(self, symbols: list[int]) -> str:
        if self._subwords is not None:
            return str(self._subwords.ids_to_text(symbols)).strip()
        return " ".join("".join(self._vocabulary[i] for i in symbols).split())

    def symbols(self, text: str) -> list[int]:
        if self._subwords is not None:
            return [int(i) for i in self._subwords.text_to_ids(text)]
        return spelled(text, self._vocabulary, self.name)


class NemoTransducerRecognizer(_Nemo):
    """NeMo's `EncDecRNNTModel` (RNN-T, TDT, or the transducer of a hybrid model), greedy."""

    kind = "nemo-transducer"

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`."""
        return in_windows(self._read, waves, sample_rate)

    def _read(self, windows: list[np.ndarray]) -> list[str]:
        texts = [""] * len(windows)
        with torch.inference_mode():
            for indices, (encoded, frames) in self._outputs(windows, ENCODER_SAMPLE_RATE):
                hypotheses = self._model.decoding.rnnt_decoder_predictions_tensor(
                    encoder_output=encoded, encoded_lengths=frames, return_hypotheses=False
                )
                for index, hypothesis in zip(indices, hypotheses, strict=True):
                    texts[index] = str(getattr(hypothesis, "text", hypothesis)).strip()
        return texts


def load_nemo(
    source: str | Path, device: str = "cpu"
) -> NemoCTCRecognizer | NemoTransducerRecognizer:
    """Load the recogniser in a `.nemo` file or under a name that NeMo can download.

    Raises AssetError if NeMo is missing or Python is older than 3.11.4, or if the model cannot be
    restored or is neither CTC nor a transducer.
    """
    path = Path(source)
    is_file = path.suffix.lower() == ".nemo" or path.exists()
    if is_file and not path.is_file():
        raise AssetError(
            f"{path}: no such file; give an existing .nemo file, or the name of a published model"
        )
    if sys.version_info < (3, 11, 4):
        raise AssetError(
            f"the recogniser {source}: NeMo unpacks models with filters of tarfile, which need "
            f"Python 3.11.4 or newer, not {platform.python_version()}; use a newer Python, or a "
            "recogniser that is not NeMo's"
        )
    with quiet_nemo():
        try:
            models = importlib.import_module("nemo.collections.asr.models")
        except ImportError as error:
            raise AssetError(
                f"the recogniser {source} needs NeMo ({error}); run: {pip_extra('nemo')}"
            ) from error
        try:
            restore = models.ASRModel.restore_from if is_file else models.ASRModel.from_pretrained
            model = restore(str(source), map_location=device)
        except Exception as error:
            # NeMo passes on the errors of tarfile, OmegaConf, torch and the hub
            remedy = "check the file"
            if not is_file:
                remedy = (
                    "check the name; without network, copy the .nemo file from another machine "
                    "and give nemo:FILE.nemo"
                )
            raise AssetError(
                f"{source}: NeMo cannot restore it ({type(error).__name__}: {error}); {remedy}"
            ) from error
    name = identified(path.stem if is_file else str(source), source)
    if "@" not in name:  # from NVIDIA's catalogue, which has no commits
        name = f"{name}@{tensors_checksum(model.state_dict())[:8]}"
    if isinstance(model, models.EncDecCTCModel):
        return NemoCTCRecognizer(model, name, device)
    if isinstance(model, models.EncDecRNNTModel):
        return NemoTransducerRecognizer(model, name, device)
    raise AssetError(f"{name}: is a {type(model).__name__}; give a CTC or transducer model of NeMo")
