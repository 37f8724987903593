"""Settings and report of `dcar prepare`, the stamp that identifies a result, and waiting for
other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dcar.config import check, setting
from dcar.config.commands import DeviceSettings, WaitSettings
from dcar.corpus.read import KINDS
from dcar.corpus.rows import Problem, describe
from dcar.corpus.texts import CorpusTexts
from dcar.errors import ConfigError, DataError
from dcar.prepare.prepared import prepared_info, split_faults
from dcar.prepare.shards import Encoder
from dcar.text.languages import DEFAULT
from dcar.text.units import KINDS as UNITS
from dcar.tokens.base import LayeredTokenizer

if TYPE_CHECKING:
    from dcar.tokens.base import SpeechTokenizer

SPLITS = ("train", "dev", "test")
Found = TypeVar("Found")


@dataclass
class PrepareConfig(DeviceSettings, WaitSettings):
    """Settings of `dcar prepare`."""

    wait_minutes: float = 60.0
    out: str = setting(
        "", "Folder to write: new, empty, or an earlier prepared corpus.", place="folder"
    )
    corpus: str = setting("starter", "Kind of corpus.", choices=KINDS)
    path: str | None = setting(None, "Location of the corpus; not needed for starter.")
    audio_root: str | None = setting(
        None,
        "unicats: the LibriTTS folder; lhotse, libriheavy: the folder that audio paths are "
        "relative to.",
    )
    subsets: tuple[str, ...] = setting((), "libritts: subsets to read; all if empty.")
    splits: tuple[str, ...] = setting(SPLITS, "Splits to prepare.")
    dev_fraction: float = setting(
        0.05, "Share of sentences held out for dev if the corpus has no splits.", minimum=0, below=1
    )
    test_fraction: float = setting(
        0.05,
        "Share of sentences held out for test if the corpus has no splits.",
        minimum=0,
        below=1,
    )
    tokenizer: str = setting(
        "starter", "Name or folder of the speech tokenizer (starter: the shipped one)."
    )
    residual: bool = setting(
        False, "Also store the codes of the tokenizer's other layers (codec:NAME@8)."
    )
    language: str = setting(
        DEFAULT,
        "Language of the corpus, a code of ISO 639 (zh, es, …); rows may name others in a column "
        "`language`.",
    )
    units: str = setting(
        "",
        "Units in which decoders read text: phonemes of the language, or the characters of the "
        "corpus, for any language and for several; empty = phonemes where the language has them.",
        choices=("", *UNITS),
    )
    recognizer: str = setting(
        "",
        "Recogniser for recordings without a text, by its name in dcar.recognition.load, e.g. "
        "whisper-base; empty for none. OUT.transcripts.jsonl keeps the transcripts, to be "
        "corrected.",
    )
    min_seconds: float = setting(
        0.3, "Shortest utterance in seconds; shorter ones are bad rows.", minimum=0
    )
    max_seconds: float = setting(
        28.0, "Longest utterance in seconds; longer ones are bad rows.", above=0
    )
    filter_seconds: tuple[float, ...] = setting(
        (),
        "Range of durations to keep, e.g. [3,20]; others are left out, but are not bad rows. "
        "Empty keeps all.",
        minimum=0,
    )
    stream: bool = setting(
        False, "Check and tokenise rows as they are read, for corpora larger than memory or disk."
    )
    validate: bool = setting(False, "Only report every bad row; write nothing.")
    skip_bad: bool = setting(False, "Leave out bad rows instead of stopping.")
    limit: int = setting(0, "Utterances of each split; 0 = all.", minimum=0)
    speeds: tuple[float, ...] = setting(
        (1.0,),
        "Speeds of copies of the training split (resampled: pitch changes, so copies are new "
        "speakers).",
        minimum=0.5,
        maximum=2,
    )
    shard_size: int = setting(256, "Number of utterances tokenised between two saves.", minimum=1)
    batch_seconds: float = setting(
        120.0, "Audio in one batch of the tokenizer, in seconds.", above=0
    )
    compress: bool = setting(
        False,
        "Write files of half the size, which are read into memory instead of being memory-mapped.",
    )
    num_proc: int = setting(
        0,
        "Number of threads that read, check and analyse audio ahead of the models; 0 = one per "
        "core of this process.",
        minimum=0,
    )

    def __post_init__(self) -> None:
        self.splits, self.subsets = tuple(self.splits), tuple(self.subsets)
        self.speeds = tuple(float(speed) for speed in self.speeds)
        self.filter_seconds = tuple(float(seconds) for seconds in self.filter_seconds)
        check(self)
        if faults := self._faults():
            raise ConfigError(f"prepare: {faults[0]}")

    @property
    def texts(self) -> CorpusTexts:
        """Rules by which the texts of the corpus are read."""
        return CorpusTexts(self.language, self.units)

    def _faults(self) -> list[str]:
        """Return the broken rules between settings."""
        span = self.filter_seconds
        rules = {
            "out is not set; give out=FOLDER (only validate=true writes nothing)": bool(
                self.out or self.validate
            ),
            "splits must name at least one split, each once": _distinct(self.splits),
            "speeds must name at least one speed, each once": _distinct(self.speeds),
            "min_seconds must be below max_seconds": self.min_seconds < self.max_seconds,
            "dev_fraction and test_fraction must have a sum below 1": (
                self.dev_fraction + self.test_fraction < 1
            ),
            "filter_seconds must be two durations, the first smaller": (
                not span or (len(span) == 2 and span[0] < span[1])
            ),
        }
        faults = [rule for rule, holds in rules.items() if not holds]
        if self.stream:
            unfit = {
                "limit": "counts rows before they are read",
                "validate": "reads the whole corpus",
                "recognizer": "transcribes recordings before rows are checked",
            }
            faults += [
                f"{name} {why}: set stream=false or omit {name}"
                for name, why in unfit.items()
                if getattr(self, name)
            ]
        return faults


def _distinct(values: Sequence[object]) -> bool:
    """Return True for at least one value, each only once."""
    return 0 < len(set(values)) == len(values)


@dataclass
class PrepareReport:
    """Result of a run: `problems` are all bad rows; `counts` are per split (empty after
    validation alone)."""

    problems: list[Problem]
    counts: dict[str, dict[str, float]]
    out_dir: Path | None
    checked: int
    filtered: int = 0

    @property
    def exit_code(self) -> int:
        """1 if there are bad rows and the run was only to validate, otherwise 0."""
        return int(bool(self.problems) and self.out_dir is None)

    def text(self) -> str:
        """Return the report as text: counts, then every bad row with file and line."""
        lines = [f"{self.checked} rows checked, {len(self.problems)} problems"]
        if self.filtered:
            lines.append(f"{self.filtered} rows left out by filter_seconds")
        if self.problems:
            lines.append(describe(self.problems))
        lines += [
            f"{split}: {c['utterances']:.0f} utterances, {c['seconds'] / 3600:.2f} h, "
            f"{c['speakers']:.0f} speakers, {c['tokens']:.0f} tokens"
            for split, c in self.counts.items()
        ]
        return "\n".join(lines)


def corpus_record(config: PrepareConfig) -> dict[str, Any]:
    """Return the location of the corpus for prepared.json, with absolute paths (a hub name is
    kept)."""

    def absolute(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path and Path(path).exists() else path

    record: dict[str, Any] = {"kind": config.corpus, "path": absolute(config.path)}
    if config.audio_root is not None:
        record["audio_root"] = absolute(config.audio_root)
    if config.subsets:
        record["subsets"] = list(config.subsets)
    return record


# settings that decide where, whether and how fast to write; the tokenizer is represented by its
# checksum, `residual` by the number of layers, language and units by the name of the units
NOT_IN_FINGERPRINT = (
    "out", "tokenizer", "residual", "path", "recognizer", "validate", "skip_bad", "batch_seconds",
    "compress", "num_proc", "device", "wait_minutes", "language", "units",
)  # fmt: skip
# version of what is computed; a change of the storage (FORMAT_VERSION) does not change fingerprints
CONTENT_VERSION = 3


def fingerprint_settings(
    config: PrepareConfig, tokenizer: SpeechTokenizer, speaker_encoder: Encoder | None
) -> list[Any]:
    """Return everything in a fingerprint except the corpus: version, settings, tokenizer,
    phonemes, speaker encoder."""
    settings = {k: v for k, v in asdict(config).items() if k not in NOT_IN_FINGERPRINT}
    encoder = "default"
    if speaker_encoder:
        encoder = getattr(speaker_encoder, "name", type(speaker_encoder).__name__)
    identity = [tokenizer.name, tokenizer.checksum, config.texts.name, encoder]
    stamp: list[Any] = [CONTENT_VERSION, settings, *identity]
    if layers := stored_layers(config, tokenizer):
        stamp.append({"layers": layers})
    return stamp


def stored_layers(config: PrepareConfig, tokenizer: SpeechTokenizer) -> int:
    """Return the number of layers that are stored with `residual=true`, 0 without it.

    Raises ConfigError if the tokenizer has no other layer than the first.
    """
    if not config.residual:
        return 0
    if not isinstance(tokenizer, LayeredTokenizer) or tokenizer.layers < 2:
        raise ConfigError(
            f"residual: tokenizer {config.tokenizer} ({tokenizer.name}) has one layer; name a "
            "codec with several, for example tokenizer=codec:kyutai/mimi@8"
        )
    return tokenizer.layers


def finished(config: PrepareConfig, fingerprint: str) -> PrepareReport | None:
    """Return the report of the corpus in `out` if it has this fingerprint and is intact,
    otherwise None."""
    out = Path(config.out).absolute()
    try:
        info = prepared_info(out)
        done = info.content
        if done.get("fingerprint") != fingerprint:
            return None
        if (done["skipped"] and not config.skip_bad) or any(
            split_faults(out, info, split) for split in info.counts
        ):
            return None
        problems = [Problem(**p) for p in done["skipped"]]
        return PrepareReport(problems, info.counts, out, done["checked"], done["filtered"])
    except (DataError, KeyError, TypeError):  # of another version or damaged: it is made again
        return None


def wait(look: Callable[[], Found | None], minutes: float, what: str) -> Found:
    """Return the first result of `look` that is not None; raise DataError after `minutes`.
    Processes synchronise through files, which works for accelerate, torchrun and independent
    SLURM tasks alike."""
    end = time.monotonic() + 60 * minutes
    while (answer := look()) is None:
        if time.monotonic() > end:
            raise DataError(
                f"waited {minutes:g} minutes for {what}; check that its process is still running, "
                "then run again to continue, or raise wait_minutes"
            )
        time.sleep(0.05)
    return answer
