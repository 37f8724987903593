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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dcar.config import check, setting
from dcar.errors import ConfigError
from dcar.model.batch import SpeechBatch
from dcar.tokens.codebook import INPUT, OUTPUT, spread_out
from heads.build import HEAD_KINDS, Heads, build_heads
from heads.checkpoint import Checkpoint, CheckpointConfig
from heads.layers import RotaryTable, TransformerLayer

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
        2048, "Number of codes of the speech tokenizer.", minimum=1, recorded=True
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
    tokenizer: str = setting("", "Name and checksum of the speech tokenizer.", recorded=True)
    phonemes: str = setting("", "Name of the text units.", recorded=True)
    languages: tuple[str, ...] = setting((), "Languages of the corpus.", recorded=True)

    def __post_init__(self):
        self.languages = tuple(self.languages)
        check(self)


@dataclass
class CAROutput:
    """Output of training. loss: scalar to minimise; head_losses, head_accuracies [K]: mean cross
    entropy (nats) and top-1 share of each head."""

    loss: Tensor
    head_losses: Tensor
    head_accuracies: Tensor | None  # None in training, which does not need them


def head_targets(speech: Tensor, lengths: Tensor, heads: int, eos: int) -> Tensor:
    """Return targets [B, S, K] of the first K heads: head k at position t predicts y_{t+k}.

    speech: [B, S] ids; lengths: [B] tokens without EOS. EOS is the target at the position after the
    last token and at all later ones: a far head that missed EOS should still stop.
    """
    padding = torch.arange(speech.shape[1], device=speech.device) >= lengths[:, None]
    ended = F.pad(speech.masked_fill(padding, eos), (0, heads), value=eos)
    return ended.unfold(1, heads, 1)[:, 1:]


def disjoint_shares(heads: int, positions: int, share: float, device: torch.device) -> Tensor:
    """Draw a random share of the positions for each head, as indices [heads, n]. All positions
    are equally likely, and different heads get different ones as far as there are enough, so
    that their errors do not add up."""
    n = max(1, round(share * positions))
    places = torch.arange(heads * n, device=device) % positions
    return torch.randperm(positions, device=device)[places].view(heads, n)


