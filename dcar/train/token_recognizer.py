"""Train a recogniser that reads speech tokens, not sound: CTC over the codes of a prepared corpus to its phonemes.

    dcar train-token-recognizer --config launch/recipes/token_recognizer_starter.yaml
    accelerate launch -m dcar.train.token_recognizer data=runs/prepared out=runs/token_recognizer

It serves the reward `token_likelihood` of stage two. Recordings have no errors of a decoder, so training makes some:
a share of the tokens is replaced by others, and spans of them are hidden. Leaves behind in out: weights, config.json,
config.yaml, README.md, log.jsonl, provenance.json, checkpoints. Run again, it goes on from the last checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from dcar.config import check, load_config, save_config, setting
from dcar.config.schema import seed_setting
from dcar.decoding.batch import pad
from dcar.errors import CheckpointError, DataError
from dcar.model.cards import model_card
from dcar.prepare.prepared import load_prepared, prepared_info, tokenizer_identity
from dcar.process import run_command
from dcar.recognition.ctc import frames_needed
from dcar.recognition.tokens import BLANK, TokenRecognizer, TokenRecognizerConfig
from dcar.storage import digest, writing
from dcar.text.phonemes import TEXT_TOKENIZER, TEXT_VOCAB_SIZE
from dcar.tracking import provenance
from dcar.train.checkpoints import latest_checkpoint
from dcar.train.small import SmallTrainer, hidden_spans

logger = logging.getLogger(__name__)

MAX_TOO_SHORT = 0.05
"""Share of a split that may have fewer tokens than CTC needs: quick speakers, not a tokenizer that is too slow."""


@dataclass
class TrainTokenRecognizerConfig:
    """Settings of `dcar train-token-recognizer`."""

    data: str = setting("runs/prepared", "Folder written by `dcar prepare`.", place="folder")
    out: str = setting("runs/token_recognizer", "Folder to write.", place="folder")
    batch_size: int = setting(32, "Utterances of a process per step.", minimum=1)
    max_steps: int = setting(1700, "Updates of the weights.", minimum=1)
    learning_rate: float = setting(2e-3, "Peak of AdamW; it rises, then falls by a cosine.", above=0)
    weight_decay: float = setting(0.05, "Of matrices.", minimum=0)
    warmup_steps: int = setting(170, "Steps in which the learning rate rises.", minimum=0)
    max_grad_norm: float = setting(1.0, "Gradients are clipped to this norm, 0 = not.", minimum=0)
    input_corruption: float = setting(0.08, "Share of speech tokens replaced at random while training.", minimum=0,
                                      below=1)
    longest_span: int = setting(12, "Tokens of a hidden span at most, one in every 60 tokens; 0 = none.", minimum=0)
    bf16: bool = setting(False, "bfloat16 autocast; scores are taken in float32.")
    seed: int = seed_setting(0, "Of weights, order and corruption.")
    eval_steps: int = setting(250, "Steps between evaluations on the dev split.", minimum=1)
    save_steps: int = setting(250, "Steps between checkpoints.", minimum=1)
    log_steps: int = setting(25, "Steps between lines of the log.", minimum=1)
    half_weights: bool = setting(False, "Store the finished weights in float16: half the file.")
    resume: bool = setting(True, "Go on from the last checkpoint in out, bit for bit.")
    model: TokenRecognizerConfig = setting(TokenRecognizerConfig, "Shape; vocabularies are taken from the data.")

    def __post_init__(self) -> None:
        check(self)


class TokenTexts(Dataset):
    """Tokens and phonemes of a prepared split; items are addressed by (epoch, index), so that resuming needs no state.

    Utterances with fewer tokens than CTC needs for their phonemes are left out; DataError where they are many.
    """

    def __init__(self, dataset: Any, config: TrainTokenRecognizerConfig, where: str):
        pairs = list(zip(dataset["speech"], dataset["text_ids"], strict=True))
        kept = [(speech, text) for speech, text in pairs if len(text) and len(speech) >= frames_needed(text)]
        if len(pairs) - len(kept) > MAX_TOO_SHORT * len(pairs):
            raise DataError(f"{where}: {len(pairs) - len(kept)} of {len(pairs)} utterances have fewer tokens than CTC "
                            "needs for their phonemes, so a token recogniser cannot be trained on them; a tokenizer of "
                            "more tokens a second is needed")
        if len(kept) < len(pairs):
            logger.warning("%s: %d utterances have fewer tokens than CTC needs and are left out", where,
                           len(pairs) - len(kept))
        self.config = config
        self.speech, self.texts = [s for s, _ in kept], [t for _, t in kept]
        self.lengths = [len(s) for s in self.speech]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, address: tuple[int, int]) -> dict[str, np.ndarray]:
        """What a step of training sees of an utterance."""
        epoch, index = address
        rng = np.random.default_rng([self.config.seed, epoch, index])
        return {"speech": self.corrupted(np.asarray(self.speech[index]), rng), "text": np.asarray(self.texts[index])}

    def corrupted(self, speech: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Tokens [T], a share of them others and some spans hidden."""
        config, codes = self.config, self.config.model.speech_vocab_size
        hit = rng.random(len(speech)) < config.input_corruption
        speech = np.where(hit, rng.integers(0, codes, len(speech)), speech)
        for span in hidden_spans(len(speech), config.longest_span, rng):
            speech[span] = codes  # TokenRecognizer.hidden_code
        return speech


