"""Settings and report of `dcar prepare`: what identifies a result, what prepared.json says, and
how processes wait for each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dcar.config import check, setting
from dcar.corpus.read import KINDS, Problem, describe
from dcar.errors import ConfigError, DataError
from dcar.prepare.prepared import prepared_info, split_faults
from dcar.prepare.shards import Encoder
from dcar.text.inventory import PHONEME_VERSION
from dcar.tokens.base import LayeredTokenizer

if TYPE_CHECKING:
    from dcar.tokens.base import SpeechTokenizer

SPLITS = ("train", "dev", "test")
Found = TypeVar("Found")


@dataclass
class PrepareConfig:
    """Settings of `dcar prepare`."""

    out: str = setting(
        "", "Folder to write; must be new, empty, or an earlier prepared corpus.", place="folder"
    )
    corpus: str = setting("starter", "Kind of corpus.", choices=KINDS)
    path: str | None = setting(None, "Where the corpus is; not needed for starter.")
    audio_root: str | None = setting(
        None, "unicats: the LibriTTS folder; lhotse, libriheavy: where audio paths start."
    )
    subsets: tuple[str, ...] = setting((), "libritts: subsets to read; all if empty.")
    splits: tuple[str, ...] = setting(SPLITS, "Splits to prepare.")
    dev_fraction: float = setting(
        0.05,
        "Share of sentences held out for dev where the corpus has no splits.",
        minimum=0,
        below=1,
    )
    test_fraction: float = setting(
        0.05,
        "Share of sentences held out for test where the corpus has no splits.",
        minimum=0,
        below=1,
    )
    tokenizer: str = setting(
        "starter", "Name or folder of the speech tokenizer (starter: the shipped one)."
    )
    residual: bool = setting(
        False, "Also store the codes of the tokenizer's other layers (codec:NAME@8)."
    )
    transcribe: str = setting(
        "",
        "What writes the text of recordings without one, by names that dcar.recognition.load "
        "lists: whisper-base, say. OUT.transcripts.jsonl keeps it, to be corrected.",
    )
    min_seconds: float = setting(0.3, "Shorter utterances are bad rows.", minimum=0)
    max_seconds: float = setting(28.0, "Longer utterances are bad rows.", above=0)
    filter_seconds: tuple[float, ...] = setting(
        (), "[3,20] leaves out what is shorter or longer, without calling it a bad row.", minimum=0
    )
    stream: bool = setting(
        False,
        "For corpora larger than memory or disk: rows are checked and tokenised as they are read.",
    )
    validate: bool = setting(False, "Only report every bad row; write nothing.")
    skip_bad: bool = setting(False, "Go on without the bad rows instead of stopping.")
    limit: int | None = setting(None, "At most this many utterances of each split.", minimum=1)
    speeds: tuple[float, ...] = setting(
        (1.0,),
        "Copies of the training split at these speeds (resampled: pitch changes, so new speakers).",
        minimum=0.5,
        maximum=2,
    )
    copies_below: int = setting(
        0,
        "Copies only of speakers with fewer training utterances than this; 0 = of all speakers.",
        minimum=0,
    )
    shard_size: int = setting(256, "Utterances tokenised between two saves.", minimum=1)
    batch_seconds: float = setting(120.0, "Audio in one tokenizer batch, in seconds.", above=0)
    compress: bool = setting(
        False, "Files of half the size, which are read into memory instead of being memory-mapped."
    )
    num_proc: int = setting(
        0,
        "Threads that read, check and analyse audio ahead of the models; 0 = one for each core of "
        "this process.",
        minimum=0,
    )
    device: str = setting(
        "auto",
        "Device of tokenizer and speaker encoder: cpu, cuda, or auto = a GPU if there is one. "
        "Process n of a machine uses GPU n.",
    )
    wait_seconds: float = setting(3600.0, "How long to wait for other processes.", above=0)

    def __post_init__(self) -> None:
        self.splits, self.speeds = tuple(self.splits), tuple(float(s) for s in self.speeds)
        self.subsets, self.filter_seconds = (
            tuple(self.subsets),
            tuple(float(s) for s in self.filter_seconds),
        )
        check(self)
        checks = {
            "out is not set: give out=FOLDER (only validate=true writes nothing)": self.out
            or self.validate,
            "splits must name at least one split, each once": 0
            < len(set(self.splits))
            == len(self.splits),
            "speeds must name at least one speed, each once": 0
            < len(set(self.speeds))
            == len(self.speeds),
            "min_seconds must be below max_seconds": self.min_seconds < self.max_seconds,
            "dev_fraction and test_fraction must have a sum below 1": self.dev_fraction
            + self.test_fraction
            < 1,
            "filter_seconds must be two durations, the first smaller": not self.filter_seconds
            or (len(self.filter_seconds) == 2 and self.filter_seconds[0] < self.filter_seconds[1]),
            "limit counts rows before they are read: set stream=false for it": not (
                self.stream and self.limit
            ),
            "validate reads the whole corpus: set stream=false for it": not (
                self.stream and self.validate
            ),
            "transcribe listens before rows are read: set stream=false for it": not (
                self.stream and self.transcribe
            ),
            "copies_below counts a speaker's utterances before any is read: set stream=false for "
            "it": not (self.stream and self.copies_below),
        }
        for rule, holds in checks.items():
            if not holds:
                raise ConfigError(f"prepare: {rule}")


@dataclass
class PrepareReport:
    """What a run did: `problems` are all bad rows; `counts` per split (empty where only
    validated)."""

    problems: list[Problem]
    counts: dict[str, dict[str, float]]
    out_dir: Path | None
    checked: int
    filtered: int = 0

    @property
    def exit_code(self) -> int:
        """1 where rows are bad and the run was only to validate, else 0."""
        return int(bool(self.problems) and self.out_dir is None)

    def text(self) -> str:
        """The report for a person: counts, then every bad row with file and line."""
        lines = [f"{self.checked} rows checked, {len(self.problems)} problems"]
        if self.filtered:
            lines.append(f"{self.filtered} rows left out by filter_seconds")
        if self.problems:
            lines.append(describe(self.problems))
        lines += [
            f"{split}: {c['utterances']:.0f} utterances, {c['seconds'] / 3600:.2f} h, "
            f"{c['speakers']:.0f} "
            f"speakers, {c['tokens']:.0f} tokens"
            for split, c in self.counts.items()
        ]
        return "\n".join(lines)


def corpus_record(config: PrepareConfig) -> dict[str, Any]:
    """Where the corpus is, for prepared.json: absolute paths (a hub name stays as it is)."""

    def absolute(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path and Path(path).exists() else path

    record: dict[str, Any] = {"kind": config.corpus, "path": absolute(config.path)}
    if config.audio_root is not None:
        record["audio_root"] = absolute(config.audio_root)
    if config.subsets:
        record["subsets"] = list(config.subsets)
    return record


# where, whether and how fast to write; the tokenizer is in by its checksum, `residual` by its
# layers
NOT_IN_FINGERPRINT = (
    "out", "tokenizer", "residual", "path", "transcribe", "validate", "skip_bad", "batch_seconds",
    "compress", "num_proc", "device", "wait_seconds",
)  # fmt: skip
# of what is computed; how it is stored (FORMAT_VERSION) leaves fingerprints as they are
CONTENT_VERSION = 2


def settings_stamp(
    config: PrepareConfig, tokenizer: SpeechTokenizer, speaker_encoder: Encoder | None
) -> list[Any]:
    """What a fingerprint says of everything but the corpus: format, settings, tokenizer,
    phonemes, speaker encoder."""
    settings = {k: v for k, v in asdict(config).items() if k not in NOT_IN_FINGERPRINT}
    encoder = (
        getattr(speaker_encoder, "name", type(speaker_encoder).__name__)
        if speaker_encoder
        else "default"
    )
    stamp = [
        CONTENT_VERSION,
        settings,
        tokenizer.name,
        tokenizer.checksum,
        PHONEME_VERSION,
        encoder,
    ]
    return [*stamp, {"layers": layers}] if (layers := stored_layers(config, tokenizer)) else stamp


def stored_layers(config: PrepareConfig, tokenizer: SpeechTokenizer) -> int:
    """Return the number of layers that are stored with `residual=true`, 0 without it.

    Raises ConfigError if the tokenizer has no other layer than the first.
    """
    if not config.residual:
        return 0
    if not isinstance(tokenizer, LayeredTokenizer) or tokenizer.layers < 2:
        raise ConfigError(
            f"residual: tokenizer {config.tokenizer} ({tokenizer.name}) has one layer; name a "
            "codec "
            "with several, as in tokenizer=codec:kyutai/mimi@8"
        )
    return tokenizer.layers


def finished(config: PrepareConfig, fingerprint: str) -> PrepareReport | None:
    """The report of what stands in out, if it was made from the same (else None)."""
    out = Path(config.out).absolute()
    try:
        done = prepared_info(out)
        if done.get("fingerprint") != fingerprint:
            return None
        if (done["skipped"] and not config.skip_bad) or any(
            split_faults(out, done, s) for s in done["counts"]
        ):
            return None
        problems = [Problem(**p) for p in done["skipped"]]
        return PrepareReport(problems, done["counts"], out, done["checked"], done["filtered"])
    except (DataError, KeyError, TypeError):  # not as this program writes it: made again
        return None


def wait(look: Callable[[], Found | None], seconds: float, what: str) -> Found:
    """What `look` finds, as soon as that is not None; DataError after so many seconds. Processes
    meet through files, which works for accelerate, torchrun and independent SLURM tasks alike."""
    end = time.monotonic() + seconds
    while (found := look()) is None:
        if time.monotonic() > end:
            raise DataError(
                f"waited {seconds:g} s for {what}; did that process stop? run again to continue"
            )
        time.sleep(0.05)
    return found
