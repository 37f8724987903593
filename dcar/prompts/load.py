"""The prompts of a prepared split that a decoder can speak, and the vocoder that gives them a
voice: chosen and checked alike by stage two, by comparisons and by analyses.
"""

from __future__ import annotations

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
from dcar.prompts.items import PromptItem, make_prompts
from dcar.prompts.together import check_together
from dcar.vocoder.base import PromptAudio, Vocoder
from dcar.vocoder.load import hears_prompts, load_vocoder
from dcar.voices.speech import find_speech


def split_for(decoder: AnyDecoder, data: str, split: str) -> Split:
    """A prepared split that a decoder can speak; DataError if the corpus is of another tokenizer
    or phoneme inventory than the decoder."""
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
    """Prompts (`make_prompts`) for at most `limit` utterances of `min_seconds` or more, chosen
    by `seed`; DataError if there are none. No other rows are read."""
    found = split_for(base, data, split)
    rows = drawn(found, seed, limit, min_seconds)
    if not len(rows):
        raise DataError(f"{data}: split {split} has no utterance of {min_seconds} s or more")
    return make_prompts(found, prompt_tokens, seed, base.config.bos, rows)


def vocoder_for(
    decoder: AnyDecoder,
    data: str,
    items: Sequence[PromptItem],
    spec: str,
    device: str = "cpu",
    prompts: PromptAudio | None = None,
) -> Vocoder:
    """The vocoder of a setting (`dcar.vocoder.load`) for prompts of a prepared corpus.
    CheckpointError if it speaks tokens of another tokenizer than the decoder's or at another rate
    than the corpus has.

    prompts: recordings of the items' voices; read from the corpus where they are not given and the
    vocoder needs them.
    """
    if prompts is None and hears_prompts(spec):
        prompts = PromptAudio.of_items(items, corpus_recordings(data))
    vocoder = load_vocoder(spec, device, prompts)
    check_together(decoder, prepared_info(data), data, vocoder)
    return vocoder


def corpus_recordings(prepared: str) -> Callable[[str], tuple[np.ndarray, int]]:
    """Recordings (waveform, rate in Hz) of a prepared corpus by utterance id; "ID (prompt)" is the
    prompt that the corpus gives for ID. DataError if it has no such recording.

    A recording whose path is in the prepared corpus is read from there. For others the whole corpus
    is listed, once."""
    sources: Callable[[], Sources] = cache(lambda: source_utterances(prepared))
    splits = cache(
        lambda: [load_split(prepared, split) for split in prepared_info(prepared)["counts"]]
    )

    def utterance(utterance_id: str) -> Utterance:
        for split in splits():
            if (place := split.find(utterance_id)) is not None:
                row = split.rows.select_columns(["audio", "speed", "text", "speaker", "source"])[
                    place
                ]
                if (
                    row["speed"] == 1
                    and Path(row["audio"]).is_absolute()
                    and Path(row["audio"]).is_file()
                ):
                    return Utterance(
                        utterance_id,
                        row["text"],
                        row["speaker"],
                        row["audio"],
                        source=row["source"],
                    )
        return sources()[utterance_id]

    def recording(utterance_id: str) -> tuple[np.ndarray, int]:
        if utterance_id.endswith(" (prompt)"):
            found = sources()[utterance_id.removesuffix(" (prompt)")].load_prompt()
            if found is None:
                raise DataError(
                    f"{prepared}: {utterance_id} has no audio in the corpus any more; prepare it "
                    "again"
                )
            return find_speech(*found).cut(*found), found[1]  # what the corpus was prepared from
        return utterance(utterance_id).load()

    return recording
