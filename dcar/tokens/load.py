"""Registry of speech tokenizers by name or folder."""

from collections.abc import Callable
from pathlib import Path

from dcar.errors import AssetError, CheckpointError
from dcar.sources.shipped import resolve
from dcar.tokens import codec, rvq
from dcar.tokens.base import SpeechTokenizer
from dcar.tokens.codebook import read_kmeans
from dcar.tokens.hubert import HubertEncoder, shared_hubert
from dcar.tokens.kmeans import KMeansTokenizer, StateEncoder
from dcar.tokens.whisper import WhisperEncoder


def load_tokenizer(name_or_dir: str | Path = "starter", device: str = "cpu") -> SpeechTokenizer:
    """Load a tokenizer by name or by folder.

    - `starter`, the one that ships with the project; a folder that `dcar fit-tokenizer` wrote
    - `s3:NAME[@FILE]`: S³ of CosyVoice; NAME is speech_tokenizer_v1 (50 Hz),
      speech_tokenizer_v1_25hz or speech_tokenizer_v2_25hz (FSQ, 6561 codes), FILE its .onnx or .pt
    - `xcodec2:FOLDER_OR_NAME`
    - `speechtokenizer:FOLDER[@LAYERS]`; `codec:FOLDER_OR_NAME[@LAYERS]` for EnCodec, Mimi and DAC
      of transformers: an `rvq.RVQCodec`, whose tokens are the codes of its first layer. LAYERS (1
      by default) is the number of layers that it encodes and decodes

    Raises CheckpointError or AssetError with the command that helps.
    """
    spec = str(name_or_dir)
    kind, _, rest = spec.partition(":")
    codecs: dict[str, Callable[[str, str], SpeechTokenizer]] = {
        "s3": codec.S3Tokenizer,
        "xcodec2": codec.XCodec2Tokenizer,
        "speechtokenizer": rvq.SpeechTokenizerCodec,
        "codec": rvq.load_codec,
    }
    if rest and kind in codecs:
        return codecs[kind](rest, device)
    folder = resolve(spec, "tokenizer")
    card, tensors = read_kmeans(folder)
    encoder: StateEncoder
    try:
        if card["type"] == HubertEncoder.kind:
            try:
                encoder = shared_hubert(str(card["encoder"]), int(card["layer"]), device)
            except AssetError as error:
                raise AssetError(
                    f"{folder}: its HuBERT is not here ({error}); write its location into "
                    f"`encoder` of {folder}/tokenizer.json"
                ) from error
        else:
            encoder = WhisperEncoder(card["tail_seconds"], device=device)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: tokenizer.json does not name its encoder correctly ({error!r}); restore "
            "the folder"
        ) from error
    if (card["type"], card["encoder_sha256"]) != (encoder.kind, encoder.sha256):
        raise CheckpointError(
            f"{folder}: its {card['type']} was fitted on an encoder with SHA-256 "
            f"{card['encoder_sha256'][:12]}…, but {card.get('encoder', encoder.name)} has "
            f"{encoder.sha256[:12]}…; write the location of the right HuBERT into `encoder` of "
            f"{folder}/tokenizer.json, or run `dcar fit-tokenizer` with this one"
        )
    tokenizer = KMeansTokenizer(
        encoder, **tensors, name=card["name"], provenance=card.get("provenance")
    )
    if tokenizer.checksum != card["checksum"]:
        raise CheckpointError(
            f"{folder}: the centroids do not match the checksum in tokenizer.json; restore the "
            "folder"
        )
    return tokenizer
