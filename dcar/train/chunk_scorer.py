"""Train a chunk scorer on a frozen decoder: a network that scores how well the tokens of a chunk
fit together (heads/chunk_scorer.py).

    dcar train-chunk-scorer --config chunk_scorer_starter decoder=runs/car out=runs/chunk_scorer
    accelerate launch -m dcar.cli train-chunk-scorer --config chunk_scorer_starter

At a share of the positions of every utterance the decoder's heads sample a chunk (temperature 1,
new in every step). The network learns to distinguish it from the chunk that was recorded there. A
policy contains the trained scorer (`chunk_scorer` of `dcar train-policy`). The run writes weights,
config.json, config.yaml, README.md, log.jsonl, provenance.json and checkpoints to out. The same
command resumes from the last checkpoint.
"""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcar.config import load_config, setting
from dcar.config.commands import DataSettings, DecoderSettings
from dcar.errors import CheckpointError, ConfigError
from dcar.model.batch import SpeechBatch
from dcar.model.car import head_targets
from dcar.model.cards import model_card
from dcar.model.draft import AnyDecoder
from dcar.model.load import load_decoder
from dcar.model.precision import cast_decoder, chosen_dtype, precision_of
from dcar.prepare.prepared import load_split, prepared_info
from dcar.process import run_claimed, run_command
from dcar.prompts.together import check_together
from dcar.sampling import sample
from dcar.sources.shipped import resolve
from dcar.train.batches import SpeechDataset
from dcar.train.checkpoints import data_stamp, last_of
from dcar.train.small import SmallSettings, SmallTrainer
from heads.candidates import candidate_features
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig, before_end


@dataclass
class TrainChunkScorerConfig(DecoderSettings, SmallSettings, DataSettings):
    """Settings of `dcar train-chunk-scorer`."""

    out: str = "runs/chunk_scorer"
    init_from: str = setting(
        "",
        "Chunk scorer to start from, with the same shape and codes; it may belong to another "
        "decoder. A few steps are enough if the decoder was fine-tuned from that one; starter = "
        "the shipped one, empty = from scratch.",
    )
    prompt_tokens: int = setting(
        50,
        "Length of the speaker prompt in training (bos layout only), as in the decoder's training.",
        minimum=1,
    )
    per_device_train_batch_size: int = 16
    positions: float = setting(
        0.3, "Share of the speech positions at which a chunk is sampled.", above=0, maximum=1
    )
    learning_rate: float = 3e-3
    weight_decay: float = 0.02
    width: int = setting(128, "Width of the layers.", minimum=1)
    window: int = setting(
        2, "Tokens that are read together: each one and those before it.", minimum=1
    )


