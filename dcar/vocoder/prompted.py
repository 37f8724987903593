"""CosyVoice's vocoder, which takes the voice from a recording.

It is no package on an index: its code is found on PYTHONPATH. The calls follow its own inference
(`cosyvoice.cli.cosyvoice.CosyVoice.inference_vc`). Tests here run them against modules of the same signatures, not
against the project itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dcar.audio import save_audio
from dcar.sources.hub import read_weights
from dcar.vocoder.base import CodecVocoder, PromptAudio, folder_of, on_path


class CosyVoiceVocoder(CodecVocoder):
    """Flow matching and HiFT of CosyVoice 1 or 2, through the project's own voice conversion with our tokens."""

    name, tokenizer_names = "cosyvoice", ("s3",)

    def __init__(self, folder: str | Path, prompts: PromptAudio) -> None:
        """folder: a model of CosyVoice (cosyvoice2.yaml or cosyvoice.yaml, flow.pt, hift.pt, campplus.onnx, …). The
        project chooses its device itself."""
        try:
            from cosyvoice.cli import cosyvoice as project
        except ImportError as error:
            raise on_path(f"CosyVoice ({error})", "https://github.com/FunAudioLLM/CosyVoice") from error
        path = Path(folder)
        second = (path / "cosyvoice2.yaml").is_file()
        folder_of(path, ("cosyvoice2.yaml" if second else "cosyvoice.yaml", "flow.pt", "hift.pt"), "a CosyVoice model",
                  "run `modelscope download iic/CosyVoice2-0.5B --local_dir FOLDER`")  # fmt: skip
        for name in ("flow.pt", "hift.pt"):
            read_weights(path / name, name)  # refused here if it is more than tensors: the project itself does not look
        self.model = (project.CosyVoice2 if second else project.CosyVoice)(str(path))
        self.prompts = prompts
        self.sample_rate = int(self.model.sample_rate)
        self.token_rate = int(getattr(self.model.model.flow, "input_frame_rate", 25 if second else 50))
        self.vocab_size = int(getattr(self.model.model.flow, "vocab_size", 6561 if second else 4096))

    def speak(self, tokens: Any, speaker: np.ndarray) -> Any:
        import torch

        wave, rate = self.prompts(speaker)
        with tempfile.TemporaryDirectory() as folder:  # the front end reads files
            file = Path(folder) / "prompt.wav"
            save_audio(file, wave, rate)
            inputs = self.model.frontend.frontend_vc(str(file), str(file), self.sample_rate)
        inputs["source_speech_token"] = tokens[None].to(torch.int32)
        inputs["source_speech_token_len"] = torch.tensor([len(tokens)], dtype=torch.int32)
        inner = self.model.model
        speak = inner.vc if hasattr(inner, "vc") else inner.tts  # later versions merged the two
        return torch.cat([piece["tts_speech"] for piece in speak(**inputs, stream=False, speed=1.0)], dim=1)
