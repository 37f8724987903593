"""Lists of texts without recordings, each synthesised with a prompt of a prepared split, in turn.

A list is a text file with one text per line, or `category<TAB>text`; empty lines are skipped. Of a
list of seed-tts-eval (`id|prompt text|prompt wav|text`, in a file `….lst`) only the text is used.

Three lists ship, and nothing may be tuned on them: `hard`, 200 texts in the manner of
seed-tts-eval's hard cases; `short`, 80 texts of one to four words; and `thousand`, 1,000 sentences
with names, numbers, long clauses, lists and dialogue, enough to tell half a point of word errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from dcar.corpus.rows import in_turn
from dcar.errors import DataError, TextError
from dcar.prompts.items import PromptItem
from dcar.sources.shipped import shipped
from dcar.storage import text_lines
from dcar.text.base import TextUnits
from dcar.text.languages import DEFAULT, language_of
from dcar.text.units import units_for

# names of the lists that ship
LISTS = {"hard": "hard_texts", "short": "short_texts", "thousand": "thousand_texts"}
SPLIT = "split"  # name of the sentences of a split, which have recordings
TITLES = {
    SPLIT: "sentences",
    "hard": "hard texts",
    "short": "short texts",
    "thousand": "written sentences",
}


@dataclass(frozen=True)
class ListedText:
    """One text of a list."""

    id: str  # category and line number
    text: str  # as it is read, with which a transcript is compared
    text_ids: tuple[int, ...]
    category: str = ""
    language: str = DEFAULT


def name_and_limit(texts: str) -> tuple[str, int]:
    """Return the name of a set of texts and the number of those to use: "hard:100", or "hard" for
    all (0)."""
    name, _, limit = texts.rpartition(":")
    return (name, int(limit)) if name and limit.isdecimal() else (texts, 0)


def titles_of(names: Sequence[str]) -> dict[str, str]:
    """Return a title for each set of texts: that of a shipped one, else by the name of the file,
    with as many of its folders as tell it from the others."""
    titles: dict[str, str] = {}
    for name in names:
        parts = Path(name).parts
        others = [Path(other).parts for other in names if other != name]
        length = next(
            (n for n in range(1, len(parts)) if all(o[-n:] != parts[-n:] for o in others)),
            len(parts),
        )
        titles[name] = TITLES.get(name, f"texts of {'/'.join(parts[-length:])}")
    return titles


def text_list(source: str | Path) -> Path:
    """Return the path of a list, which may be given by the name of one that ships."""
    return shipped(LISTS[str(source)]) if str(source) in LISTS else Path(source)


def read_texts(
    source: str | Path, units: TextUnits | None = None, language: str = DEFAULT
) -> list[ListedText]:
    """Return the texts of a list in a language, in order.

    units: in which a decoder reads them, phonemes by default. Raises DataError if the file
    cannot be read or is empty, or, with their numbers, for lines that are malformed or cannot be
    pronounced.
    """
    path, units = text_list(source), units or units_for(language)
    if str(source) in LISTS and language != DEFAULT:
        raise DataError(
            f"texts: the shipped list {source} is in {language_of(DEFAULT).name}, but the decoder "
            f"speaks {language_of(language).name}; give a file with texts in it"
        )
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; give texts= a UTF-8 file with one text per line, or "
            f"{' or '.join(LISTS)}"
        )
    texts, faults = [], []
    for number, line, fault in text_lines(path):
        if fault is not None:
            faults.append(f"{path}:{number}: {fault}")
            continue
        try:
            kind, text = fields_of(line, path.suffix == ".lst")
            texts.append(
                ListedText(
                    f"{kind or 'text'}-{number:04d}",
                    units.spoken(text),
                    tuple(units(text)),
                    kind,
                    language,
                )
            )
        except TextError as error:
            faults.append(f"{path}:{number}: {error}")
    if faults:
        raise DataError(
            "\n".join(
                [*faults[:20], f"{path}: {len(faults)} malformed lines; repair or remove them"]
            )
        )
    if not texts:
        raise DataError(f"{path}: contains no text; write one text per line")
    return texts


def fields_of(line: str, of_seed_tts_eval: bool) -> tuple[str, str]:
    """Return the category of a line of a list, if it has one, and its text."""
    fields = [field.strip() for field in line.split("|" if of_seed_tts_eval else "\t")]
    if of_seed_tts_eval:
        if len(fields) not in (4, 5):
            raise TextError("expected id|prompt text|prompt wav|text[|wav]")
        return "", fields[3]
    if len(fields) > 2 or fields[0] == "":
        raise TextError("expected a text, or category<TAB>text")
    return ("", fields[0]) if len(fields) == 1 else (fields[0], fields[1])


def text_prompts(texts: Sequence[ListedText], items: Sequence[PromptItem]) -> list[PromptItem]:
    """Return every text with the prompt of one of a split's `items`: the speakers in turn, and each
    speaker's prompts in turn. The same texts and items give the same prompts.

    Fields that would need a recording of the text are empty: reference_tokens is [], duration is 0.
    """
    ordered = sorted(items, key=lambda i: (i.speaker, i.utterance_id))
    turns = [ordered[i] for i in in_turn([item.speaker for item in ordered])]
    return [
        replace(
            item,
            utterance_id=text.id,
            text_ids=(*item.text_ids[: item.prompt_text_units], *text.text_ids),
            text=text.text,
            reference_tokens=[],
            duration=0.0,
            category=text.category,
            language=text.language,
        )
        for text, item in zip(texts, cycle(turns), strict=False)
    ]
