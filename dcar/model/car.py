"""CAR decoder: a decoder-only Transformer over text and speech tokens with K prediction heads
(paper §3.1).

One sequence: text, then speech. Text positions attend to all text; speech positions attend to all
text and to earlier speech. The last hidden state at speech position t predicts the tokens at t + 1
… t + K, one by each head. FAR is the same model with K = 1, trained as such.

Departures from the paper, whose code base numbers positions sinusoidally: rotary positions,
numbered separately for text and speech, with speech positions multiplied by `speech_position_scale`
(about phonemes per speech token), so that the diagonal of the alignment is near from the first
step. The model learns to align within minutes on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dcar.config import check, setting
from dcar.errors import ConfigError
from dcar.tokens.codebook import INPUT, OUTPUT, spread_out
from heads.build import HEAD_KINDS, build_heads, check_kind
from heads.checkpoint import Checkpoint, CheckpointConfig
from heads.layers import RotaryTable, TransformerLayer

IGNORE = -100
LOGITS = 2**28
"""Maximum number of logits that training holds at once: 1 GiB in float32, while the cross
entropy is computed a few times that."""


class SpeechVocabulary(CheckpointConfig):
    """Speech vocabulary of every decoder's configuration: V codes 0 … V − 1, then EOS; heads
    predict both."""

    speech_vocab_size: int

    @property
    def eos(self) -> int:
        return self.speech_vocab_size

    @property
    def output_size(self) -> int:
        return self.speech_vocab_size + 1


@dataclass
class CARConfig(SpeechVocabulary):
    """Shape of a decoder. Defaults are the paper's (App. C.1); V codes, EOS = V, BOS = V + 1 if
    `bos`."""

    text_vocab_size: int = setting(
        512, "Number of text units, by default the phonemes of this project.", minimum=1
    )
    speech_vocab_size: int = setting(
        2048, "Number of codes of the speech tokenizer; taken from the data.", minimum=1
    )
    hidden_size: int = setting(
        1024, "Width of the layers, a multiple of num_attention_heads.", minimum=1
    )
    num_layers: int = setting(12, "Number of Transformer layers.", minimum=1, maximum=1000)
    num_attention_heads: int = setting(
        8, "Number of attention heads per layer; each has an even number of dimensions.", minimum=1
    )
    ffn_size: int = setting(4096, "Width of the feed-forward layers.", minimum=1)
    num_prediction_heads: int = setting(
        7,
        "Number of prediction heads K, the tokens predicted at once; 1 = FAR.",
        minimum=1,
        maximum=1000,
    )
    heads: str = setting(
        "independent",
        "Kind of prediction heads. independent: each with its own weights, as in the paper; "
        "shared: one stack for all offsets, which is read once for any number of tokens.",
        choices=HEAD_KINDS,
    )
    head_blocks: int = setting(
        4,
        "Number of residual blocks of every additional head, or of the shared stack.",
        minimum=1,
        maximum=1000,
    )
    share_head_blocks: bool = setting(
        False, "Whether the blocks of an independent head share their weights."
    )
    zero_init_heads: bool = setting(True, "Whether the blocks of the heads start as the identity.")
    head_width: int = setting(
        0, "Inner width of the blocks of shared heads; 0 = twice hidden_size.", minimum=0
    )
    tie_heads: bool = setting(
        False, "Whether the base head is also the output layer of shared heads."
    )
    dropout: float = setting(0.1, "Dropout rate of activations in training.", minimum=0, below=1)
    # True: the prompt is another utterance of the speaker, without its text, closed by BOS. False:
    # the layout of the paper, the prompt is the beginning of the same token stream and its text
    # stands before the target's.
    bos: bool = setting(
        False,
        "Layout of the prompt: true = another utterance, without its text; false = the paper's, "
        "with its text.",
    )
    speech_position_scale: float = setting(
        1.0, "Factor of speech positions, about the number of phonemes per speech token.", above=0
    )
    # so that data of another one is refused
    tokenizer: str = setting("", "Name and checksum of the speech tokenizer; taken from the data.")
    phonemes: str = setting("", "Version of the phoneme inventory; taken from the data.")

    def __post_init__(self):
        check(self)
        check_kind(self.heads, self.share_head_blocks, self.head_width, self.tie_heads)

    def check_heads(self) -> None:
        """Raise ConfigError unless hidden_size fits num_attention_heads."""
        check_width(self.hidden_size, self.num_attention_heads)


def check_width(hidden_size: int, num_attention_heads: int) -> None:
    """Raise ConfigError if layers of this width cannot have this number of attention heads."""
    if hidden_size % num_attention_heads or hidden_size // num_attention_heads % 2:
        raise ConfigError(
            f"hidden_size {hidden_size} must be num_attention_heads {num_attention_heads} times an "
            "even number, because rotary positions rotate pairs of dimensions"
        )


@dataclass
class CAROutput:
    """Output of training. loss: scalar to minimise; head_losses, head_accuracies [K]: mean cross
    entropy (nats) and top-1 share of each head."""

    loss: Tensor
    head_losses: Tensor
    head_accuracies: Tensor | None  # None in training, which does not need them
    targets: Tensor  # [K] valid targets per head


def head_targets(speech: Tensor, lengths: Tensor, heads: int, eos: int) -> Tensor:
    """Return targets [B, S, K] of the first K heads: head k at position t predicts y_{t+k}.

    speech: [B, S] ids; lengths: [B] tokens without EOS. EOS is the target at the position after the
    last token and at all later ones: a far head that missed EOS should still stop. Padding, t >=
    length, is IGNORE.
    """
    padding = torch.arange(speech.shape[1], device=speech.device) >= lengths[:, None]
    ahead = F.pad(speech.masked_fill(padding, eos), (0, heads), value=eos).unfold(1, heads, 1)[
        :, 1:
    ]
    return ahead.masked_fill(padding[..., None], IGNORE)


def disjoint_shares(heads: int, positions: int, share: float, device: torch.device) -> Tensor:
    """Draw a random share of the positions for each head, as indices [heads, n]. All positions
    are equally likely, and different heads get different ones as far as there are enough, so
    that their errors do not add up."""
    n = max(1, round(share * positions))
    places = torch.arange(heads * n, device=device) % positions
    return torch.randperm(positions, device=device)[places].view(heads, n)


def cross_entropy(
    read: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, width: int, accuracies: bool
) -> tuple[Tensor, Tensor]:
    """Return sums over the positions of n heads, each [n]: cross entropy (nats) and, if
    `accuracies`, the number of targets that are the most likely ids.

    read: function [n, P, D] -> logits [n, P, width]; hidden: [n, P, D]; targets: [n, P], IGNORE for
    none. If the logits would be more than LOGITS, they are computed piece by piece, and again in
    the backward pass.
    """

    def piece(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = read(hidden)
        nats = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="none"
        )
        right = (
            (logits.argmax(-1) == targets).sum(1) if accuracies else targets.new_zeros(len(targets))
        )
        return nats.view_as(targets).sum(1), right

    if targets.numel() * width <= LOGITS:
        return piece(hidden, targets)
    length = max(1, LOGITS // (len(hidden) * width))
    nats, right = zip(
        *(
            checkpoint(piece, *part, use_reentrant=False, preserve_rng_state=False)
            for part in zip(hidden.split(length, 1), targets.split(length, 1), strict=True)
        ),
        strict=True,
    )
    return torch.stack(nats).sum(0), torch.stack(right).sum(0)


class SpeechDecoder(Checkpoint):
    """Base class of decoders, with the loss of their heads."""

    config: Any
    heads: Any
    trunk_is_frozen = False

    def speech_hidden(
        self,
        text_ids: Tensor,
        text_lengths: Tensor,
        speech_ids: Tensor,
        speech_lengths: Tensor,
        prompt_lengths: Tensor,
    ) -> Tensor:
        """Return hidden states [B, S, D] of the speech positions of complete sequences, without
        a cache."""
        raise NotImplementedError

    def forward(
        self,
        text_ids: Tensor,
        text_lengths: Tensor,
        speech_ids: Tensor,
        speech_lengths: Tensor,
        prompt_lengths: Tensor,
        head_weights: Sequence[float] | None = None,
        speech_inputs: Tensor | None = None,
        head_positions: float = 1.0,
        states: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> CAROutput:
        """Return the teacher-forced loss of all heads (paper eq. 1): sum_k lambda_k * mean_t
        CE(head k at t, y_{t+k}).

        text_ids [B, N]; speech_ids [B, S] = prompt (closed by BOS if the config has it) + target,
        no EOS; speech_lengths [B] with prompt; prompt_lengths [B]: positions before prompt_lengths
        - 1 carry no loss. `speech_inputs` [B, S] is read in place of speech_ids if the input is
        noisy; the targets stay clean. `head_positions` < 1 trains each additional head on a random
        share of the positions: an unbiased estimate of its mean at less cost. `states` [B, S, D]: a
        frozen trunk's hidden states, if they were computed before. `positions` [P]: those that
        carry loss, as indices b * S + t, if the host knows them (`with_positions`); the heads then
        compute no others.
        """
        heads, hidden = self.heads, states
        weights = [1.0] * heads.num_heads if head_weights is None else list(head_weights)
        if len(weights) != heads.num_heads:
            raise ConfigError(
                f"head_weights has {len(weights)} values for {heads.num_heads} heads; give one "
                "per head (settings head_weight_decay and model.num_prediction_heads)"
            )
        if hidden is None:
            inputs = speech_ids if speech_inputs is None else speech_inputs
            hidden = self.speech_hidden(
                text_ids, text_lengths, inputs, speech_lengths, prompt_lengths
            )
        if self.trunk_is_frozen:
            hidden = F.dropout(hidden, self.config.dropout, self.training)
        prompt = (
            torch.arange(speech_ids.shape[1], device=speech_ids.device)
            < prompt_lengths[:, None] - 1
        )
        targets = head_targets(speech_ids, speech_lengths, heads.num_heads, self.config.eos)
        targets = targets.masked_fill(prompt[..., None], IGNORE).flatten(0, 1).T  # [K, B * S]
        hidden = hidden.flatten(0, 1)  # [B * S, D]
        if positions is not None:
            hidden, targets = hidden[positions], targets[:, positions]
        sums, right, count = self._sums_of_heads(hidden, targets, head_positions)
        mean = sums / count.clamp(min=1)
        # the host does not wait for the device
        scale = torch.tensor(weights).to(mean.device, non_blocking=True)
        return CAROutput(
            (scale * mean).sum(),
            mean.detach(),
            None if self.training else right / count.clamp(min=1),
            count,
        )

    def _sums_of_heads(
        self, hidden: Tensor, targets: Tensor, share: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return cross entropy and number of correct ids, both summed, and the number of
        targets, each [K]: hidden [P, D], targets [K, P]. share: of the positions for each
        additional head."""
        heads, first, others = self.heads, targets[:1], targets[1:]
        parts = [(lambda states: heads(states, 1).squeeze(-2), hidden[None], first)]
        if heads.num_heads > 1:
            each = hidden.expand(len(others), -1, -1)
            if share < 1:
                chosen = disjoint_shares(len(others), len(hidden), share, hidden.device)
                each, others = hidden[chosen], others.gather(1, chosen)
            parts.append((lambda states: heads(states, additional=True), each, others))
        width, accuracies = self.config.output_size, not self.training
        found = [
            (*cross_entropy(*part, width, accuracies), (part[2] != IGNORE).sum(1)) for part in parts
        ]
        sums, right, count = (torch.cat(values) for values in zip(*found, strict=True))
        return sums, right, count


