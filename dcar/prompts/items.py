"""Prompts for decoding, made from prepared corpora.

The decoder's `bos` selects one of two layouts:

- speaker prompt (bos): text of the target only; the speech prompt is a crop of another utterance of
  the same speaker, without its text, closed by BOS. It is short and needs no alignment of the
  prompt.
- continuation (no bos, the papers' layout): the stream begins with another utterance of the
  speaker; its text precedes the target's text, and its tokens precede the target's tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dcar.decoding.records import Prompt
from dcar.errors import DataError
from dcar.prepare.columns import Split
from dcar.prompts.chooser import PromptChooser
from dcar.text.languages import DEFAULT
from dcar.text.units import units_for


@dataclass(frozen=True, eq=False)
class PromptItem(Prompt):
    """Utterance to decode, with what the vocoder and the evaluation need. Two are equal if the
    decoder reads the same."""

    text: str
    speaker: str
    speaker_embedding: np.ndarray  # [F] voice features of the prompt utterance, for the vocoder
    reference_tokens: list[int]  # tokens of the recording of this text
    prompt_utterance_id: str
    duration: float  # seconds of the recording
    # length of the prompt's own text in text_ids, 0 except in the continuation layout
    prompt_text_units: int = 0
    category: str = ""  # category of a listed text (dcar/prompts/texts.py)
    language: str = DEFAULT  # code of ISO 639
    # further columns of its row, for reward functions
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target_text_ids(self) -> tuple[int, ...]:
        """Text ids of the target alone, without those of the prompt."""
        return self.text_ids[self.prompt_text_units :]


def make_prompts(
    split: Split,
    prompt_tokens: int,
    seed: int,
    bos: bool = True,
    rows: Sequence[int] | np.ndarray | None = None,
    chooser: PromptChooser | None = None,
) -> list[PromptItem]:
    """Return a prompt for every utterance of a prepared split, or for those in `rows`, in their
    order.

    The prompts depend on the split and the seed alone, so every method and run gets the same. Only
    these rows and those of their prompts are read. A prompt that the corpus names (`prompt_audio`,
    `prompt_text` of a manifest) is used; otherwise another utterance of the speaker.

    prompt_tokens: length of the crop in the speaker-prompt layout (`bos`); the continuation layout
    uses the whole prompt. chooser: chooser of the split; callers that need rows repeatedly build it
    once. Raises DataError if a named prompt lacks the text that the continuation layout needs.
    """
    chooser = chooser or PromptChooser(split, prompt_tokens)
    items = []
    for i in map(int, range(len(split)) if rows is None else rows):
        row = split.rows[i]
        rng = np.random.default_rng([seed, i])
        prompt_text_ids: Sequence[int] = []
        if row["prompt_speech"]:
            if not bos and not row["prompt_text"]:
                raise DataError(
                    f"utterance {row['id']} ({row['source'] or 'no source recorded'}): its prompt "
                    "has no prompt_text, which a decoder without BOS needs; add prompt_text to "
                    "the manifest and prepare the corpus again"
                )
            name, speech, voice = f"{row['id']} (prompt)", row["prompt_speech"], row["prompt_voice"]
            if not bos:  # a corpus contains them unless they are the default ones
                prompt_text_ids = row.get("prompt_text_ids") or units_for()(row["prompt_text"])
        else:
            other = chooser.choose(i, rng)
            source, speech = split.rows[other], chooser.speech[other]
            name, voice = source["id"], source["voice"]
            if not bos:
                prompt_text_ids = source["text_ids"]
        text_ids = [*prompt_text_ids, *row["text_ids"]]
        prompt_ids = chooser.crop(speech, rng) if bos else list(speech)
        items.append(
            PromptItem(
                row["id"],
                tuple(text_ids),
                tuple(prompt_ids),
                row["text"],
                row["speaker"],
                np.asarray(voice, np.float32),
                list(row["speech"]),
                name,
                row["duration"],
                len(prompt_text_ids),
                language=row.get("language", DEFAULT),
            )
        )
    return items
