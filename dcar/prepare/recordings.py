"""Recordings from which a prepared corpus was made."""

from collections.abc import Iterable
from pathlib import Path

from dcar.corpus.read import read_corpus
from dcar.corpus.rows import Utterance
from dcar.errors import DataError
from dcar.prepare.prepared import prepared_info


class Sources(dict[str, Utterance]):
    """Utterances of a corpus by id. Raises DataError for an id that has tokens in the prepared
    corpus but no recording."""

    def __init__(self, utterances: Iterable[Utterance], prepared: str | Path):
        super().__init__((u.id, u) for u in utterances)
        self.prepared = prepared

    def __missing__(self, utterance_id: str) -> Utterance:
        raise DataError(
            f"{self.prepared}: {utterance_id} has tokens but no recording in the corpus. If the "
            "recording was removed, prepare the corpus again. Most training sentences of the "
            "shipped corpus never had one: use split=dev or split=test"
        )


def source_utterances(directory: str | Path) -> Sources:
    """Return the utterances of the corpus that a prepared folder was made from, by id, to read a
    row's original audio."""
    utterances, _ = read_corpus(**prepared_info(directory).corpus)
    return Sources(utterances, directory)
