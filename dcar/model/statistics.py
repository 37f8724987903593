"""Statistics of a decoder and its data that verifiers need: rank accuracies, token transitions,
entropy thresholds, and mean mel frames of its codes.

`dcar fit-verifiers` measures them; a folder holds statistics.safetensors and statistics.json. They
belong to one decoder and are rejected for any other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dcar.errors import CheckpointError, ConfigError, check_format
from dcar.model.car import CARConfig
from dcar.storage import replacing
from dcar.tracking import write_json
from heads.checkpoint import tensors_checksum

FORMAT_VERSION = 1
TENSORS, INFO = "statistics.safetensors", "statistics.json"
NAMES = (
    "rank_accuracy bigram_keys bigram_counts entropy_thresholds entropy_lengths "
    "mel_means mel_counts"
).split()
MEL_BANDS = 80


@dataclass
class VerifierStatistics:
    """Statistics measured on training tokens (bigrams) and development utterances (the rest)."""

    decoder: str  # checksum of the decoder
    tokenizer: str  # CARConfig.tokenizer
    states: int  # rows of the transition matrix: codes, end of speech, start of an utterance
    # [K - 1, R] float: P(the base head draws the i-th ranked id of head d + 1 | the path so far)
    rank_accuracy: Tensor
    # [pairs] int64, ascending: previous * states + next, of the pairs that occur
    bigram_keys: Tensor
    bigram_counts: Tensor  # [pairs] int64
    entropy_thresholds: Tensor  # [T] float, nats, ascending
    entropy_lengths: Tensor  # [T] float: tokens per pass of the decoder with each threshold
    info: dict[str, Any] = field(default_factory=dict)  # sampling, data, provenance: for people
    # [V, MEL_BANDS] float: mean log-mel frame of every code, 0 where it never occurred; [0,
    # MEL_BANDS] if not measured
    mel_means: Tensor = field(default_factory=lambda: torch.zeros(0, MEL_BANDS))
    # [V] int64: its frames
    mel_counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).contiguous() for name in NAMES}

    def checksum(self, *names: str) -> str:
        """Return the checksum of all tensors, or of those named."""
        return tensors_checksum(
            {n: t for n, t in self.tensors().items() if not names or n in names}
        )

    def save_pretrained(self, directory: str | Path) -> None:
        path = Path(directory)
        with replacing(path / TENSORS) as part:
            save_file(self.tensors(), part)
        write_json(
            path / INFO,
            {
                "format_version": FORMAT_VERSION,
                "decoder": self.decoder,
                "tokenizer": self.tokenizer,
                "states": self.states,
                "tensors": self.checksum(),
                "info": self.info,
            },
        )

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> VerifierStatistics:
        """Load statistics. Raises CheckpointError if a file is missing, broken, of another
        version, or does not belong to the other one."""
        path = Path(directory)
        try:
            about = json.loads((path / INFO).read_text())
            check_format(
                path / INFO,
                about.get("format_version"),
                FORMAT_VERSION,
                CheckpointError,
                f"make them again with `dcar fit-verifiers out={path}`",
            )
            tensors = load_file(path / TENSORS)
            if tensors_checksum(tensors) != about["tensors"]:
                raise ValueError(f"{TENSORS} is not the file that {INFO} was written with")
            return cls(
                about["decoder"], about["tokenizer"], about["states"], info=about["info"], **tensors
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: cannot read the statistics ({error}); make them with "
                f"`dcar fit-verifiers out={path}`"
            ) from error

    def check_decoder(self, checksum: str, config: CARConfig) -> None:
        """Raise CheckpointError unless these statistics were measured on this decoder and its
        tokenizer."""
        if (self.decoder, self.tokenizer, self.states) != (
            checksum,
            config.tokenizer,
            config.speech_vocab_size + 2,
        ):
            raise CheckpointError(
                f"these statistics were measured on the decoder {self.decoder[:12]}… with tokens "
                f"of '{self.tokenizer[:40]}', not on {checksum[:12]}… with "
                f"'{config.tokenizer[:40]}'; fit them for this decoder with `dcar fit-verifiers`"
            )

    def centred_mel(self) -> Tensor:
        """Return the mean log-mel frame of every code minus that of all codes, float32 [V,
        MEL_BANDS]; NaN for a code that never occurred. Raises ConfigError if none were measured."""
        if not len(self.mel_means):
            raise ConfigError(
                "these statistics contain no mean mel frames; measure them again with `dcar "
                "fit-verifiers mel_utterances=1000` on a prepared corpus with recordings"
            )
        occurs = self.mel_counts > 0
        centred = self.mel_means - self.mel_means[occurs].mean(0)
        return torch.where(occurs[:, None], centred, torch.nan)

    def threshold_for(self, length: float) -> float:
        """Return the entropy threshold whose measured mean chunk length is `length`,
        interpolated linearly. Raises ConfigError for a length outside the measured range."""
        # sampling noise may bend the curve a little
        lengths = self.entropy_lengths.double().cummax(0).values
        low, high = float(lengths[0]), float(lengths[-1])
        if not low <= length <= high:
            raise ConfigError(
                f"no entropy threshold yields {length:g} tokens per pass: with this decoder they "
                f"range from {low:.2f} to {high:.2f}; choose a length in between"
            )
        right = min(max(1, int((lengths < length).sum())), len(lengths) - 1)
        share = (length - lengths[right - 1]) / (lengths[right] - lengths[right - 1]).clamp(
            min=1e-9
        )
        a, b = self.entropy_thresholds[right - 1].double(), self.entropy_thresholds[right].double()
        return float(torch.lerp(a, b, share.clamp(0, 1)))
