"""The vocoder of this project as other modules use it: `TokenVocoder` synthesises.

Its networks are in dcar/vocoder/network.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dcar.errors import DataError
from dcar.vocoder.captured import WindowedVocoder, captured_synthesis
from dcar.vocoder.network import VocoderNetwork
from dcar.vocoder.streaming import StreamingVocoder


class TokenVocoder(VocoderNetwork):
    """Speech tokens and speaker features to waveform, for the tokens of one tokenizer."""

    @property
    def tokenizer(self) -> str:
        return f"@{self.config.tokenizer_checksum}"

    def stream(self, speaker: np.ndarray | Tensor) -> StreamingVocoder | WindowedVocoder:
        """Start an utterance whose tokens arrive piece by piece, in the voice of speaker [F], its
        voice features. Raises DataError if these are not valid."""
        on_cpu = self.device.type == "cpu"
        vocoder = self.eval() if self.training else self
        return (StreamingVocoder if on_cpu else WindowedVocoder)(vocoder, speaker)

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
        if self.device.type == "cpu":
            utterances = zip(token_lists, speaker, strict=True)
            waves = [self.stream(row).push(ids, last=True) for ids, row in utterances]
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
        numbers = torch.tensor([[len(row), 0, 0, 0] for row in rows])
        tokens = pad_sequence(rows, batch_first=True)
        waves, _ = captured_synthesis(self)(self, tokens, numbers, speaker, gains)
        samples = [len(row) * self.config.samples_per_token for row in rows]
        return [wave[:n].copy() for wave, n in zip(waves.numpy(), samples, strict=True)]
