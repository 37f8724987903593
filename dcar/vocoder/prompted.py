"""Vocoders of other projects that take the voice from a recording: vec2wav 2.0 (as CTX-vec2wav) and CosyVoice.

Neither is a package on an index: their code is found on PYTHONPATH. The calls follow their own inference scripts
(`vec2wav2/bin/vc.py`; `cosyvoice.cli.cosyvoice.CosyVoice.inference_vc`). Tests here run them against modules of the
same signatures, not against the projects themselves.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE, resample, save_audio
from dcar.errors import CheckpointError, ConfigError
from dcar.sources.hub import from_hub, read_weights
from dcar.vocoder.base import CodecVocoder, PromptAudio, folder_of, on_path


class Vec2Wav2Vocoder(CodecVocoder):
    """vec2wav 2.0 trained on k-means units: unit vectors and WavLM states of the prompt go in.

    Departure from the project: WavLM comes from transformers (`hidden_states[6]` is its `output_layer=6`), because the
    original checkpoint is a pickle of more than tensors.
    """

    name = "vec2wav2"
    wavlm_layer = 6

    def __init__(self, folder: Path, codebook: Path, wavlm: str, device: str, prompts: PromptAudio) -> None:
        """folder: config.yml and generator.ckpt. codebook: .npy [V, D], the vectors of the units (the centroids of the
        k-means). wavlm: folder or hub name (microsoft/wavlm-large)."""
        import torch
        import yaml
        from transformers import WavLMModel

        try:
            import vec2wav2.models as project
        except ImportError as error:
            raise on_path(f"vec2wav 2.0 ({error})", "https://github.com/cantabile-kwok/vec2wav2.0") from error
        folder = folder_of(folder, ("config.yml", "generator.ckpt"), "a vec2wav 2.0 model",
                           "see the project's README for its checkpoints")  # fmt: skip
        config = yaml.safe_load((folder / "config.yml").read_text())
        try:
            generator = getattr(project, config.get("generator_type", "BigVGAN"))(**config["generator_params"])
            frontend = project.CTXVEC2WAVFrontend(config["prompt_net_type"], config["num_mels"],
                                                  **config["frontend_params"])
            model = project.VEC2WAV2Generator(frontend, generator)
            model.load_state_dict(read_weights(folder / "generator.ckpt", "the generator")["model"]["generator"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder}: generator.ckpt does not fit config.yml ({type(error).__name__}: {str(error)[:120]})"
            ) from error
        model.backend.remove_weight_norm()
        self.model, self.device, self.prompts = model.to(device).eval(), device, prompts
        vectors = np.load(codebook, allow_pickle=False)
        channels = config["frontend_params"].get("vqvec_channels")
        if vectors.ndim != 2 or channels not in (None, vectors.shape[1]):
            raise CheckpointError(
                f"{codebook}: unit vectors {vectors.shape}, but the model wants [V, {channels}]; give the codebook "
                "that it was trained with"
            )
        self.codebook = torch.from_numpy(vectors.astype(np.float32)).to(device)
        self.vocab_size, self.sample_rate = len(vectors), int(config["sampling_rate"])
        self.token_rate = self.sample_rate // int(config["hop_size"])
        encoder: Any = from_hub(WavLMModel.from_pretrained, wavlm, "a WavLM model")
        self.wavlm = encoder.to(device).eval()

    @classmethod
    def from_spec(cls, spec: str, device: str, prompts: PromptAudio) -> Vec2Wav2Vocoder:
        """`FOLDER#CODEBOOK.npy#WAVLM`."""
        fields = spec.split("#")
        if len(fields) != 3:
            raise ConfigError(f"vec2wav2:{spec}: write vec2wav2:FOLDER#CODEBOOK.npy#WAVLM_FOLDER_OR_NAME")
        return cls(Path(fields[0]), Path(fields[1]), fields[2], device, prompts)

    def speak(self, tokens: Any, speaker: np.ndarray) -> Any:
        import torch

        wave, rate = self.prompts(speaker)
        heard = torch.from_numpy(resample(wave, rate, ENCODER_SAMPLE_RATE))[None].to(self.device)
        heard = torch.nn.functional.layer_norm(heard, heard.shape)
        prompt = self.wavlm(heard, output_hidden_states=True).hidden_states[self.wavlm_layer]  # [1, T', D]
        vectors = self.codebook[tokens.to(self.device)][None]  # [1, T, D]
        return self.model.inference(vectors, prompt)[-1]


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