class ChunkScorerTrainer(SmallTrainer):
    """Trainer that contrasts recorded chunks with chunks drawn by a frozen decoder."""

    model: ChunkScorer
    what = "a chunk scorer"

    def __init__(
        self,
        config: TrainChunkScorerConfig,
        model: ChunkScorer,
        decoder: AnyDecoder,
        train: SpeechDataset,
        dev: SpeechDataset,
    ):
        super().__init__(config, model, train, dev)
        decoder = cast_decoder(decoder, chosen_dtype(config.dtype, self.args.device))
        self.decoder = decoder.to(self.args.device).eval().requires_grad_(False)  # type: ignore[arg-type]

    @torch.no_grad()
    def examples(
        self, inputs: SpeechBatch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the examples at a share of a batch's positions: hidden states [2N, D], chunks
        [2N, K], of which the first N are recorded and the others drawn, and their features [2N,
        K, 3]."""
        decoder = self.decoder
        speech, positions = inputs["speech_ids"], inputs["positions"]
        draws = torch.rand(speech.shape, generator=generator).flatten().to(speech.device)
        chosen = positions[draws[positions] < self.config.positions]
        hidden = decoder.speech_hidden(inputs).flatten(0, 1)[chosen]
        heads = self.model.config.num_heads
        targets = head_targets(speech, inputs["speech_lengths"], heads, decoder.config.eos)
        recorded = targets.flatten(0, 1)[chosen]  # [N, K]
        logits = decoder.heads.logits(hidden, heads).float()
        draws = torch.rand(recorded.shape, generator=generator, dtype=torch.float64)
        drawn = sample(logits.softmax(-1), draws.to(hidden.device))
        chunks = torch.stack((recorded, drawn), 1)  # as two candidates
        features = candidate_features(logits, chunks)
        chunks, features = (x.transpose(0, 1).flatten(0, 1) for x in (chunks, features))
        return torch.cat((hidden, hidden)), chunks, features

    def _classified(
        self, model: Any, hidden: Tensor, tokens: Tensor, features: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for each prefix length, sums over the chunks [2N, K]: the loss, the number
        classified correctly, and the number of prefixes that count. Each is [2, K], for recorded
        and for drawn chunks."""
        ratio = model(hidden, tokens, features).float().cumsum(-1)  # [2N, K]
        counts = before_end(tokens, self.model.config.vocab_size - 1)
        sign = torch.ones_like(ratio)
        sign[: len(ratio) // 2] = -1
        loss = F.softplus(sign * ratio) * counts
        right = (sign * ratio < 0).float() * counts
        return tuple(x.view(2, -1, x.shape[1]).sum(1) for x in (loss, right, counts))  # type: ignore[return-value]

    def compute_loss(
        self,
        model,
        inputs: Any,  # a SpeechBatch
        return_outputs: bool = False,
        num_items_in_batch=None,
    ):
        """Return the logistic loss of a prefix in nats, averaged over both classes and all
        lengths."""
        loss, _, counts = self._classified(model, *self.examples(inputs))
        mean = (loss / counts.clamp(min=1)).mean()
        return (mean, loss) if return_outputs else mean

    def dev_metrics(self) -> dict[str, float]:
        """Return the loss, and the share of whole and of half chunks that are classified
        correctly, with the same sampled tokens at every evaluation."""
        generator = torch.Generator().manual_seed(self.config.seed + self.args.process_index)

        def measure(batch: SpeechBatch) -> Tensor:
            return torch.stack(self._classified(self.model, *self.examples(batch, generator)))

        loss, right, counts = self.dev_sums(measure)
        share = (right / counts.clamp(min=1)).mean(0)
        return {
            "loss": float((loss / counts.clamp(min=1)).mean()),
            "accuracy_whole": float(share[-1]),
            "accuracy_half": float(share[(len(share) - 1) // 2]),
        }


def run(config: TrainChunkScorerConfig) -> ChunkScorer:
    """Train (or resume training) and save the chunk scorer with its card, log and provenance in
    `config.out`.

    Raises ConfigError for a decoder with one head, DataError if the data is broken or has other
    tokens or phonemes than the decoder, CheckpointError if out holds another run or init_from has
    another shape.
    """
    prepared, decoder = prepared_info(config.data), load_decoder(config.decoder)
    check_together(decoder, prepared, config.data)
    if decoder.config.num_prediction_heads < 2:
        raise ConfigError(
            f"decoder {config.decoder} predicts one token per pass, so it has no chunks to score; "
            "choose a decoder with num_prediction_heads of at least 2"
        )
    shape = ChunkScorerConfig(
        decoder.config.hidden_size,
        decoder.config.num_prediction_heads,
        decoder.config.output_size,
        width=config.width,
        window=config.window,
        base_checksum=decoder.checksum(),
        tokenizer=decoder.config.tokenizer,
    )
    last = last_of(config, ChunkScorer.load_config, shape, "chunk scorer")
    train, dev = (
        SpeechDataset(
            load_split(config.data, split),
            decoder.config,  # type: ignore[arg-type]
            config.prompt_tokens,
            config.seed,
        )
        for split in ("train", "dev")
    )
    torch.manual_seed(config.seed)
    model = ChunkScorer(shape)
    if config.init_from:
        start = ChunkScorer.from_pretrained(resolve(config.init_from, "chunk_scorer"))
        if dataclasses.replace(start.config, base_checksum=shape.base_checksum) != shape:
            raise CheckpointError(
                f"init_from={config.init_from}: a chunk scorer of another shape or with other "
                f"codes ({start.config}, here {shape}); omit init_from to train from scratch"
            )
        model.load_state_dict(start.state_dict())
    else:
        model.start_embedding(decoder.speech_embedding.weight.detach())
    trainer = ChunkScorerTrainer(config, model, decoder, train, dev)
    return trainer.make(
        last,
        config,
        chunk_scorer_card,
        {"precision": precision_of(decoder)},
        data=data_stamp(config.data),
        base_checksum=shape.base_checksum,
    )


def chunk_scorer_card(chunk_scorer: ChunkScorer, source: Mapping[str, Any]) -> str:
    """Return the README.md of a chunk scorer."""
    config = chunk_scorer.config
    return model_card(
        "Chunk scorer",
        "Scores how much likelier the tokens of a chunk are together, in speech, than drawn by the "
        "decoder's heads independently. A chunk policy reads the score as a feature. The chunk "
        "scorer refuses any other decoder.",
        [
            (
                "size",
                f"{sum(p.numel() for p in chunk_scorer.parameters()):,} parameters, width "
                f"{config.width}",
            ),
            ("chunks", f"up to {config.num_heads} of {config.vocab_size} ids"),
            (
                "decoder",
                f"checksum `{config.base_checksum or 'not bound'}`, hidden size "
                f"{config.hidden_size}",
            ),
            ("checksum", f"`{chunk_scorer.checksum()}`"),
        ],
        source,
        metrics_of="dev split; loss in nats, accuracy on whole and half chunks, chance 0.5",
        tags=("density-ratio",),
        settings="learning_rate per_device_train_batch_size positions max_steps bf16 seed".split(),
        code="from heads.chunk_scorer import ChunkScorer\n\n"
        'chunk_scorer = ChunkScorer.from_pretrained("path/to/this/directory")\n'
        "chunk_scorer.check_base(decoder.checksum())",
    )


CONFIG = TrainChunkScorerConfig


def main(arguments: list[str] | None = None) -> None:
    run_claimed(run, load_config(CONFIG, arguments), resumes=True)


if __name__ == "__main__":
    sys.exit(run_command("dcar.train.chunk_scorer", main))
