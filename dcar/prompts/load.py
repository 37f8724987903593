"""Prompts of a prepared split that fit a decoder, and the vocoder for them: chosen and checked
in one place for stage two, comparisons and analyses."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from dcar.corpus.rows import Utterance
from dcar.errors import DataError
from dcar.model.draft import AnyDecoder
from dcar.prepare.columns import Split
from dcar.prepare.prepared import load_split, prepared_info
from dcar.prepare.recordings import Sources, source_utterances
from dcar.prompts.choose import drawn
from dcar.prompts.chooser import with_prompts
from dcar.prompts.items import PromptItem, make_prompts
from dcar.prompts.together import check_together
from dcar.vocoder.base import PromptAudio, Vocoder
from dcar.vocoder.load import load_vocoder, needs_prompt_audio
from dcar.voices.speech import find_speech


def split_for(decoder: AnyDecoder, data: str, split: str) -> Split:
    """Return a prepared split whose ids fit the decoder. Raises DataError if the corpus was made
    with another tokenizer or phoneme inventory than the decoder's."""
    check_together(decoder, prepared_info(data), data)
    return load_split(data, split)


def load_prompts(
    data: str,
    split: str,
    base: AnyDecoder,
    prompt_tokens: int,
    seed: int,
    limit: int | None = None,
    min_seconds: float = 0.0,
) -> list[PromptItem]:
    """Return prompts (`make_prompts`) for at most `limit` utterances of `min_seconds` or more,
    chosen by `seed` among those that have a prompt (`with_prompts`). No other rows are read.
    Raises DataError if there are none."""
    chosen = with_prompts(split_for(base, data, split), f"{data}: split {split}")
    rows = drawn(chosen, seed, limit, min_seconds)
    if not len(rows):
        raise DataError(f"{data}: split {split} has no utterance of {min_seconds} s or more")
    return make_prompts(chosen, prompt_tokens, seed, base.config.bos, rows)


def vocoder_for(
    decoder: AnyDecoder,
    data: str,
    items: Sequence[PromptItem],
    spec: str,
    device: str = "cpu",
    prompts: PromptAudio | None = None,
) -> Vocoder:
    """Return the vocoder of a setting (`dcar.vocoder.load`) for prompts of a prepared corpus.

    prompts: recordings of the items' voices; if they are not given and the vocoder needs them, they
    are read from the corpus. Raises CheckpointError if the vocoder is for another tokenizer than
    the decoder's, or for another token rate than the corpus has.
    """
    if prompts is None and needs_prompt_audio(spec):
        prompts = PromptAudio.of_items(items, corpus_recordings(data))
    vocoder = load_vocoder(spec, device, prompts)
    check_together(decoder, prepared_info(data), data, vocoder)
    return vocoder


def corpus_recordings(prepared: str) -> Callable[[str], tuple[np.ndarray, int]]:
    """Return a function that reads the recording (waveform, rate in Hz) of an utterance id.

    The id "ID (prompt)" stands for the prompt that the corpus gives for ID. A recording whose path
    is in the prepared corpus is read from there; for any other, the whole corpus is listed, once.
    The function raises DataError if the corpus has no such recording.
    """
    sources: Callable[[], Sources] = cache(lambda: source_utterances(prepared))
    splits = cache(
        lambda: [load_split(prepared, split) for split in prepared_info(prepared).counts]
    )

    def utterance(utterance_id: str) -> Utterance:
        for split in splits():
            place = split.find(utterance_id)
            if place is None:
                continue
            row = split.rows.select_columns(["audio", "speed", "text", "speaker", "source"])[place]
            audio = Path(row["audio"])
            if row["speed"] == 1 and audio.is_absolute() and audio.is_file():
                return Utterance(
                    utterance_id, row["text"], row["speaker"], row["audio"], source=row["source"]
                )
        return sources()[utterance_id]

    def recording(utterance_id: str) -> tuple[np.ndarray, int]:
        if utterance_id.endswith(" (prompt)"):
            audio = sources()[utterance_id.removesuffix(" (prompt)")].load_prompt()
            if audio is None:
                raise DataError(
                    f"{prepared}: {utterance_id} no longer has audio in the corpus; prepare the "
                    "corpus again"
                )
            return find_speech(*audio).cut(*audio), audio[1]  # the same part as in preparation
        return utterance(utterance_id).load()

    return recording