class CARDecoder(SpeechDecoder):
    """Decoder: text and speech prompt in, distributions of the next K speech tokens out."""

    config_class = CARConfig
    model_type = "dcar-decoder"

    def __init__(self, config: CARConfig):
        super().__init__()
        config.check_heads()
        self.config = config
        width = config.hidden_size
        self.text_embedding = nn.Embedding(config.text_vocab_size, width)
        self.speech_embedding = nn.Embedding(config.speech_vocab_size + 1 + int(config.bos), width)
        self.layers = nn.ModuleList(
            TransformerLayer(width, config.num_attention_heads, config.ffn_size, config.dropout)
            for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.heads = build_heads(config)
        head_dim = width // config.num_attention_heads
        self.text_rotary = RotaryTable(head_dim)
        self.speech_rotary = RotaryTable(head_dim, config.speech_position_scale)
        for table in (self.text_embedding, self.speech_embedding):
            nn.init.normal_(table.weight, std=0.1)
        self.gradient_checkpointing = False

    @torch.no_grad()
    def start_from_codebook(self, codebook: np.ndarray) -> None:
        """Initialise speech embeddings and output layers from the tokenizer's centroids [V, P]
        instead of random rows, at the same spread (`dcar.tokens.kmeans`); BOS and EOS stay
        random. Raises ConfigError unless there are V codes."""
        codes, width = len(codebook), self.config.hidden_size
        if codes != self.config.speech_vocab_size:
            raise ConfigError(
                f"a codebook of {codes} codes for a decoder of {self.config.speech_vocab_size}"
            )
        table, heads = self.speech_embedding.weight, self.heads
        table[:codes] = spread_out(codebook, width, float(table.std()), seed=INPUT)
        output = spread_out(codebook, width, float(heads.base.weight.std()), seed=OUTPUT)
        heads.base.weight[:codes] = output
        heads.start_outputs(output)

    def gradient_checkpointing_enable(self) -> None:
        """Recompute each layer's activations in the backward pass: less memory for a third more
        time."""
        self.gradient_checkpointing = True

    # --- training ---------------------------------------------------------------------------------

    def freeze_trunk(self) -> None:
        """Train only the additional heads from now on (Medusa-1): the base head and everything
        before it are frozen and run without dropout; dropout is applied to the hidden states
        instead."""
        self.trunk_is_frozen = True
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(
                name.startswith("heads.") and not name.startswith("heads.base.")
            )
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.trunk_is_frozen:
            for part in (*self.inputs, self.layers, self.norm):
                part.eval()
        return self

    def speech_hidden(
        self,
        text_ids: Tensor,
        text_lengths: Tensor,
        speech_ids: Tensor,
        speech_lengths: Tensor,
        prompt_lengths: Tensor,
    ) -> Tensor:
        """Return hidden states [B, S, D] of the speech positions of complete sequences, without
        a cache."""
        # With BOS the target's own positions start at 0 (BOS), so that the alignment does not
        # depend on the prompt.
        origin = prompt_lengths - 1 if self.config.bos else torch.zeros_like(prompt_lengths)
        n, s = text_ids.shape[1], speech_ids.shape[1]
        device = text_ids.device
        text = torch.arange(n, device=device)
        speech = torch.arange(s, device=device)
        cos_text, sin_text = self.text_rotary(text[None].expand(len(text_ids), -1))
        cos_speech, sin_speech = self.speech_rotary(speech - origin[:, None])
        rotary = (torch.cat((cos_text, cos_speech), 2), torch.cat((sin_text, sin_speech), 2))
        column = torch.arange(n + s, device=device)
        real_text = column < text_lengths[:, None]  # [B, N + S]
        past = (column >= n) & (column <= column[:, None])  # [N + S, N + S]
        # [B, 1, N + S, N + S]; every position sees all text
        seen = (real_text[:, None] | past)[:, None]
        x = torch.cat((self.text_embedding(text_ids), self.speech_embedding(speech_ids)), dim=1)
        # what every layer would convert is converted once
        dtype = (
            torch.get_autocast_dtype(device.type)
            if torch.is_autocast_enabled(device.type)
            else x.dtype
        )
        mask = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf)
        rotary = (rotary[0].to(dtype), rotary[1].to(dtype))
        recompute = self.gradient_checkpointing and self.training
        for layer in self.layers:
            x = (
                checkpoint(layer, x, rotary, mask, use_reentrant=False)
                if recompute
                else layer(x, rotary, mask)
            )
        return self.norm(x[:, n:])

    @property
    def inputs(self) -> tuple[nn.Module, ...]:
        """Return the modules before the layers."""
        return self.text_embedding, self.speech_embedding
