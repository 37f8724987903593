"""From prepared datasets to prompts for decoding.

Two layouts, chosen by the decoder's `bos`:

- speaker prompt (bos): text of the target only; the speech prompt is a crop of another utterance of
  the same speaker, without its text, closed by BOS. Short, and no alignment of the prompt is
  needed.
- continuation (no bos; the papers'): another utterance of the speaker is the beginning of the same
  stream, its text stands before the target's text, and its tokens before the target's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dcar.decoding.records import Prompt
from dcar.errors import DataError
from dcar.prepare.columns import Split
from dcar.prompts.chooser import PromptChooser
from dcar.text.phonemes import text_to_ids


@dataclass(frozen=True)
class PromptItem:
    """One utterance to speak, with what is needed to voice and to evaluate it."""

    prompt: Prompt
    text: str
    speaker: str
    speaker_embedding: np.ndarray  # [F] voice features of the prompt utterance, for the vocoder
    reference_tokens: list[int]  # of the recording of this text
    prompt_utterance_id: str
    duration: float  # seconds of the recording
    # of prompt.text_ids, which begin with the prompt's own text in the continuation layout
    prompt_text_units: int = 0
    category: str = ""  # of a listed text (dcar/prompts/texts.py)
    # further ones of its row, for reward functions
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text_ids(self) -> tuple[int, ...]:
        """Of what is to be spoken alone."""
        return tuple(self.prompt.text_ids[self.prompt_text_units :])


def make_prompts(
    split: Split,
    prompt_tokens: int,
    seed: int,
    bos: bool = True,
    rows: Sequence[int] | np.ndarray | None = None,
    chooser: PromptChooser | None = None,
) -> list[PromptItem]:
    """A prompt for every utterance of a prepared split, or for those in some `rows` of it, in their
    order; the same for every method and run with this seed. Only these rows and those of their
    prompts are read. chooser: that of the split, made once by callers that need rows repeatedly.

    A prompt that the corpus names (`prompt_audio`, `prompt_text` of a manifest) is taken; otherwise
    another utterance of the speaker. prompt_tokens: length of the crop in the speaker-prompt layout
    (`bos`); the continuation layout takes the prompt whole, and DataError where a named prompt
    lacks the text that this layout needs.
    """
    chooser = chooser or PromptChooser(split, prompt_tokens)
    items = []
    for i in map(int, range(len(split)) if rows is None else rows):
        row = split.rows[i]
        rng = np.random.default_rng([seed, i])
        if row["prompt_speech"]:
            if not bos and not row["prompt_text"]:
                raise DataError(
                    f"{row['source']}: utterance {row['id']} has a prompt without prompt_text, "
                    "which a "
                    "decoder without BOS needs; add it to the manifest"
                )
            name, speech, voice = f"{row['id']} (prompt)", row["prompt_speech"], row["prompt_voice"]
            # a retokenized corpus brings the prompt's text ids along
            prompt_text_ids = (
                [] if bos else row.get("prompt_text_ids") or text_to_ids(row["prompt_text"])
            )
        else:
            other = chooser.choose(i, rng)
            source, speech = split.rows[other], chooser.speech[other]
            name, voice = source["id"], source["voice"]
            prompt_text_ids = [] if bos else source["text_ids"]
        text_ids = [*prompt_text_ids, *row["text_ids"]]
        prompt_ids = chooser.crop(speech, rng) if bos else list(speech)
        items.append(
            PromptItem(
                Prompt(row["id"], tuple(text_ids), tuple(prompt_ids)),
                row["text"],
                row["speaker"],
                np.asarray(voice, np.float32),
                list(row["speech"]),
                name,
                row["duration"],
                len(prompt_text_ids),
            )
        )
    return items
