"""Recognisers behind one interface: moonshine (the judge), whisper-base (second opinion), NeMo CTC (the reward).

More are in `recognizers_nemo`, `recognizers_hf` and `recognizers_http`; `load_recognizer` finds them all.

All take float32 mono waveforms at any sample rate and return plain text, "" where they hear nothing. A waveform that
is empty or not finite is an AudioError. Whisper's encoder makes the speech tokens, so Whisper never judges alone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import tarfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from dcar.audio import resample
from dcar.errors import AssetError, TextError
from dcar.packages import moonshine_files, whisper_base_dir
from dcar.tokenizers import check_waveform
from dcar.wer import spoken_words

if TYPE_CHECKING:
    import torch

SAMPLE_RATE = 16_000
SHIPPED_RECOGNIZER = Path(__file__).parent / "assets" / "recognizer" / "starter.nemo"


@runtime_checkable
class Recognizer(Protocol):
    """Speech → text."""

    name: str

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """One transcript per float32 mono waveform [samples]; may be "". Raises AudioError for empty or NaN audio."""
        ...


def to_recognizer_rate(wave: np.ndarray, sample_rate: int) -> np.ndarray:
    """The waveform [samples] float32 at 16 kHz, at least one analysis window long. Raises AudioError."""
    wave = check_waveform(wave, "recognizer")
    if sample_rate != SAMPLE_RATE:
        wave = resample(wave, sample_rate, SAMPLE_RATE)
    shortest = SAMPLE_RATE // 10
    return np.pad(wave, (0, shortest - len(wave))) if len(wave) < shortest else wave


class MoonshineRecognizer:
    """moonshine tiny-en (MIT) on ONNX Runtime, greedy, one waveform at a time.

    The number of text tokens is capped by duration (6.5 per second + 4): on noise the model would go on inventing.
    """

    name = "moonshine-tiny-en-0.1.0"
    tokens_per_second = 6.5
    _start, _end = 1, 2

    def __init__(self, threads: int = 1) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        files = moonshine_files()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self._encoder = onnxruntime.InferenceSession(str(files.encoder), options, providers=providers)
        self._decoder = onnxruntime.InferenceSession(str(files.decoder), options, providers=providers)
        self._tokenizer = Tokenizer.from_file(str(files.tokenizer))
        self._encoder_masked = any(i.name == "attention_mask" for i in self._encoder.get_inputs())
        inputs = self._decoder.get_inputs()
        self._decoder_masked = any(i.name == "encoder_attention_mask" for i in inputs)
        # [1, heads, length, head size]; the heads and sizes are fixed in the graph.
        self._empty_past = {
            i.name: np.zeros((1, int(i.shape[1]), 0, int(i.shape[3])), np.float32)
            for i in inputs
            if i.name.startswith("past_key_values")
        }
        self._present = [o.name.replace("present", "past_key_values") for o in self._decoder.get_outputs()[1:]]

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`."""
        return [self._transcribe(to_recognizer_rate(wave, sample_rate)) for wave in waves]

    def _transcribe(self, wave: np.ndarray) -> str:
        mask = np.ones((1, len(wave)), np.int64)
        feed: dict[str, np.ndarray] = {"input_values": wave[None]}
        if self._encoder_masked:
            feed["attention_mask"] = mask
        fixed: dict[str, np.ndarray] = {"encoder_hidden_states": self._encoder.run(None, feed)[0]}
        if self._decoder_masked:
            fixed["encoder_attention_mask"] = mask
        past = dict(self._empty_past)
        tokens, last = [], self._start
        cap = max(8, int(len(wave) / SAMPLE_RATE * self.tokens_per_second) + 4)
        for step in range(cap):
            step_feed = {"input_ids": np.array([[last]], np.int64), "use_cache_branch": np.array([step > 0])}
            logits, *present = self._decoder.run(None, step_feed | fixed | past)
            last = int(logits[0, -1].argmax())
            if last == self._end:
                break
            tokens.append(last)
            for name, value in zip(self._present, present, strict=True):
                if step == 0 or ".decoder." in name:  # cross-attention keys are computed once
                    past[name] = value
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()


