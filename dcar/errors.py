"""Errors that a user can act on: each message says what is wrong, where, and what to do next."""

from collections.abc import Sequence
from typing import Any


class DCARError(Exception):
    """Base class of every error that this project raises on purpose; the command line prints it
    without a traceback."""


class ConfigError(DCARError):
    """A configuration file or override is wrong: unknown key, wrong type, impossible
    combination."""


class DataError(DCARError):
    """A corpus, manifest or prepared dataset is broken; the message names the file and line."""


class AudioError(DCARError):
    """A waveform is missing, unreadable, empty, silent, or holds values that are not finite."""


class TextError(DCARError):
    """A text is empty, unspeakable, or longer than the model allows."""


class AssetError(DCARError):
    """A packaged model is missing or its digest differs; the message names the command that
    installs it."""


class CheckpointError(DCARError):
    """A checkpoint is incomplete, of another architecture, or belongs to another base model."""


class StorageError(DCARError):
    """Something could not be written, because the disk is full or refuses it; the message says
    what, where and how much space is free."""


class BusyError(DCARError):
    """Another run writes to the same folder or file; the message names its process."""


class TrainingError(DCARError):
    """A loss, gradient or weight is not finite, or the memory is too small; the message gives
    step and cause."""


class ProcessError(DCARError):
    """Another process of this run is gone or does not answer; the message gives the rank that
    noticed and the operation."""


class StoppedError(DCARError):
    """A run was asked to stop (SIGTERM, SIGUSR1, Ctrl-C) and has saved its state; `status` is
    the exit status."""

    def __init__(self, message: str, status: int = 75):
        super().__init__(message)
        self.status = status


class RewardError(DCARError):
    """Too many rewards could not be computed; the message gives the share and the first cause."""


def check_format(file: Any, found: Any, known: int, error: type[DCARError], remedy: str) -> None:
    """Raise `error` unless a file has the format version `known`, the only one that this program
    reads.

    found: the version that the file names, None if it names none. remedy: what to do instead.
    """
    if type(found) is not int or found != known:
        raise error(
            f"{file}: format version {str(found)[:20]}, this program reads {known}; {remedy}"
        )


class _UnfinishedError(DCARError):
    """Base class of errors in decoding. finished: results of the utterances that were complete."""

    def __init__(self, message: str, finished: Sequence[Any] = ()):
        super().__init__(message)
        self.finished = list(finished)


class DistributionError(_UnfinishedError):
    """A model returned no distribution over the next token (NaN, or no mass anywhere): its
    weights are broken, or the range of its number type is too small. The message names utterance
    and position."""


class EngineError(_UnfinishedError):
    """Decoding cannot start or continue: no memory, more positions than the decoder has, or a
    step that cannot be captured as a CUDA graph."""
