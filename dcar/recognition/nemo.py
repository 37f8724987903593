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
from dcar.recognition.base import sorted_batches
from dcar.recognition.ctc import CTCRecognizer, spelled
from dcar.sources.packages import pip_extra

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
        raise AssetError(f"{who} needs NeMo ({error}); run: {pip_extra('nemo')}") from error


def restore_nemo(source: str | Path, device: str = "cpu") -> tuple[Any, str]:
    """(model, short name) of a `.nemo` file or of a pretrained model that NeMo can download; AssetError otherwise."""
    path = Path(source)
    is_file = path.suffix == ".nemo" or path.exists()
    if is_file and not path.is_file():
        raise AssetError(f"{path}: no such recogniser; give a file that is there, or the name of a published model")
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


def text_symbols(model: Any, text: str) -> list[int]:
    """The ids of a text in a model's vocabulary, subwords or characters. TextError for characters it does not have."""
    if (subwords := getattr(model, "tokenizer", None)) is not None:
        return [int(i) for i in subwords.text_to_ids(text)]
    vocabulary = model.joint.vocabulary if hasattr(model, "joint") else model.decoder.vocabulary
    return spelled(text, [str(symbol) for symbol in vocabulary], type(model).__name__)


def frame_seconds(model: Any) -> float:
    """Seconds of one output frame of a CTC model of characters, which needs a frame for each; 0 for other models."""
    if hasattr(model, "joint") or getattr(model, "tokenizer", None) is not None:
        return 0.0
    return float(model.cfg.preprocessor.window_stride * getattr(model.encoder, "subsampling_factor", 1))


def evaluating(model: Any, device: str) -> Any:
    """The model as NeMo's own transcribe() runs it: no dither and no extra padding, so that results repeat."""
    model = model.to(device).eval()
    model.preprocessor.featurizer.dither = 0.0
    model.preprocessor.featurizer.pad_to = 0
    return model


class NemoCTCRecognizer(CTCRecognizer):
    """A NeMo CTC model (characters or subwords), in batches of similar length."""

    def __init__(self, model: Any, name: str, device: str = "cpu", batch_seconds: float = 20.0) -> None:
        """`model`: an `EncDecCTCModel`; it is put in evaluation mode and moved to `device`. `batch_seconds` bounds the
        padded audio of one batch."""
        self.name, self.device, self.batch_seconds = f"nemo-ctc:{name}", device, batch_seconds
        self._model = evaluating(model, device)
        self._vocabulary = [str(symbol) for symbol in model.decoder.vocabulary]
        self.blank = len(self._vocabulary)
        self._subwords = getattr(model, "tokenizer", None)

    def _log_probs(self, waves: list[np.ndarray], sample_rate: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(index, log-probabilities [frames, symbols + 1]) of every waveform, in order of length."""
        import torch

        for indices, batch, lengths in sorted_batches(waves, sample_rate, self.batch_seconds):
            with torch.inference_mode():
                log_probs, frames, _ = self._model(
                    input_signal=batch.to(self.device), input_signal_length=lengths.to(self.device))
            for row, index in enumerate(indices):
                yield index, log_probs[row, : int(frames[row])].cpu()

    def spell(self, symbols: list[int]) -> str:
        if self._subwords is not None:
            return str(self._subwords.ids_to_text(symbols)).strip()
        return " ".join("".join(self._vocabulary[i] for i in symbols).split())

    def symbols(self, text: str) -> list[int]:
        return text_symbols(self._model, text)


class NemoTransducerRecognizer:
    """A NeMo transducer (RNN-T, TDT, or the transducer of a hybrid model), greedy, in batches of similar length."""

    def __init__(self, model: Any, name: str, device: str = "cpu", batch_seconds: float = 20.0) -> None:
        """`model`: an `EncDecRNNTModel`; it is put in evaluation mode and moved to `device`."""
        self.name, self.device, self.batch_seconds = f"nemo-transducer:{name}", device, batch_seconds
        self._model = evaluating(model, device)

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`."""
        import torch

        texts = [""] * len(waves)
        for indices, batch, lengths in sorted_batches(waves, sample_rate, self.batch_seconds):
            with torch.inference_mode(), quiet_nemo():
                encoded, frames = self._model(
                    input_signal=batch.to(self.device), input_signal_length=lengths.to(self.device))
                found = self._model.decoding.rnnt_decoder_predictions_tensor(
                    encoder_output=encoded, encoded_lengths=frames, return_hypotheses=False)
            for index, hypothesis in zip(indices, found, strict=True):
                texts[index] = str(getattr(hypothesis, "text", hypothesis)).strip()
        return texts


def recognizer_of(model: Any, name: str, device: str = "cpu") -> NemoCTCRecognizer | NemoTransducerRecognizer:
    """The recogniser of a model in memory, by what it is. AssetError for anything but CTC and transducers."""
    models = nemo_models(name)
    if isinstance(model, models.EncDecCTCModel):
        return NemoCTCRecognizer(model, name, device)
    if isinstance(model, models.EncDecRNNTModel):
        return NemoTransducerRecognizer(model, name, device)
    raise AssetError(f"{name}: is a {type(model).__name__}; a CTC or transducer model of NeMo is needed")


def load_nemo(source: str | Path, device: str = "cpu") -> NemoCTCRecognizer | NemoTransducerRecognizer:
    """The recogniser in a `.nemo` file or under a name that NeMo can download. AssetError for anything but ASR."""
    return recognizer_of(*restore_nemo(source, device), device)