class WhisperRecognizer:
    """whisper-base (MIT) through faster-whisper: int8, beam 1, temperature 0, no timestamps, no history."""

    name = "whisper-base-int8"
    tokens_per_second = 8

    def __init__(self, threads: int = 1, model_dir: str | Path | None = None, device: str = "cpu") -> None:
        """`model_dir`: another CTranslate2 Whisper model: a folder, or a name that faster-whisper downloads
        (`large-v3`); None for the packaged whisper-base. int8 on a CPU, float16 on a GPU."""
        from faster_whisper import WhisperModel
        from faster_whisper.utils import available_models

        downloadable = isinstance(model_dir, str) and (model_dir in available_models() or model_dir.count("/") == 1)
        folder = whisper_base_dir() if model_dir is None else Path(model_dir)
        if not (folder / "model.bin").is_file() and (folder.is_dir() or not downloadable):
            raise AssetError(
                f"{folder}: no CTranslate2 Whisper model (model.bin); convert one: `ct2-transformers-converter --model "
                "NAME --output_dir FOLDER`, or give a name like large-v3"
            )
        kind = "int8" if device == "cpu" else "float16"
        if model_dir is not None:
            self.name = f"whisper-{kind}:{folder.name}"
        source = str(folder) if folder.is_dir() else str(model_dir)
        try:
            self._model = WhisperModel(source, device=device.partition(":")[0], compute_type=kind, cpu_threads=threads)
        except Exception as error:  # whatever the hub client or CTranslate2 raises
            raise AssetError(
                f"faster-whisper cannot load {source} ({type(error).__name__}: {str(error).splitlines()[0][:150]}); "
                f"without network run `hf download Systran/faster-whisper-{folder.name} --local-dir FOLDER` elsewhere "
                "and give faster-whisper:FOLDER"
            ) from error

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`. Costs the same for every waveform up to 30 s."""
        return [self._transcribe(to_recognizer_rate(wave, sample_rate)) for wave in waves]

    def _transcribe(self, wave: np.ndarray) -> str:
        cap = 8 + math.ceil(min(len(wave) / SAMPLE_RATE, 30.0) * self.tokens_per_second)
        segments, _ = self._model.transcribe(
            wave,
            language="en",
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=True,
            max_new_tokens=min(cap, 220),
        )
        return " ".join(segment.text.strip() for segment in segments)


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


@contextlib.contextmanager
def quiet_nemo() -> Iterator[None]:
    """Import and build NeMo models without its banners: only errors of NeMo and Lightning are logged inside."""
    names = ("nemo_logger", "nv_one_logger", "lightning", "pytorch_lightning", "lightning.pytorch")
    before = {name: logging.getLogger(name).level for name in names}
    root_disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), _tar_filters():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(root_disabled)
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def restore_nemo(source: str | Path, device: str = "cpu") -> tuple[Any, str]:
    """(model, short name) of a `.nemo` file or of a pretrained model that NeMo can download; AssetError otherwise."""
    path = Path(source)
    is_file = path.suffix == ".nemo" or path.exists()
    if is_file and not path.is_file():
        raise AssetError(f"{path}: no such recogniser; train one with `dcar train-recognizer` or give its name")
    with quiet_nemo():
        try:
            from nemo.collections.asr.models import ASRModel
        except ImportError as error:
            raise AssetError(
                f"the recogniser {source} needs NeMo ({error}); run: pip install 'nemo_toolkit[asr]==3.0.0'"
            ) from error
        try:
            if is_file:
                model = ASRModel.restore_from(str(path), map_location=device)
            else:
                model = ASRModel.from_pretrained(str(source), map_location=device)
        except Exception as error:  # NeMo raises whatever tarfile, OmegaConf, torch or the hub raised
            raise AssetError(
                f"{source}: NeMo cannot restore it ({type(error).__name__}: {error}); check the file or the name"
                    + ("" if is_file else "; without network, get the .nemo file elsewhere and give nemo:FILE.nemo")
            ) from error
    return model, path.stem if is_file else str(source)


def sorted_batches(
    waves: list[np.ndarray], sample_rate: int, batch_seconds: float
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """(indices, padded waveforms [B, samples] at 16 kHz, lengths [B]) in order of length; a batch holds at most
    `batch_seconds` of padded audio, or one waveform."""
    import torch

    ready = [torch.from_numpy(to_recognizer_rate(wave, sample_rate)) for wave in waves]
    order = sorted(range(len(ready)), key=lambda i: len(ready[i]))
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * len(ready[order[stop]]) <= batch_seconds * SAMPLE_RATE:
            stop += 1
        rows = [ready[i] for i in order[start:stop]]
        batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        yield order[start:stop], batch, torch.tensor([len(row) for row in rows])
        start = stop


class NemoCTCRecognizer:
    """A NeMo CTC model (characters or BPE), restored through NeMo's own API; greedy CTC in sorted batches.

    Also gives the log-likelihood of a text, a denser signal than the WER of one transcript.
    """

    def __init__(self, source: str | Path, device: str = "cpu", batch_seconds: float = 20.0) -> None:
        """`source`: a `.nemo` file, or the name of a pretrained model that NeMo can download.

        `batch_seconds` bounds the padded audio of one batch. Raises AssetError if the file is missing or holds
        something else than a CTC model.
        """
        model, name = restore_nemo(source, device)
        from nemo.collections.asr.models import EncDecCTCModel

        if not isinstance(model, EncDecCTCModel):
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
        self._blank = len(self._vocabulary)
        self._subwords = getattr(self._model, "tokenizer", None)

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`. Batches are made by length; a result does not depend on the others."""
        texts = [""] * len(waves)
        for index, log_probs in self._log_probs(waves, sample_rate):
            best = log_probs.argmax(-1).tolist()
            kept = [s for i, s in enumerate(best) if s != self._blank and (i == 0 or s != best[i - 1])]
            texts[index] = self._decode(kept)
        return texts

    def log_likelihood(self, waves: list[np.ndarray], sample_rate: int, texts: Sequence[str]) -> list[float]:
        """CTC log-likelihood of each text given its waveform, in nats per character of the text (≤ 0).

        -inf where the waveform has fewer frames than the text needs. Raises TextError for a text without words or
        with characters that the model does not know, AudioError as `transcribe`.
        """
        import torch

        if len(texts) != len(waves):
            raise ValueError(f"log_likelihood: {len(waves)} waveforms but {len(texts)} texts")
        spoken = [spoken_words(text) for text in texts]
        targets = [self._encode(text) for text in spoken]
        scores = [0.0] * len(waves)
        for index, log_probs in self._log_probs(waves, sample_rate):
            target = torch.tensor([targets[index]], device=log_probs.device)
            loss = torch.nn.functional.ctc_loss(
                log_probs.float()[:, None],
                target,
                torch.tensor([len(log_probs)]),
                torch.tensor([len(targets[index])]),
                blank=self._blank,
                reduction="sum",
            )
            scores[index] = -float(loss) / len(spoken[index])
        return scores

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

    def _decode(self, ids: list[int]) -> str:
        if self._subwords is not None:
            return str(self._subwords.ids_to_text(ids)).strip()
        return " ".join("".join(self._vocabulary[i] for i in ids).split())

    def _encode(self, text: str) -> list[int]:
        if not text:
            raise TextError("log_likelihood: a text has no words; remove the utterance")
        if self._subwords is not None:
            return [int(i) for i in self._subwords.text_to_ids(text)]
        unknown = sorted(set(text) - set(self._vocabulary))
        if unknown:
            raise TextError(f"log_likelihood: {self.name} does not know the characters {unknown} of {text!r}")
        return [self._vocabulary.index(character) for character in text]


def load_recognizer(name: str, threads: int = 1, device: str = "cpu") -> Recognizer:
    """A recogniser by name:

    - `moonshine`, `whisper-base`, `starter` (ships with the project)
    - `nemo:PATH_OR_NAME`: CTC or transducer, e.g. nemo:stt_en_fastconformer_transducer_large or nemo:model.nemo
    - `whisper:FOLDER_OR_NAME` through transformers, e.g. whisper:openai/whisper-large-v3
    - `faster-whisper:FOLDER_OR_NAME` through CTranslate2, e.g. faster-whisper:large-v3
    - `ctc:FOLDER_OR_NAME`: wav2vec 2.0 or HuBERT with a CTC head, e.g. ctc:facebook/hubert-large-ls960-ft
    - `http://…`, `https://…`: a service (see `dcar.recognizers_http`); `openai:URL#MODEL`: one with OpenAI's interface

    Raises AssetError for an unknown name or a missing model.
    """
    if name == "moonshine":
        return MoonshineRecognizer(threads=threads)
    if name == "whisper-base":
        return WhisperRecognizer(threads=threads)
    if name == "starter":
        return NemoCTCRecognizer(SHIPPED_RECOGNIZER, device=device)
    kind, _, rest = name.partition(":")
    if rest and kind == "nemo":
        from dcar.recognizers_nemo import load_nemo

        return load_nemo(rest, device)
    if rest and kind in ("whisper", "ctc"):
        from dcar import recognizers_hf

        if kind == "ctc":
            return recognizers_hf.CTCRecognizer(rest, device)
        return recognizers_hf.WhisperHFRecognizer(rest, device)
    if rest and kind == "faster-whisper":
        return WhisperRecognizer(threads, rest, device)
    if rest and kind in ("http", "https", "openai"):
        from dcar.recognizers_http import HTTPRecognizer

        return HTTPRecognizer.from_spec(name)
    raise AssetError(
        f"unknown recogniser {name!r}; choose moonshine, whisper-base, starter, nemo:…, whisper:…, faster-whisper:…, "
        "ctc:…, http://… or openai:URL#MODEL"
    )
