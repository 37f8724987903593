"""Codecs that turn their own tokens into sound: X-codec2, SpeechTokenizer's first layer, Vocos on EnCodec tokens.

The first two carry the voice in their tokens (SpeechTokenizer's first layer hardly: it sounds like one voice), so the
speaker features are not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dcar.errors import AssetError, CheckpointError
from dcar.sources.hub import from_hub, read_weights
from dcar.tokens.codec import load_speechtokenizer
from dcar.vocoder.base import CodecVocoder, folder_of
from heads.checkpoint import tensors_checksum

VOCOS_PIP = "pip install vocos==0.1.0 encodec==0.1.1 torchaudio"


class XCodec2Vocoder(CodecVocoder):
    """Decoder of X-codec2 (LLaSA's codes), through transformers."""

    name, tokenizer_names = "xcodec2", ("xcodec2",)

    def __init__(self, source: str | Path, device: str = "cpu") -> None:
        from transformers import Xcodec2Model

        model: Any = from_hub(Xcodec2Model.from_pretrained, source, "an X-codec2 model")
        self.model, self.device = model.to(device).eval(), device
        self.sample_rate = int(model.config.sampling_rate)
        self.token_rate = self.sample_rate // int(model.config.hop_length)
        self.vocab_size = int(np.prod(model.config.quantization_levels))
        self.tokenizer_checksum = tensors_checksum(self.model.state_dict())

    def speak(self, tokens: Any, speaker: np.ndarray) -> Any:
        return self.model.decode(audio_codes=tokens[None, None].to(self.device)).audio_values


class SpeechTokenizerVocoder(CodecVocoder):
    """Decoder of SpeechTokenizer from its first layer alone: words in one neutral voice."""

    name, tokenizer_names = "speechtokenizer", ("speechtokenizer",)

    def __init__(self, folder: str | Path, device: str = "cpu") -> None:
        model, config = load_speechtokenizer(folder)
        self.model, self.device = model.to(device).eval(), device
        self.sample_rate = int(config["sample_rate"])
        self.token_rate = self.sample_rate // int(np.prod(config["strides"]))
        self.vocab_size = int(config["codebook_size"])
        self.tokenizer_checksum = tensors_checksum(self.model.state_dict())

    def speak(self, tokens: Any, speaker: np.ndarray) -> Any:
        return self.model.decode(tokens[None, None].to(self.device))


class VocosVocoder(CodecVocoder):
    """Vocos trained on EnCodec features, fed with the tokens of EnCodec's first codebook (75 a second at 24 kHz)."""

    name, tokenizer_names = "vocos-encodec", ("encodec",)
    bandwidth_id = 0  # the lowest of the checkpoint's, which has the fewest codebooks

    def __init__(self, folder: str | Path, device: str = "cpu") -> None:
        """folder: the published config.yaml and pytorch_model.bin (charactr/vocos-encodec-24khz)."""
        folder = folder_of(folder, ("config.yaml", "pytorch_model.bin"), "a Vocos model",
                           "run `hf download charactr/vocos-encodec-24khz --local-dir FOLDER`")  # fmt: skip
        try:
            from vocos.feature_extractors import EncodecFeatures
            from vocos.pretrained import Vocos
        except ImportError as error:
            raise AssetError(f"vocos:{folder} needs packages ({error}); run: {VOCOS_PIP}") from error
        weights = read_weights(folder / "pytorch_model.bin", "Vocos' state dict")
        try:
            with _encodec_without_download():
                model = Vocos.from_hparams(str(folder / "config.yaml"))
            if not isinstance(model.feature_extractor, EncodecFeatures):
                raise CheckpointError(f"{folder}: a Vocos on mel spectra; one on EnCodec features is needed")
            # EnCodec itself is not in the published file and is not needed: its codebooks are (codebook_weights)
            absent, extra = model.load_state_dict(weights, strict=False)
            absent = [name for name in absent if not name.startswith("feature_extractor.encodec.")]
            if absent or extra:
                raise CheckpointError(f"{folder}: tensors missing {absent[:3]}, unknown {extra[:3]}; copy it again")
        except RuntimeError as error:
            cause = str(error).splitlines()[0][:120]
            raise CheckpointError(f"{folder}: weights do not fit config.yaml ({cause}); copy both again") from error
        self.model, self.device = model.to(device).eval(), device
        encodec = model.feature_extractor.encodec
        self.sample_rate, self.token_rate = int(encodec.sample_rate), int(encodec.frame_rate)
        self.vocab_size = int(encodec.quantizer.bins)

    def speak(self, tokens: Any, speaker: np.ndarray) -> Any:
        import torch

        features = self.model.codes_to_features(tokens[None].to(self.device))
        return self.model.decode(features, bandwidth_id=torch.tensor([self.bandwidth_id], device=self.device))


@contextmanager
def _encodec_without_download() -> Iterator[None]:
    """Vocos builds EnCodec with `pretrained=True`, a download; here only its sizes are needed."""
    from encodec import EncodecModel

    original = EncodecModel.encodec_model_24khz
    EncodecModel.encodec_model_24khz = staticmethod(lambda pretrained=True: partial(original, pretrained=False)())
    try:
        yield
    finally:
        EncodecModel.encodec_model_24khz = staticmethod(original)
