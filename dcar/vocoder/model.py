"""The vocoder of this project as other modules use it: `TokenVocoder` loads, saves and synthesises.

Its networks are in dcar/vocoder/network.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dcar.errors import CheckpointError, DataError
from dcar.vocoder.acoustic import VocoderConfig
from dcar.vocoder.captured import CapturedSynthesis
from dcar.vocoder.network import VocoderNetwork
from dcar.vocoder.streaming import StreamingVocoder
from heads.checkpoint import FORMAT_VERSION, load_config

MODEL_TYPE = "dcar-vocoder"
_captured: WeakKeyDictionary[VocoderNetwork, CapturedSynthesis] = WeakKeyDictionary()


class TokenVocoder(VocoderNetwork):
    """Speech tokens and speaker features to waveform, for the tokens of one tokenizer."""

    @property
    def tokenizer(self) -> str:
        return f"@{self.config.tokenizer_checksum}"

    @torch.inference_mode()
    def synthesize(
        self, token_lists: Sequence[Sequence[int]], speaker: Tensor | np.ndarray
    ) -> list[np.ndarray]:
        """Return one float32 wave per utterance, samples_per_token samples per token (none for an
        empty list); speaker [B, 298]. Raises DataError if the features or ids are not valid.

        On a CPU utterances are synthesised one by one, which is faster there
        (dcar/vocoder/streaming.py). On other devices they are padded to the longest of the call and
        more (dcar/vocoder/captured.py): pass utterances of similar length together.
        """
        device = self.renderer.head.weight.device
        speaker = torch.as_tensor(speaker, dtype=torch.float32)
        lengths = [len(t) for t in token_lists]
        if speaker.shape[:1] != (len(lengths),):
            raise DataError(
                f"vocoder: {len(lengths)} utterances but speaker features {list(speaker.shape)}; "
                "give one row of features per utterance"
            )
        if not any(lengths):
            return [np.zeros(0, np.float32) for _ in lengths]
        training = self.training
        if device.type == "cpu":
            utterances = zip(token_lists, speaker, strict=True)
            waves = [StreamingVocoder(self, row).push(ids, last=True) for ids, row in utterances]
        else:
            waves = self.eval()._synthesize_padded(token_lists, speaker)
        if training:
            self.train()
        return waves

    def _synthesize_padded(
        self, token_lists: Sequence[Sequence[int]], speaker: Tensor
    ) -> list[np.ndarray]:
        """See `synthesize`. Everything is checked on the host, which reads nothing from the
        device but the waves."""
        rows = [torch.as_tensor(ids, dtype=torch.int64) for ids in token_lists]
        self.check_speaker(speaker, len(rows))
        self.check_ids(torch.cat(rows))
        gains = self.equalizer(self.acoustic, speaker)
        lengths = torch.tensor([len(row) for row in rows])
        captured = _captured.get(self)
        if captured is None or captured.device != self.renderer.head.weight.device:
            captured = _captured[self] = CapturedSynthesis(self)
        waves = captured(self, pad_sequence(rows, batch_first=True), lengths, speaker, gains)
        samples = [len(row) * self.config.samples_per_token for row in rows]
        return [wave[:n].copy() for wave, n in zip(waves.cpu().numpy(), samples, strict=True)]

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write config.json and model.safetensors (fp16 by default: half the size, no audible
        difference)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: value.detach().to("cpu", dtype).contiguous()
            for name, value in self.state_dict().items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION, **asdict(self.config)}
        # one line per list
        text = re.sub(
            r"\[[^]]*\]",
            lambda numbers: re.sub(r"\s+", " ", numbers[0]),
            json.dumps(config, indent=2),
        )
        (folder / "config.json").write_text(text + "\n")

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, device: str | torch.device = "cpu"
    ) -> TokenVocoder:
        """Return the vocoder that `save_pretrained` wrote, in fp32 and eval mode. Raises
        CheckpointError if config and weights are damaged or do not fit each other."""
        folder = Path(folder)
        config = load_config(folder, MODEL_TYPE, VocoderConfig)
        try:
            weights = load_file(folder / "model.safetensors")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder}/model.safetensors: cannot read the weights ({error}); copy the vocoder "
                "again"
            ) from error
        widest = max((max(value.shape, default=0) for value in weights.values()), default=0)
        if wrong := [
            f"{name}: {size}"
            for name, size in asdict(config).items()
            if name.endswith(("_size", "_fft", "_bands", "_dim")) and size > 2 * widest
        ]:
            # layers of these sizes would take memory although the weights are smaller
            raise CheckpointError(
                f"{folder}/config.json: impossible settings ({', '.join(wrong)[:200]}); copy it "
                "again"
            )
        try:
            model = cls(config)
            model.load_state_dict(
                {name: value.float() for name, value in weights.items()}, strict=True
            )
        except (
            CheckpointError,
            RuntimeError,
            TypeError,
            ValueError,
            ArithmeticError,
            AssertionError,
        ) as error:
            raise CheckpointError(
                f"{folder}: weights do not fit the config: {error}; copy the vocoder again"
            ) from error
        if not all(bool(torch.isfinite(value).all()) for value in model.state_dict().values()):
            raise CheckpointError(
                f"{folder}/model.safetensors: contains weights that are not finite; copy it again"
            )
        return model.eval().to(device)
