"""Texts for recordings that have none: what a recogniser heard, kept in a file that a person can correct."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from dcar.corpus.read import Utterance
from dcar.errors import AudioError, ConfigError, DataError
from dcar.storage import write_text

logger = logging.getLogger(__name__)


def with_transcripts(rows: list[Utterance], recognizer: str, file: str, processes: int) -> list[Utterance]:
    """The rows, those without a text with what `recognizer` (a name, "" = none) heard; their source says so.

    file: JSON lines with id, text and by, read first and written when all were heard; "" = none. What cannot be heard
    keeps its empty text. ConfigError where several processes would listen; DataError for a file that is none.
    """
    if not recognizer or all(u.text.strip() for u in rows):
        return rows
    known = _read(Path(file)) if file else {}
    unheard = [u for u in rows if not u.text.strip() and u.id not in known]
    if unheard:
        if processes > 1:
            raise ConfigError(f"transcribe: {len(unheard)} recordings are to be heard first; run this in one process")
        from dcar.recognition.load import load_recognizer

        listener = load_recognizer(recognizer)
        for u in tqdm(unheard, "transcribe", unit="utt"):
            try:
                wave, rate = u.load()
                [text] = listener.transcribe([wave], rate)
            except AudioError:
                continue  # validation says what is wrong with it
            known[u.id] = {"id": u.id, "text": text.strip(), "by": recognizer}
        if file:
            write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in known.values()))
    logger.info("%d recordings have no text: what %s heard is taken%s", sum(not u.text.strip() for u in rows),
                recognizer, f"; correct it in {file}" * bool(file))
    return [u if u.text.strip() or u.id not in known else
            replace(u, text=known[u.id]["text"], source=f"{u.source} (transcribed by {known[u.id]['by']})")
            for u in rows]


def _read(file: Path) -> dict[str, dict[str, str]]:
    """By id, what was heard."""
    if not file.exists():
        return {}
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {row["id"]: {name: str(row[name]) for name in ("id", "text", "by")} for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: not a list of transcripts as this command writes it ({error}); correct it, or remove "
                        "it: then the recordings are heard again") from error
