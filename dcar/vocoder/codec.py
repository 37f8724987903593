"""Vocoders of other projects: X-codec2, the first layer of codecs with residual layers, CosyVoice.

The first two carry the voice in their tokens (the first layer hardly: SpeechTokenizer's sounds like
one voice), so the speaker features are not used. CosyVoice takes the voice from a recording. It is
not in a package index; its code is imported from PYTHONPATH. The calls follow its own inference
(`cosyvoice.cli.cosyvoice.CosyVoice.inference_vc`). The tests of this project run them on modules
with the same signatures, not on CosyVoice itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dcar.audio import save_audio
from dcar.errors import AssetError, DataError
from dcar.sources.hub import read_weights
from dcar.storage import digest, digest_of
from dcar.tokens.codec import CodecTokenizer
from dcar.vocoder.base import PromptAudio


class OneByOne:
    """Base class of the adapters: checks of tokens and identity, one utterance at a time,
    clipping."""

    name: str
    vocab_size: int
    sample_rate: int
    token_rate: float
    tokenizer: str  # see `Vocoder.tokenizer`

    def synthesize(
        self, token_lists: Sequence[Sequence[int]], speaker: np.ndarray
    ) -> list[np.ndarray]:
        """Return one float32 waveform in −1…1 per utterance, empty without tokens. Raises
        DataError for ids outside the codebook."""
        if len(speaker) != len(token_lists):
            raise DataError(
                f"{self.name}: {len(token_lists)} utterances but {len(speaker)} voices; give one "
                "voice per utterance"
            )
        return [
            self._one(list(tokens), row)
            for tokens, row in zip(token_lists, np.asarray(speaker), strict=True)
        ]

    def _one(self, tokens: list[int], speaker: np.ndarray) -> np.ndarray:
        if not tokens:
            return np.zeros(0, np.float32)
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            worst = min(tokens) if min(tokens) < 0 else max(tokens)
            raise DataError(
                f"{self.name}: token {worst} is outside 0..{self.vocab_size - 1}; strip EOS and "
                "use the vocoder of the decoder's tokenizer"
            )
        with torch.inference_mode():
            wave = self.speak(torch.tensor(tokens, dtype=torch.int64), speaker)
        return np.clip(wave.reshape(-1).float().cpu().numpy(), -1.0, 1.0).astype(np.float32)

    def speak(self, tokens: torch.Tensor, speaker: np.ndarray) -> torch.Tensor:
        """Return the waveform of token ids [T] int64 in the voice of `speaker` [F]."""
        raise NotImplementedError


class CodecVocoder(OneByOne):
    """Decoder of a codec: X-codec2 (LLaSA's codes), or SpeechTokenizer, EnCodec, Mimi or DAC
    from the first layer alone, which at best yields the words in one neutral voice. The tokens
    must come from the codec's own encoder with the same weights."""

    def __init__(self, codec: CodecTokenizer) -> None:
        self.codec = codec
        self.vocab_size, self.name = codec.vocab_size, codec.name
        self.tokenizer = f"{codec.name}@{codec.checksum}"
        self.sample_rate, self.token_rate = codec.sample_rate, codec.rate_hz

    def speak(self, tokens: torch.Tensor, speaker: np.ndarray) -> torch.Tensor:
        return self.codec.decode(tokens)


class CosyVoiceVocoder(OneByOne):
    """Flow matching and HiFT of CosyVoice 1 or 2, through that project's own voice conversion,
    given our tokens."""

    name, tokenizer = "cosyvoice", "s3@"

    def __init__(self, folder: str | Path, prompts: PromptAudio) -> None:
        """Load the model in `folder` (cosyvoice2.yaml or cosyvoice.yaml, flow.pt, hift.pt,
        campplus.onnx, …). CosyVoice chooses its device itself. Raises AssetError if the project
        or a file is missing."""
        try:
            from cosyvoice.cli import cosyvoice as project
        except ImportError as error:
            raise AssetError(
                f"CosyVoice ({error}) is not installed: clone "
                "https://github.com/FunAudioLLM/CosyVoice and put the clone on PYTHONPATH (see "
                "docs/data.md)"
            ) from error
        path = Path(folder)
        second = (path / "cosyvoice2.yaml").is_file()
        settings = "cosyvoice2.yaml" if second else "cosyvoice.yaml"
        for name in (settings, "flow.pt", "hift.pt"):
            if not (path / name).is_file():
                raise AssetError(
                    f"{path / name}: is missing; to get a CosyVoice model, run `modelscope "
                    "download iic/CosyVoice2-0.5B --local_dir FOLDER`"
                )
        self.checksum = digest_of(
            [digest(path / name) for name in (settings, "flow.pt", "hift.pt")]
        )
        for name in ("flow.pt", "hift.pt"):
            # raises an error if the file contains more than tensors, which CosyVoice does not check
            read_weights(path / name, name)
        self.model = (project.CosyVoice2 if second else project.CosyVoice)(str(path))
        self.prompts = prompts
        self.sample_rate = int(self.model.sample_rate)
        self.token_rate = int(
            getattr(self.model.model.flow, "input_frame_rate", 25 if second else 50)
        )
        self.vocab_size = int(
            getattr(self.model.model.flow, "vocab_size", 6561 if second else 4096)
        )

    def speak(self, tokens: torch.Tensor, speaker: np.ndarray) -> torch.Tensor:
        wave, rate = self.prompts(speaker)
        with tempfile.TemporaryDirectory() as folder:  # the front end only reads files
            file = Path(folder) / "prompt.wav"
            save_audio(file, wave, rate)
            inputs = self.model.frontend.frontend_vc(str(file), str(file), self.sample_rate)
        inputs["source_speech_token"] = tokens[None].to(torch.int32)
        inputs["source_speech_token_len"] = torch.tensor([len(tokens)], dtype=torch.int32)
        inner = self.model.model
        speak = inner.vc if hasattr(inner, "vc") else inner.tts  # later versions merged the two
        return torch.cat(
            [piece["tts_speech"] for piece in speak(**inputs, stream=False, speed=1.0)], dim=1
        )
