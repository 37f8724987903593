"""NeMo recognisers of either family: CTC, and transducers such as stt_en_fastconformer_transducer_large.

NeMo reads the weights in a `.nemo` file with `torch.load`, which unpickles nothing but tensors (since torch 2.6). Its
import takes 11 to 18 seconds, so it is imported where it is used.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import tarfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dcar.errors import AssetError
from dcar.recognition.base import Recognizer, sorted_batches
from dcar.recognition.ctc import CTCRecognizer, spelled

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def _tar_filters() -> Iterator[None]:
    """NeMo unpacks `.nemo` files with `TarFile.extract(…, filter=…)`, which Python knows from 3.11.4 on; Debian 12 has
    3.11.2. There the keyword is accepted and the same kind of check is made: plain files and folders, inside only."""
    if hasattr(tarfile, "data_filter"):
        yield
        return
    extract, extractall = tarfile.TarFile.extract, tarfile.TarFile.extractall

    def check(member: tarfile.TarInfo) -> None:
        inside = not Path(member.name).is_absolute() and ".." not in Path(member.name).parts
        if not inside or not (member.isreg() or member.isdir()):
            raise tarfile.ExtractError(f"{member.name}: not a plain file inside the archive")

    def checked_extract(self: Any, member: Any, *rest: Any, filter: Any = None, **options: Any) -> None:
        check(self.getmember(member) if isinstance(member, str) else member)
        extract(self, member, *rest, **options)

    def checked_extractall(self: Any, *rest: Any, filter: Any = None, **options: Any) -> None:
        for member in self.getmembers():
            check(member)
        extractall(self, *rest, **options)

    tarfile.TarFile.extract, tarfile.TarFile.extractall = checked_extract, checked_extractall  # type: ignore
    try:
        yield
    finally:
        tarfile.TarFile.extract, tarfile.TarFile.extractall = extract, extractall  # type: ignore


_quiet_lock, _quiet = threading.Lock(), contextlib.ExitStack()
_quiet_threads = 0  # how many are inside `quiet_nemo`: what it changes belongs to the process


@contextlib.contextmanager
def quiet_nemo() -> Iterator[None]:
    """Import and build NeMo models without its banners: only errors of NeMo and Lightning are logged inside. Threads
    may be inside together; the last one that leaves puts everything back."""
    global _quiet_threads
    with _quiet_lock:
        _quiet_threads += 1
        if _quiet_threads == 1:
            _silence(_quiet)
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_threads -= 1
            if _quiet_threads == 0:
                _quiet.close()


def _silence(until: contextlib.ExitStack) -> None:
    until.callback(logging.disable, logging.root.manager.disable)
    logging.disable(logging.WARNING)
    for name in ("nemo_logger", "nv_one_logger", "lightning", "pytorch_lightning", "lightning.pytorch"):
        until.callback(logging.getLogger(name).setLevel, logging.getLogger(name).level)
    until.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    until.enter_context(_tar_filters())


def nemo_models(who: str) -> Any:
    """The module nemo.collections.asr.models; where it is missing, AssetError: who needs it, and how to get it."""
    try:
        return importlib.import_module("nemo.collections.asr.models")
    except ImportError as error:
        raise AssetError(f"{who} needs NeMo ({error}); run: pip install 'dcar[nemo]' (from a checkout: pip install "
                         "'.[nemo]')") from error


def restore_nemo(source: str | Path, device: str = "cpu") -> tuple[Any, str]:
    """(model, short name) of a `.nemo` file or of a pretrained model that NeMo can download; AssetError otherwise."""
    path = Path(source)
    is_file = path.suffix == ".nemo" or path.exists()
    if is_file and not path.is_file():
        raise AssetError(f"{path}: no such recogniser; train one with `dcar train-recognizer` or give its name")
    with quiet_nemo():
        models = nemo_models(f"the recogniser {source}")
        try:
            if is_file:
                model = models.ASRModel.restore_from(str(path), map_location=device)
            else:
                model = models.ASRModel.from_pretrained(str(source), map_location=device)
        except Exception as error:  # NeMo raises whatever tarfile, OmegaConf, torch or the hub raised
            raise AssetError(
                f"{source}: NeMo cannot restore it ({type(error).__name__}: {error}); check the file or the name"
                    + ("" if is_file else "; without network, get the .nemo file elsewhere and give nemo:FILE.nemo")
            ) from error
    return model, path.stem if is_file else str(source)


class NemoCTCRecognizer(CTCRecognizer):
    """A NeMo CTC model (characters or BPE), restored through NeMo's own API, in batches made by length."""

    def __init__(self, source: str | Path, device: str = "cpu", batch_seconds: float = 20.0) -> None:
        """`source`: a `.nemo` file, or the name of a pretrained model that NeMo can download.

        `batch_seconds` bounds the padded audio of one batch. Raises AssetError if the file is missing or holds
        something else than a CTC model.
        """
        model, name = restore_nemo(source, device)
        if not isinstance(model, nemo_models(str(source)).EncDecCTCModel):
            raise AssetError(f"{source}: is a {type(model).__name__}; a CTC model (EncDecCTCModel[BPE]) is needed")
        self._adopt(model, f"nemo-ctc:{name}", device, batch_seconds)

    @classmethod
    def from_model(cls, model: Any, name: str, device: str = "cpu", batch_seconds: float = 20.0) -> NemoCTCRecognizer:
        """Wrap an `EncDecCTCModel` that is in memory; it is put in evaluation mode and moved to `device`."""
        recognizer = cls.__new__(cls)
        recognizer._adopt(model, name, device, batch_seconds)
        return recognizer

    def _adopt(self, model: Any, name: str, device: str, batch_seconds: float) -> None:
        self.name = name
        self.device = device
        self.batch_seconds = batch_seconds
        self._model: Any = model.to(device).eval()
        # As NeMo's own transcribe(): no dither and no extra padding, so that results are reproducible.
        self._model.preprocessor.featurizer.dither = 0.0
        self._model.preprocessor.featurizer.pad_to = 0
        self._vocabulary = [str(symbol) for symbol in self._model.decoder.vocabulary]
        self.blank = len(self._vocabulary)
        self._subwords = getattr(self._model, "tokenizer", None)

    def _log_probs(self, waves: list[np.ndarray], sample_rate: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(index, log-probabilities [frames, symbols + 1]) of every waveform, in order of length."""
        import torch

        for indices, batch, lengths in sorted_batches(waves, sample_rate, self.batch_seconds):
            with torch.inference_mode():
                log_probs, frames, _ = self._model(
                    input_signal=batch.to(self.device), input_signal_length=lengths.to(self.device)
                )
            for row, index in enumerate(indices):
                yield index, log_probs[row, : int(frames[row])].cpu()

    def spell(self, symbols: list[int]) -> str:
        if self._subwords is not None:
            return str(self._subwords.ids_to_text(symbols)).strip()
        return " ".join("".join(self._vocabulary[i] for i in symbols).split())

    def symbols(self, text: str) -> list[int]:
        if self._subwords is not None:
            return [int(i) for i in self._subwords.text_to_ids(text)]
        return spelled(text, self._vocabulary, self.name)


class NemoTransducerRecognizer:
    """A NeMo transducer (RNN-T, TDT, or the transducer of a hybrid model), greedy, in batches of similar length."""

    def __init__(self, model: Any, name: str, device: str = "cpu", batch_seconds: float = 20.0) -> None:
        """`model`: an `EncDecRNNTModel`; it is put in evaluation mode and moved to `device`."""
        self.name, self.device, self.batch_seconds = f"nemo-transducer:{name}", device, batch_seconds
        self._model = model.to(device).eval()
        # as NeMo's own transcribe(): no dither and no extra padding, so that results are reproducible
        self._model.preprocessor.featurizer.dither = 0.0
        self._model.preprocessor.featurizer.pad_to = 0

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`."""
        import torch

        texts = [""] * len(waves)
        for indices, batch, lengths in sorted_batches(waves, sample_rate, self.batch_seconds):
            with torch.inference_mode(), quiet_nemo():
                encoded, frames = self._model(
                    input_signal=batch.to(self.device), input_signal_length=lengths.to(self.device)
                )
                found = self._model.decoding.rnnt_decoder_predictions_tensor(
                    encoder_output=encoded, encoded_lengths=frames, return_hypotheses=False
                )
            for index, hypothesis in zip(indices, found, strict=True):
                texts[index] = str(getattr(hypothesis, "text", hypothesis)).strip()
        return texts


def load_nemo(source: str | Path, device: str = "cpu") -> Recognizer:
    """The recogniser in a `.nemo` file or under a NeMo name, by what it is. AssetError for anything but ASR."""
    model, name = restore_nemo(source, device)
    models = nemo_models(str(source))
    if isinstance(model, models.EncDecCTCModel):
        return NemoCTCRecognizer.from_model(model, f"nemo-ctc:{name}", device)
    if isinstance(model, models.EncDecRNNTModel):
        return NemoTransducerRecognizer(model, name, device)
    raise AssetError(f"{source}: is a {type(model).__name__}; a CTC or transducer model of NeMo is needed")
