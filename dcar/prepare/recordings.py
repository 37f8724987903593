"""The recordings that a prepared corpus was made from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dcar.corpus.read import Utterance, read_corpus
from dcar.errors import DataError
from dcar.prepare.prepared import prepared_info


class Sources(dict[str, Utterance]):
    """The utterances of a corpus by id. DataError for one that a prepared corpus has tokens of,
    and it no recording."""

    def __init__(self, utterances: Iterable[Utterance], prepared: str | Path):
        super().__init__((u.id, u) for u in utterances)
        self.prepared = prepared

    def __missing__(self, utterance_id: str) -> Utterance:
        raise DataError(
            f"{self.prepared}: {utterance_id} has tokens but no recording in the corpus: it was "
            "removed "
            "there since (prepare it again), or never had one (most training sentences of the "
            "shipped "
            "corpus are tokens alone: take split=dev or split=test)"
        )


def source_utterances(directory: str | Path) -> Sources:
    """The corpus that a prepared folder was made from, by utterance id: for the original audio
    of a row."""
    corpus = prepared_info(directory)["corpus"]
    utterances, _ = read_corpus(
        corpus["kind"],
        corpus.get("path"),
        audio_root=corpus.get("audio_root"),
        subsets=[str(subset) for subset in corpus.get("subsets") or ()],
    )
    return Sources(utterances, directory)