def collate(examples: Sequence[dict[str, np.ndarray]]) -> dict[str, Tensor]:
    """A padded batch: speech_ids [B, T], speech_lengths [B], text_ids [B, U], text_lengths [B]."""
    speech, speech_lengths = pad([e["speech"].tolist() for e in examples], "cpu")
    texts, text_lengths = pad([e["text"].tolist() for e in examples], "cpu")
    return {"speech_ids": speech, "speech_lengths": speech_lengths, "text_ids": texts, "text_lengths": text_lengths}


class TokenRecognizerTrainer(SmallTrainer):
    """The Trainer with the CTC loss, and phoneme errors as evaluation."""

    model: TokenRecognizer
    eval_dataset: TokenTexts

    def __init__(self, config: TrainTokenRecognizerConfig, model: TokenRecognizer, train: TokenTexts, dev: TokenTexts):
        super().__init__("a token recogniser", config, model, train, dev, collate)

    def compute_loss(self, model, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch=None):
        """CTC loss, nats per phoneme, mean over utterances."""
        log_probs = model(inputs["speech_ids"], inputs["speech_lengths"])
        loss = functional.ctc_loss(log_probs.float().transpose(0, 1), inputs["text_ids"], inputs["speech_lengths"],
                                   inputs["text_lengths"], blank=BLANK)
        return (loss, log_probs) if return_outputs else loss

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Of the dev split, over all processes: nats per phoneme (`eval_loss`) and phoneme error rate."""
        self.model.eval()
        dev = eval_dataset or self.eval_dataset
        mine = slice(self.args.process_index, None, self.args.world_size)
        speech, texts = dev.speech[mine], dev.texts[mine]
        sums = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        if speech:
            told = self.model.log_likelihood(speech, texts)
            errors = self.model.error_rate(speech, texts)
            nats = -sum(value * len(text) for value, text in zip(told, texts, strict=True))
            edits = sum(e.errors for e in errors.utterances if e is not None)
            sums = sums.new_tensor([nats, edits, errors.reference_words])
        nats, edits, phonemes = self.accelerator.reduce(sums, "sum").tolist()
        return self.evaluated({f"{metric_key_prefix}_loss": nats / phonemes,
                               f"{metric_key_prefix}_phoneme_error_rate": edits / phonemes})


def run(config: TrainTokenRecognizerConfig) -> TokenRecognizer:
    """Train (or go on training) and save the recogniser with its card, log and provenance into `config.out`.

    Raises DataError for data that is missing, broken or without phonemes, CheckpointError where out holds another run.
    """
    out, given = Path(config.out), dataclasses.replace(config)
    prepared = prepared_info(config.data)
    if prepared["phonemes"]["version"].startswith(TEXT_TOKENIZER):
        raise DataError(f"{config.data}: its text ids are those of a language model, not phonemes; give the corpus as "
                        "it was before `dcar retokenize`")
    config = dataclasses.replace(config, model=dataclasses.replace(
        config.model, speech_vocab_size=prepared["tokenizer"]["vocab_size"], text_vocab_size=TEXT_VOCAB_SIZE,
        tokenizer=tokenizer_identity(prepared), phonemes=prepared["phonemes"]["version"]))
    last = latest_checkpoint(out) if config.resume else None
    if last and (found := TokenRecognizer.load_config(last)) != config.model:
        raise CheckpointError(f"{last}: a checkpoint of another token recogniser ({found}, here {config.model}); "
                              "choose another out, or resume=false to start again")
    train, dev = (TokenTexts(load_prepared(config.data, split), config, f"{config.data}: split {split}")
                  for split in ("train", "dev"))
    torch.manual_seed(config.seed)
    model = TokenRecognizer(config.model)
    trainer = TokenRecognizerTrainer(config, model, train, dev)
    if trainer.is_world_process_zero():
        with writing(out):
            save_config(given, out / "config.yaml")
        logger.info("%.2f M parameters, %d training utterances, %d processes",
                    sum(p.numel() for p in model.parameters()) / 1e6, len(train), trainer.args.world_size)
    trainer.origin = provenance(
        config=dataclasses.asdict(config), seed=config.seed,
        data={"path": config.data, "prepared.json": digest(Path(config.data) / "prepared.json")})
    trainer.fit(last)
    with trainer.doing("evaluating and exporting the trained recogniser"), writing(out):
        return trainer.export(token_recognizer_card, half=config.half_weights, data=prepared)


def token_recognizer_card(recognizer: TokenRecognizer, source: Mapping[str, Any]) -> str:
    """README.md of a token recogniser."""
    config = recognizer.config
    return model_card(
        "Token recogniser", "Reads phonemes in speech tokens, without sound: CTC over the codes. It serves the reward "
        "`token_likelihood` of stage two, and is no judge of what was trained by it.",
        [("size", f"{sum(p.numel() for p in recognizer.parameters()):,} parameters, {len(config.dilations)} layers, "
                  f"width {config.hidden_size}"),
         ("speech", f"{config.speech_vocab_size} codes of {config.tokenizer}"),
         ("text", f"{config.phonemes}; id 0 is CTC's blank"), ("checksum", f"`{recognizer.checksum()}`")],
        source, metrics_of="dev split; loss in nats per phoneme", tags=("ctc",),
        settings=("learning_rate", "batch_size", "max_steps", "input_corruption", "longest_span", "bf16", "seed"),
        code="from dcar.recognition.load import load_token_recognizer\n\n"
             'recognizer = load_token_recognizer("path/to/this/directory")\n'
             "print(recognizer.read([[3, 1, 4, 1, 5]]))  # phoneme ids of every utterance")


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(load_config(TrainTokenRecognizerConfig, arguments))


if __name__ == "__main__":
    sys.exit(run_command("dcar.train.token_recognizer", main))
