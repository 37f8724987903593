"""Lists of texts without recordings, spoken with the prompts of a prepared split in turn.

A list is a text file: one text a line, or `category<TAB>text`; empty lines are skipped. Two ship,
on which nothing is to be tuned: `hard`, 200 texts in the manner of seed-tts-eval's hard cases, and
`short`, 80 texts of one to four words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, zip_longest
from pathlib import Path

from dcar.errors import DataError, TextError
from dcar.prompts.items import PromptItem
from dcar.sources.shipped import shipped
from dcar.storage import text_lines
from dcar.text.phonemes import normalize_text, text_to_ids

LISTS = {"hard": "hard_texts", "short": "short_texts"}  # what ships


@dataclass(frozen=True)
class ListedText:
    """A text of a list."""

    id: str  # category and line
    text: str  # in spoken form, against which a transcript is measured
    text_ids: tuple[int, ...]
    category: str = ""


def text_list(source: str | Path) -> Path:
    """The file of a list, which may be the name of one that ships."""
    return shipped(LISTS[str(source)]) if str(source) in LISTS else Path(source)


def read_texts(
    source: str | Path, encode: Callable[[str], list[int]] = text_to_ids
) -> list[ListedText]:
    """The texts of a list, in order. encode: text → ids that a decoder reads.

    DataError where it cannot be read or is empty; where lines are wrong or cannot be spoken, with
    their numbers.
    """
    path = text_list(source)
    if not path.is_file():
        raise DataError(
            f"{path}: cannot be read as a list of texts (no such file); give a UTF-8 file with "
            "one text a "
            f"line, or texts={' or '.join(LISTS)}"
        )
    texts, faults = [], []
    for number, line, fault in text_lines(path):
        if fault is not None:
            faults.append(f"{path}:{number}: {fault}")
            continue
        *category, text = (part.strip() for part in line.split("\t"))
        try:
            if len(category) > 1 or category == [""]:
                raise TextError("expected a text, or category<TAB>text")
            kind = "".join(category)
            texts.append(
                ListedText(
                    f"{kind or 'text'}-{number:04d}",
                    normalize_text(text),
                    tuple(encode(text)),
                    kind,
                )
            )
        except TextError as error:
            faults.append(f"{path}:{number}: {error}")
    if faults:
        raise DataError(
            "\n".join([*faults[:20], f"{len(faults)} wrong lines; repair or remove them"])
        )
    if not texts:
        raise DataError(f"{path}: holds no text; write one a line")
    return texts


def text_prompts(texts: Sequence[ListedText], items: Sequence[PromptItem]) -> list[PromptItem]:
    """Every text with the prompt of one of a split's `items`: the speakers in turn, each with its
    prompts in turn. The same texts and items give the same prompts.

    What would need a recording of the text is empty: reference_tokens, and 0 s of duration.
    """
    by_speaker = defaultdict(list)
    for item in sorted(items, key=lambda i: (i.speaker, i.prompt.utterance_id)):
        by_speaker[item.speaker].append(item)
    turns = [
        item for turn in zip_longest(*by_speaker.values()) for item in turn if item is not None
    ]
    return [
        replace(
            item,
            prompt=replace(
                item.prompt,
                utterance_id=text.id,
                text_ids=(*item.prompt.text_ids[: item.prompt_text_units], *text.text_ids),
            ),
            text=text.text,
            reference_tokens=[],
            duration=0.0,
            category=text.category,
        )
        for text, item in zip(texts, cycle(turns), strict=False)
    ]
