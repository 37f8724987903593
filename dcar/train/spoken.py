"""Choose the best step of a training by spoken word errors: at every evaluation the decoder
synthesises dev sentences, and a recogniser transcribes them (`spoken.sentences`). Only such a run
loads this module, because stage one itself needs no decoding, vocoder or recogniser.

With minutes of one voice the dev loss falls while the speech gets worse, so the loss cannot choose.
The decoder from which training started is measured first. It is kept if no step is better.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerState

from dcar.decoding import Engine, FixedChunk
from dcar.errors import CheckpointError
from dcar.model.car import CARDecoder
from dcar.prompts.items import PromptItem
from dcar.prompts.load import load_prompts, vocoder_for
from dcar.recognition.base import Recognizer, transcripts
from dcar.recognition.load import load_recognizer
from dcar.storage import replacing, sync, write_text, writing
from dcar.text.bootstrap import corpus_interval
from dcar.text.wer import word_errors
from dcar.train.settings import SpokenSettings
from dcar.vocoder.base import Vocoder
from dcar.vocoder.voicing import voice

logger = logging.getLogger(__name__)

RECORD = "spoken.json"
DECODER_BATCH = 16
VOCODER_BATCH = 8


class SpokenJudge:
    """Word errors of a decoder on fixed dev sentences, with the same prompts and random numbers
    each time."""

    def __init__(
        self,
        settings: SpokenSettings,
        items: Sequence[PromptItem],
        vocoder: Vocoder,
        recognizer: Recognizer,
        seed: int = 0,
    ):
        self.settings, self.items, self.seed = settings, items, seed
        self.vocoder, self.recognizer = vocoder, recognizer

    @classmethod
    def load(
        cls, settings: SpokenSettings, model: CARDecoder, data: str, prompt_tokens: int, seed: int
    ) -> SpokenJudge:
        """Load dev sentences of the prepared corpus `data`, and the vocoder and the recogniser
        of the settings."""
        device = str(next(model.parameters()).device)
        items = load_prompts(data, "dev", model, prompt_tokens, seed, settings.sentences)
        return cls(
            settings,
            items,
            vocoder_for(model, data, items, settings.vocoder, device),
            load_recognizer(settings.recognizer, device=device),
            seed,
        )

    @torch.no_grad()
    def __call__(self, model: CARDecoder) -> tuple[list[int], list[int]]:
        """Return the word errors and the number of reference words of every dev sentence,
        synthesised by `model`."""
        size = min(self.settings.chunk, model.config.num_prediction_heads)
        training = model.training
        model.eval()
        try:
            # not `decode`, which would keep the buffers while the decoder is trained
            method, rows = FixedChunk(size), min(DECODER_BATCH, len(self.items))
            engine = Engine(model, method, self.settings.sampling, rows)
            results = engine.decode(self.items, seed=self.seed)
        finally:
            model.train(training)
        waves = voice(
            self.vocoder,
            [r.tokens for r in results],
            [i.speaker_embedding for i in self.items],
            [i.text for i in self.items],
            VOCODER_BATCH,
        )
        languages = [item.language for item in self.items]
        texts = transcripts(self.recognizer, waves, self.vocoder.sample_rate, languages)
        errors = [
            word_errors(item.text, text, item.language)
            for item, text in zip(self.items, texts, strict=True)
        ]
        return [e.errors for e in errors], [e.reference_words for e in errors]


class SpokenChoice(TrainerCallback):
    """Callback that measures the decoder at every evaluation, logs `eval_spoken_wer` and keeps the
    weights of the best step in `out`.

    `spoken.json` contains the errors of every step. A resumed run reads it and measures no step
    twice.
    """

    def __init__(self, trainer: Any, judge: SpokenJudge, out: str | Path):
        self.trainer, self.judge, self.out = trainer, judge, Path(out)
        # results by step: on the main process, and on all those that a resumed run has read
        self.steps: dict[int, dict[str, Any]] = {}
        # steps measured, the same on every process, so that either all or none wait
        self.seen: set[int] = set()

    @classmethod
    def load(cls, trainer: Any) -> SpokenChoice:
        """Create the callback for a trainer of stage one (`dcar.train.car.CARTrainer`) from its
        settings `spoken`."""
        config = trainer.config
        judge = SpokenJudge.load(
            config.spoken, trainer.model, config.data, config.prompt_tokens, config.seed
        )
        return cls(trainer, judge, config.out)

    @property
    def best(self) -> int:
        """Step with the fewest word errors; the earliest if several are equal."""
        return min(self.steps, key=lambda step: (sum(self.steps[step]["errors"]), step))

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step:
            self.read()
        else:
            self._remove_but()
            self.look(state)

    def on_evaluate(self, args, state, control, **kwargs):
        self.look(state)

    def look(self, state: TrainerState) -> None:
        """Measure the decoder of this step, unless that was done before. All processes wait for
        the main one."""
        step = state.global_step
        if step in self.seen:
            return
        self.seen.add(step)
        if state.is_world_process_zero:
            model = cast(CARDecoder, self.trainer.model)
            errors, words = self.judge(model)
            self.steps[step] = {"wer": sum(errors) / sum(words), "errors": errors, "words": words}
            wer = corpus_interval(errors, words)
            if self.best == step:
                self._save(model, step)
            with writing(self.out):
                write_text(
                    self.out / RECORD,
                    json.dumps({"best": self.best, "steps": self.steps}, indent=1) + "\n",
                )
            self._remove_but(self.best)
            ends = " to ".join(f"{100 * end:.1f}" for end in wer.ends or ())
            logger.info(
                "step %d: %.1f %% word errors on %d dev sentences%s; best so far: step %d",
                step,
                100 * wer.value,
                len(words),
                f" ({ends})" if ends else "",
                self.best,
            )
            names = ("eval_spoken_wer_low", "eval_spoken_wer_high")
            self.trainer.log(
                {"eval_spoken_wer": wer.value, **dict(zip(names, wer.ends or (), strict=False))}
            )
        self.trainer.accelerator.wait_for_everyone()

    def read(self) -> None:
        """Read the steps that an interrupted run measured. Raises CheckpointError if they cannot
        be read."""
        path = self.out / RECORD
        try:
            steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
            self.steps = {int(step): measured for step, measured in steps.items()}
            self.seen = set(self.steps)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}), so the best step of this run is not known; "
                "start again with resume_from_checkpoint=never"
            ) from error

    def agreed(self) -> int:
        """Return the best step, which only the main process knows, on all processes; 0 if none
        was measured."""
        return int(broadcast_object_list([self.best if self.steps else 0])[0])

    def best_weights(self, step: int) -> dict[str, torch.Tensor]:
        """Return the state dict of the best step."""
        return load_file(self._weights(step))

    def _weights(self, step: int) -> Path:
        return self.out / f"best-{step}.safetensors"

    def _save(self, model: CARDecoder, step: int) -> None:
        with writing(self.out), replacing(self._weights(step)) as part:
            save_file(
                {
                    name: t.detach().cpu().clone().contiguous()
                    for name, t in model.state_dict().items()
                },
                part,
            )
            sync(part)

    def _remove_but(self, step: int | None = None) -> None:
        if not self.trainer.is_world_process_zero():
            return
        for path in [*self.out.glob("best-*.safetensors"), *self.out.glob(".best-*.part")]:
            if step is None or path != self._weights(step):
                path.unlink()
        if step is None:
            (self.out / RECORD).unlink(missing_ok=True)
