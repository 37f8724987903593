"""Residual codebooks: a model that predicts a codec's further layers from its first one, and a
vocoder that uses it.

A residual codec has L layers of codes. The decoder generates the first. `ResidualModel` predicts
the others, each in one pass over the whole utterance (MTP-Viterbi, arXiv 2410.13839, eq. 2, after
the non-autoregressive module of VALL-E, arXiv 2301.02111):

    p(a^{2:L} | p, ã) = prod_{j=2..L} p(a^j | a^{<j}, ã, p)

with phonemes p and all L layers ã of an acoustic prompt. `ResidualVocoder` decodes all layers.

Departures from VALL-E: the stage is an embedding that is added to the input, not an adaptive layer
norm; positions are rotary, as in `dcar.model.car`; the prompt is another recording, without its
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dcar.config import check, setting
from dcar.errors import CheckpointError, DataError
from dcar.model.batch import pad
from dcar.text.units import units_named
from dcar.vocoder.base import PromptAudio
from dcar.voices.speech import find_speech
from heads.checkpoint import Checkpoint, CheckpointConfig
from heads.layers import RotaryTable, TransformerLayer

VOICES = 4096
"""Maximum number of voices whose prompt codes a vocoder caches: a few kilobytes each."""


@dataclass
class ResidualConfig(CheckpointConfig):
    """Shape of a residual model, VALL-E's by default, and the codec whose layers it predicts."""

    text_vocab_size: int = setting(512, "Number of phonemes.", minimum=1)
    speech_vocab_size: int = setting(
        1024, "Number of codes of every layer of the codec.", minimum=1, recorded=True
    )
    codec_layers: int = setting(
        8, "Number of layers of the codec.", minimum=2, maximum=64, recorded=True
    )
    hidden_size: int = setting(
        1024, "Width of the layers, a multiple of num_attention_heads.", minimum=1
    )
    num_layers: int = setting(12, "Number of Transformer layers.", minimum=1, maximum=1000)
    num_attention_heads: int = setting(
        16,
        "Number of attention heads of a layer, with an even number of dimensions each.",
        minimum=1,
    )
    ffn_size: int = setting(4096, "Width of the feed-forward layers.", minimum=1)
    dropout: float = setting(0.1, "Share of activations dropped in training.", minimum=0, below=1)
    speech_position_scale: float = setting(
        0.3, "Factor of speech positions: about phonemes per speech token.", above=0
    )
    prompt_tokens: int = setting(150, "Length of the acoustic prompt.", minimum=1, recorded=True)
    # the codec, so that it can be loaded and another one raises an error
    codec: str = setting("", "Tokenizer setting of the codec.", recorded=True)
    tokenizer: str = setting("", "Name and checksum of the codec.", recorded=True)
    phonemes: str = setting("", "Version of the phoneme inventory.", recorded=True)

    def __post_init__(self) -> None:
        check(self)


