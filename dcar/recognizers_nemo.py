"""NeMo recognisers of either family: CTC, and transducers such as stt_en_fastconformer_transducer_large.

NeMo reads the weights in a `.nemo` file with `torch.load`, which unpickles nothing but tensors (since torch 2.6).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dcar.errors import AssetError
from dcar.recognizers import NemoCTCRecognizer, Recognizer, quiet_nemo, restore_nemo, sorted_batches


class NemoTransducerRecognizer:
    """A NeMo transducer (RNN-T, TDT, or the transducer of a hybrid model), greedy, in batches of similar length."""

    def __init__(self, model: Any, name: str, device: str = "cpu", batch_seconds: float = 20.0) -> None:
        """`model`: an `EncDecRNNTModel`; it is put in evaluation mode and moved to `device`."""
        self.name, self.device, self.batch_seconds = f"nemo-transducer:{name}", device, batch_seconds
        self._model = model.to(device).eval()
        # as NeMo's own transcribe(): no dither and no extra padding, so that results are reproducible
        self._model.preprocessor.featurizer.dither = 0.0
        self._model.preprocessor.featurizer.pad_to = 0

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`."""
        import torch

        texts = [""] * len(waves)
        for indices, batch, lengths in sorted_batches(waves, sample_rate, self.batch_seconds):
            with torch.inference_mode(), quiet_nemo():
                encoded, frames = self._model(
                    input_signal=batch.to(self.device), input_signal_length=lengths.to(self.device)
                )
                found = self._model.decoding.rnnt_decoder_predictions_tensor(
                    encoder_output=encoded, encoded_lengths=frames, return_hypotheses=False
                )
            for index, hypothesis in zip(indices, found, strict=True):
                texts[index] = str(getattr(hypothesis, "text", hypothesis)).strip()
        return texts


def load_nemo(source: str | Path, device: str = "cpu") -> Recognizer:
    """The recogniser in a `.nemo` file or under a NeMo name, by what it is. AssetError for anything but ASR."""
    model, name = restore_nemo(source, device)
    from nemo.collections.asr.models import EncDecCTCModel, EncDecRNNTModel

    if isinstance(model, EncDecCTCModel):
        return NemoCTCRecognizer.from_model(model, f"nemo-ctc:{name}", device)
    if isinstance(model, EncDecRNNTModel):
        return NemoTransducerRecognizer(model, name, device)
    raise AssetError(f"{source}: is a {type(model).__name__}; a CTC or transducer model of NeMo is needed")
