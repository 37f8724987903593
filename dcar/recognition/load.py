"""Registry of recognisers by name, of audio and of speech tokens."""

from collections.abc import Callable

from dcar.errors import AssetError
from dcar.recognition.base import Recognizer
from dcar.recognition.encoder import load_encoder_recognizer
from dcar.recognition.nemo import load_nemo
from dcar.recognition.pretrained import (
    CTCHFRecognizer,
    MoonshineRecognizer,
    WhisperHFRecognizer,
    WhisperRecognizer,
)
from dcar.recognition.tokens import TokenRecognizer
from dcar.sources.shipped import resolve, shipped


def load_recognizer(name: str, device: str = "cpu") -> Recognizer:
    """Load a recogniser by name. All but `moonshine` and `whisper-base` run on `device`.

    - `moonshine`, `whisper-base`; `starter` (ships with the project)
    - `encoder:FOLDER`, written by `launch/starter/train_recognizer.py`
    - `nemo:PATH_OR_NAME`: CTC or transducer, e.g. nemo:stt_en_fastconformer_transducer_large or
      nemo:model.nemo
    - `whisper:FOLDER_OR_NAME` through transformers, e.g. whisper:openai/whisper-large-v3
    - `ctc:FOLDER_OR_NAME`: wav2vec 2.0 or HuBERT with a CTC head, e.g.
      ctc:facebook/hubert-large-ls960-ft

    Raises AssetError for an unknown name or a missing model.
    """
    shipping: dict[str, Callable[[], Recognizer]] = {
        "moonshine": MoonshineRecognizer,
        "whisper-base": WhisperRecognizer,
        "starter": lambda: load_encoder_recognizer(shipped("recognizer"), device, name),
    }
    loaders: dict[str, Callable[[str, str], Recognizer]] = {
        "encoder": load_encoder_recognizer,
        "nemo": load_nemo,
        "whisper": WhisperHFRecognizer,
        "ctc": CTCHFRecognizer,
    }
    kind, _, source = name.partition(":")
    if name in shipping:
        return shipping[name]()
    if source and kind in loaders:
        return loaders[kind](source, device)
    raise AssetError(
        f"unknown recogniser {name!r}; choose moonshine, whisper-base, starter, encoder:…, nemo:…, "
        "whisper:… or ctc:…"
    )


def load_token_recognizer(folder: str, device: str = "cpu") -> TokenRecognizer:
    """Load a recogniser of speech tokens that `dcar train-recognizer` wrote; `starter` is the
    shipped one.

    Raises CheckpointError if the folder contains none, AssetError if the shipped one is missing.
    """
    return TokenRecognizer.from_pretrained(resolve(folder, "token_recognizer"), device)