class ResidualModel(Checkpoint):
    """Transformer with full attention over phonemes, the prompt and the utterance; see the module.

    Codes are [B, T, layers]. The output table of a layer is its embedding table, as in VALL-E.
    """

    config_class, model_type = ResidualConfig, "dcar-residual"
    config: ResidualConfig

    def __init__(self, config: ResidualConfig):
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.text_embedding = nn.Embedding(config.text_vocab_size, width)
        self.codes = nn.Embedding(config.codec_layers * config.speech_vocab_size, width)
        self.stages = nn.Embedding(config.codec_layers - 1, width)
        self.layers = nn.ModuleList(
            TransformerLayer(width, config.num_attention_heads, config.ffn_size, config.dropout)
            for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(width)
        head_dim = width // config.num_attention_heads
        self.text_rotary = RotaryTable(head_dim)
        self.speech_rotary = RotaryTable(head_dim, config.speech_position_scale)
        for table in (self.text_embedding, self.codes, self.stages):
            nn.init.normal_(table.weight, std=width**-0.5)  # logits of unit variance

    def summed(self, codes: Tensor) -> Tensor:
        """Return the sum over layers of the embeddings of codes [B, T, layers]: [B, T, D]."""
        batch, length, layers = codes.shape
        first = torch.arange(layers, device=codes.device) * self.config.speech_vocab_size
        sums = F.embedding_bag((codes + first).flatten(0, 1), self.codes.weight, mode="sum")
        return sums.view(batch, length, self.codes.embedding_dim)

    def forward(
        self,
        text_ids: Tensor,
        text_lengths: Tensor,
        prompt: Tensor,
        prompt_lengths: Tensor,
        codes: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """Return the logits [B, T, V] of layer j of an utterance, given its layers before.

        text_ids [B, N]; prompt [B, P, L], all layers; codes [B, T, j - 1]: the stage j is one more
        than the layers given. Lengths [B] each; what is after them is not attended to.
        """
        x = torch.cat((self.text_embedding(text_ids), self.summed(prompt), self.summed(codes)), 1)
        stage = codes.shape[2]
        x = x + self.stages.weight[stage - 1]
        n, p, t = (
            torch.arange(part.shape[1], device=x.device) for part in (text_ids, prompt, codes)
        )
        # the utterance starts at position 0, so that its alignment does not depend on the prompt
        text = self.text_rotary(n[None])
        speech = self.speech_rotary(
            torch.cat((p - prompt_lengths[:, None], t.expand(len(x), -1)), 1)
        )
        seen = torch.cat(
            [
                place < length[:, None]
                for place, length in ((n, text_lengths), (p, prompt_lengths), (t, lengths))
            ],
            1,
        )[:, None, None]  # [B, 1, 1, N + P + T]
        # mask and rotary tables are converted once instead of in every layer
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        mask = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf)
        rotary = tuple(
            torch.cat((one.expand(len(x), -1, -1, -1), other), 2).to(dtype)
            for one, other in zip(text, speech, strict=True)
        )
        for layer in self.layers:
            x = layer(x, rotary, mask)
        size = self.config.speech_vocab_size
        table = self.codes.weight[stage * size : (stage + 1) * size]
        return F.linear(self.norm(x[:, len(n) + len(p) :]), table)

    @torch.inference_mode()
    def fill(
        self,
        text_ids: Tensor,
        text_lengths: Tensor,
        prompt: Tensor,
        prompt_lengths: Tensor,
        first: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """Return all layers [B, T, L] of utterances with the first layer [B, T], greedily.

        The arguments are those of `forward`. There is one pass a layer, and no read by the host.
        """
        codes = first[..., None]
        for _ in range(self.config.codec_layers - 1):
            logits = self(text_ids, text_lengths, prompt, prompt_lengths, codes, lengths)
            codes = torch.cat((codes, logits.argmax(-1, keepdim=True)), 2)
        return codes


class ResidualVocoder:
    """Vocoder of a codec's first layer: fills in the other layers and decodes all of them."""

    name = "residual"
    reads_text = True

    def __init__(self, model: ResidualModel, codec: Any, prompts: PromptAudio) -> None:
        """Create the vocoder. codec: a `dcar.tokens.rvq.RVQCodec`. Raises CheckpointError if the
        model was trained on another codec, on more layers than it has, or on another phoneme
        inventory."""
        config = model.config
        trained = config.tokenizer.rpartition("@")[2]
        if codec.checksum != trained:
            raise CheckpointError(
                f"{config.codec}: a codec with the checksum {codec.checksum[:12]}…, but the "
                f"residual model was trained on {config.tokenizer}; restore that codec"
            )
        if codec.layers < config.codec_layers:
            raise CheckpointError(
                f"{config.codec}: a codec of {codec.layers} layers, but the residual model was "
                f"trained on {config.codec_layers}; load the codec with all of them"
            )
        try:
            self.units = units_named(config.phonemes)
        except CheckpointError as error:
            raise CheckpointError(
                f"the residual model reads {config.phonemes} ({error}); train it again with `dcar "
                "train-residual`"
            ) from error
        self.model, self.codec, self.recordings = model, codec, prompts
        self.vocab_size, self.sample_rate = config.speech_vocab_size, int(codec.sample_rate)
        self.token_rate = codec.rate_hz
        self.prompt = lru_cache(VOICES)(self._prompt)

    @property
    def checksum(self) -> str:
        """Identity of the weights: checksums of the model and of the codec."""
        return f"{self.model.checksum()} {self.codec.checksum}"

    @property
    def tokenizer(self) -> str:
        return f"@{self.codec.checksum}"

    def _prompt(self, features: bytes) -> Tensor:
        """Return the codes [P, L] of the prompt of a voice, from the beginning of its speech."""
        limit, layers = self.model.config.prompt_tokens, self.model.config.codec_layers
        wave, rate = self.recordings(np.frombuffer(features, np.float32))
        part = find_speech(wave, rate, max_seconds=limit / self.token_rate)
        codes = self.codec.encode_layers([part.cut(wave, rate)], rate)[0]
        return torch.from_numpy(codes[:layers, :limit].T.astype(np.int64))

    def synthesize(
        self,
        token_lists: Sequence[Sequence[int]],
        speaker: np.ndarray,
        texts: Sequence[str],
    ) -> list[np.ndarray]:
        """Return one float32 waveform in [-1, 1] per utterance, empty without tokens.

        speaker [B, F]: voice features of the prompts, by which their recordings are found. texts:
        the texts of the utterances. Raises DataError for ids outside the codebook and for a voice
        without a recording.
        """
        waves = [np.zeros(0, np.float32)] * len(token_lists)
        filled = [i for i, tokens in enumerate(token_lists) if len(tokens)]
        if not filled:
            return waves
        samples = self._decode(
            [token_lists[i] for i in filled],
            [np.ascontiguousarray(speaker[i], np.float32).tobytes() for i in filled],
            [texts[i] for i in filled],
        )
        for i, wave in zip(filled, samples, strict=True):
            length = round(len(token_lists[i]) * self.sample_rate / self.token_rate)
            waves[i] = wave[:length]
        return waves

    @torch.inference_mode()
    def _decode(
        self, token_lists: Sequence[Sequence[int]], voices: Sequence[bytes], texts: Sequence[str]
    ) -> np.ndarray:
        """Return the samples [B, longest] of utterances that are not empty."""
        device = self.model.norm.weight.device
        first, lengths = pad(token_lists, "cpu")
        if int(first.min()) < 0 or int(first.max()) >= self.vocab_size:
            raise DataError(
                f"residual vocoder: a token is outside 0..{self.vocab_size - 1}; strip EOS and use "
                "the vocoder of the decoder's tokenizer"
            )
        prompts = [self.prompt(voice) for voice in voices]
        codes = self.model.fill(
            *pad([self.units(text) for text in texts], device),
            pad_sequence(prompts, batch_first=True).to(device),
            torch.tensor([len(prompt) for prompt in prompts], device=device),
            first.to(device),
            lengths.to(device),
        )
        waves = self.codec.decode_layers(codes.transpose(1, 2), lengths)
        return waves.float().clamp(-1, 1).cpu().numpy()