def head_losses(
    heads: Heads, hidden: Tensor, targets: Tensor, share: float, accuracies: bool
) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy (nats) of each head and, if `accuracies`, its share of targets
    that are the most likely ids, both [K].

    hidden: [P, D]; targets: [K, P]. share: of the positions, on which each additional head is
    evaluated. If the logits would be more than LOGITS, they are computed piece by piece, and again
    in the backward pass.
    """

    def sums(read: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = read(hidden)  # [n, P, V + 1]
        nats = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        total = nats.view_as(targets).sum(1)
        right = torch.zeros_like(total)
        if accuracies:
            right = (logits.argmax(-1) == targets).sum(1, dtype=total.dtype)
        return torch.stack((total, right))

    parts: list[tuple[nn.Module, Tensor, Tensor]] = [(heads.base, hidden[None], targets[:1])]
    if len(targets) > 1:
        own, others = hidden.expand(len(targets) - 1, -1, -1), targets[1:]
        if share < 1:
            chosen = disjoint_shares(len(others), len(hidden), share, hidden.device)
            own, others = hidden[chosen], others.gather(1, chosen)
        parts.append((heads, own, others))
    means = []
    for read, states, ids in parts:
        most = max(1, LOGITS // (len(ids) * heads.base.out_features))
        if ids.shape[1] <= most:
            total = sums(read, states, ids)
        else:
            pieces = [
                checkpoint(sums, read, *piece, use_reentrant=False, preserve_rng_state=False)
                for piece in zip(states.split(most, 1), ids.split(most, 1), strict=True)
            ]
            total = torch.stack(pieces).sum(0)
        means.append(total / ids.shape[1])
    losses, shares = torch.cat(means, 1).unbind()
    return losses, shares


class SpeechDecoder(Checkpoint):
    """Base class of decoders, with the loss of their heads."""

    config: Any
    heads: Any
    trunk_is_frozen = False

    def speech_hidden(self, batch: SpeechBatch) -> Tensor:
        """Return hidden states [B, S, D] of the speech positions of complete sequences, without
        a cache."""
        raise NotImplementedError

    def forward(
        self,
        batch: SpeechBatch,
        head_weights: Sequence[float] | None = None,
        head_positions: float = 1.0,
    ) -> CAROutput:
        """Return the teacher-forced loss of all heads (paper eq. 1): sum_k lambda_k * mean_t
        CE(head k at t, y_{t+k}).

        head_weights: lambda, 1 by default. `head_positions` < 1 trains each additional head on a
        random share of the positions: an unbiased estimate of its mean at less cost.
        """
        heads, speech = self.heads, batch["speech_ids"]
        weights = [1.0] * heads.num_heads if head_weights is None else list(head_weights)
        if len(weights) != heads.num_heads:
            raise ConfigError(
                f"head_weights has {len(weights)} values for {heads.num_heads} heads; give one "
                "per head (settings head_weight_decay and model.num_prediction_heads)"
            )
        hidden = batch.get("states")
        if hidden is None:
            inputs = batch.get("speech_inputs", speech)
            hidden = self.speech_hidden({**batch, "speech_ids": inputs})
        if self.trunk_is_frozen:
            hidden = F.dropout(hidden, self.config.dropout, self.training)
        targets = head_targets(speech, batch["speech_lengths"], heads.num_heads, self.config.eos)
        losses, accuracies = head_losses(
            heads,
            hidden.flatten(0, 1)[batch["positions"]],
            targets.flatten(0, 1)[batch["positions"]].T,
            head_positions,
            accuracies=not self.training,
        )
        # the host does not wait for the device
        scale = torch.tensor(weights).to(losses.device, non_blocking=True)
        return CAROutput(
            (scale * losses).sum(), losses.detach(), None if self.training else accuracies
        )


class CARDecoder(SpeechDecoder):
    """Decoder: text and speech prompt in, distributions of the next K speech tokens out."""

    config_class = CARConfig
    model_type = "dcar-decoder"

    def __init__(self, config: CARConfig):
        super().__init__()
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

    def speech_hidden(self, batch: SpeechBatch) -> Tensor:
        """Return hidden states [B, S, D] of the speech positions of complete sequences, without
        a cache."""
        # With BOS the target's own positions start at 0 (BOS), so that the alignment does not
        # depend on the prompt.
        text_ids, speech_ids = batch["text_ids"], batch["speech_ids"]
        prompts = batch["prompt_lengths"]
        origin = prompts - 1 if self.config.bos else torch.zeros_like(prompts)
        n, s = text_ids.shape[1], speech_ids.shape[1]
        device = text_ids.device
        text = torch.arange(n, device=device)
        speech = torch.arange(s, device=device)
        cos_text, sin_text = self.text_rotary(text[None].expand(len(text_ids), -1))
        cos_speech, sin_speech = self.speech_rotary(speech - origin[:, None])
        rotary = (torch.cat((cos_text, cos_speech), 2), torch.cat((sin_text, sin_speech), 2))
        column = torch.arange(n + s, device=device)
        real_text = column < batch["text_lengths"][:, None]  # [B, N + S]
        past = (column >= n) & (column <= column[:, None])  # [N + S, N + S]
        # [B, 1, N + S, N + S]; every position sees all text
        visible = (real_text[:, None] | past)[:, None]
        x = torch.cat((self.text_embedding(text_ids), self.speech_embedding(speech_ids)), dim=1)
        # what every layer would convert is converted once
        dtype = (
            torch.get_autocast_dtype(device.type)
            if torch.is_autocast_enabled(device.type)
            else x.dtype
        )
        mask = torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, -torch.inf)
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
