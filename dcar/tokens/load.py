"""Every speech tokenizer by its name or folder."""

from __future__ import annotations

from pathlib import Path

from dcar.sources.shipped import shipped
from dcar.tokens import codec
from dcar.tokens.base import SpeechTokenizer
from dcar.tokens.hubert import HubertKMeansTokenizer
from dcar.tokens.kmeans import read_kmeans
from dcar.tokens.whisper import WhisperKMeansTokenizer


def load_tokenizer(name_or_dir: str | Path = "starter", threads: int = 1, device: str = "cpu") -> SpeechTokenizer:
    """A tokenizer by name or by folder.

    - `starter`, the one that ships with the project; a folder that `dcar fit-tokenizer` wrote
    - `s3:NAME[@FILE]` S³ of CosyVoice; NAME is speech_tokenizer_v1 (50 Hz), speech_tokenizer_v1_25hz or
      speech_tokenizer_v2_25hz (FSQ, 6561 codes), FILE its .onnx or .pt
    - `xcodec2:FOLDER`, `speechtokenizer:FOLDER`

    Raises CheckpointError or AssetError with the command that helps.
    """
    spec = str(name_or_dir)
    if spec == "starter":
        return WhisperKMeansTokenizer.from_pretrained(shipped("tokenizer"), threads=threads)
    kind, _, rest = spec.partition(":")
    codecs = {"s3": codec.S3Tokenizer, "xcodec2": codec.XCodec2Tokenizer,
              "speechtokenizer": codec.SpeechTokenizerFirstLayer}
    if rest and kind in codecs:
        return codecs[kind](rest, device)
    folder = Path(spec)
    if read_kmeans(folder)[0]["type"] == "hubert-kmeans":
        return HubertKMeansTokenizer.from_pretrained(folder, device=device)
    return WhisperKMeansTokenizer.from_pretrained(folder, threads=threads)
