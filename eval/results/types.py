"""Measurements of a comparison, as dataclasses, and the place where they become JSON.

Record   one utterance by one method with one seed: a line of records/*.jsonl and records.jsonl
Timing   one utterance by one method at batch 1: a line of timings/*.jsonl
Row      one method on one set of utterances: a line of a table
Pair     two families of methods at the same speed
EqualVariety  a policy and fixed sizes of the same variety and speed
Sample   one utterance to listen to
Measured one set of utterances: its rows, pairs and tests
Result   everything that `dcar compare` found: compare.json

Rates are fractions, times are seconds, and None is what could not be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from dcar.errors import DataError, check_format
from dcar.sampling import SamplingConfig
from dcar.storage import write_text, writing
from dcar.text.bootstrap import Interval
from dcar.text.languages import DEFAULT
from dcar.text.wer import WordErrors
from eval.methods.families import Family
from eval.results.stats import PairedTest

T = TypeVar("T")
RECORDING, RESYNTHESIS = "recording", "ground truth resynthesised"
"""Methods of the rows that bound what a recogniser can measure."""
RECORD_VERSION = 5
FORMAT_VERSION = 8  # of compare.json
STRICT: Any = with_config(ConfigDict(extra="forbid", allow_inf_nan=False))


@STRICT
@dataclass
class Decoded:
    """Decoding of an utterance: the fields of `dcar.decoding.DecodeResult` of these names."""

    truncated: bool
    passes: int
    draft_passes: int
    proposed: list[int]
    accepted: list[int]
    emitted: list[int]
    sizes: list[int]


@STRICT
@dataclass
class Record:
    """One utterance by one method with one seed. fingerprint: digest of everything that it depends
    on besides the seed; spec: the method as a mapping, None for a reference; tokens: none for a
    recording."""

    version: int
    fingerprint: str
    method: str
    spec: dict[str, Any] | None
    seed: int
    id: str
    text: str
    recognizer: str
    hypothesis: str
    duration: float
    reference_duration: float  # 0 for a text without a recording
    normalizer: str
    words: WordErrors
    characters: WordErrors
    tokens: list[int] = field(default_factory=list)
    decoded: Decoded | None = None
    scores: dict[str, float | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of decode, vocoder, recognizer
    texts: str = ""
    prompt_seed: int = 0
    language: str = DEFAULT  # of the text


@STRICT
@dataclass
class Timing:
    """One utterance by one method at batch 1. of: digest of everything that the times depend
    on."""

    of: str
    method: str
    id: str
    lm: float
    vocoder: float
    first_audio: float | None  # None if the vocoder cannot stream
    audio: float
    tokens: int
    passes: int = 0
    draft_passes: int = 0

    @property
    def rtf(self) -> float:
        """Seconds of language model and vocoder per second of speech."""
        return (self.lm + self.vocoder) / self.audio


@STRICT
@dataclass
class Position:
    """Verification of the drafted tokens at one position of a draft, from 1 on."""

    position: int
    judged: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.judged


@STRICT
@dataclass
class Acceptance:
    """Share of the proposed tokens that was accepted, the mean number in a verifying pass, and the
    shares by position."""

    share: Interval
    per_pass: float
    by_position: list[Position]


@STRICT
@dataclass
class Variety:
    """Differences between the renderings of one utterance, and loops in its speech
    (eval/results/variety.py)."""

    distance: Interval | None
    duration_spread: float | None
    longest_run: float
    longest_run_max: int
    loop_rate: float


@STRICT
@dataclass
class Speed:
    """Medians over the timed utterances."""

    rtf: float
    lm_rtf: float
    lm_ms_per_token: float
    first_audio: float | None
    utterances: int


@STRICT
@dataclass
class Speedup:
    """Time of a baseline / time of the method: end to end, of the language model alone, and the
    quartiles over utterances."""

    baseline: str
    total: float
    lm: float
    quartiles: tuple[float, float]


@STRICT
@dataclass
class Score:
    """Mean of a scorer over the records that have a score, and their number; None without any."""

    mean: Interval | None
    utterances: int
    records: int


@STRICT
@dataclass
class Row:
    """One method on one set of utterances. The fields from `family` on are those of decoding, and
    None for a reference."""

    method: str
    spec: dict[str, Any] | None
    n: int  # utterances
    seeds: int
    prompts: int
    records: int
    wer: Interval
    cer: Interval
    wer_capped: float  # an utterance has at most as many errors as words
    errors: WordErrors  # sums
    empty_transcripts: int
    duration_ratio: float | None  # relative to the recordings
    scores: dict[str, Score]
    family: Family | None = None
    setting: str = ""  # what distinguishes it within the family
    sampling: SamplingConfig | None = None
    tokens_per_pass: float | None = None
    passes: float | None = None  # per record, as the next two
    draft_passes: float | None = None
    tokens: float | None = None
    sizes: dict[int, float] | None = None  # share of each chosen size
    truncation_rate: float | None = None
    acceptance: Acceptance | None = None
    variety: Variety | None = None
    speed: Speed | None = None
    # by baseline: far, car1, best_car, sd, random
    tests: dict[str, PairedTest] = field(default_factory=dict)
    speedups: dict[str, Speedup] = field(default_factory=dict)  # by baseline: far, car1
    error_rate: str = "WER"  # name of `wer`: CER where errors are counted by characters

    @property
    def decodes(self) -> bool:
        """False for a reference."""
        return self.spec is not None


@STRICT
@dataclass
class Pair:
    """Two families at the same speed: a − b. axis: a key of `eval.results.pareto.AXES`; shared:
    the speeds that both reach, None without any; error rates and test: averages over these."""

    axis: str
    a: Family
    b: Family
    shared: tuple[float, float] | None = None
    wer_a: float = 0.0
    wer_b: float = 0.0
    test: PairedTest | None = None


@STRICT
@dataclass
class EqualVariety:
    """A policy and fixed sizes of its variety and speed: policy − fixed. axis: as in Pair; method:
    the row of the policy; at: its speed; variety: None with one rendering; shares: by method, the
    shares of rows of CAR-k that make up the fixed size, none if no rows enclose it."""

    axis: str
    method: str
    at: float
    variety: float | None
    wer: float
    shares: dict[str, float] = field(default_factory=dict)
    wer_fixed: float | None = None
    test: PairedTest | None = None


@STRICT
@dataclass
class Bins:
    """Word error rates of groups of utterances: a label and a number of utterances for each, and by
    method a rate for each."""

    labels: list[str]
    sizes: list[int]
    rates: dict[str, list[Interval]]


@STRICT
@dataclass
class Power:
    """Smallest difference from the best CAR-k that the comparison would find with 80 % probability
    at 5 % significance."""

    baseline: str
    baseline_wer: float
    absolute: float
    n: int
    seeds: int
    tests: int
    utterances_for_10_percent: int

    @property
    def relative(self) -> float:
        return self.absolute / self.baseline_wer


@STRICT
@dataclass
class SpokenSample:
    """One method's rendering of a sample; audio and picture are paths in the comparison's
    folder."""

    method: str
    audio: str | None
    picture: str | None
    hypothesis: str
    words: WordErrors
    duration: float
    decoded: Decoded | None


@STRICT
@dataclass
class Sample:
    """One utterance to listen to."""

    id: str
    text: str
    speaker: str
    prompt_audio: str | None
    voices: list[SpokenSample]
    language: str = DEFAULT


@STRICT
@dataclass
class Measured:
    """Comparison of some methods on the same utterances with the same seeds. texts: name of the set
    of texts; limit: number of its utterances, if some methods decode only so many; 0 = all."""

    texts: str
    title: str
    limit: int
    utterances: int
    rows: list[Row]
    pairs: list[Pair]
    equal_variety: list[EqualVariety]
    by_length: Bins | None
    by_category: Bins | None
    power: Power | None
    samples: list[Sample] = field(default_factory=list)

    @property
    def spoken(self) -> list[Row]:
        """Rows of methods, without those of references."""
        return [row for row in self.rows if row.decodes]

    @property
    def whole(self) -> bool:
        """True unless some methods are left out of a larger comparison of these texts."""
        return not self.limit


@STRICT
@dataclass
class ScorerInfo:
    """Kind of a scorer, similarity or quality, and the setting that it was made from."""

    kind: str
    setting: str


@STRICT
@dataclass
class Result:
    """Content of compare.json: what all comparisons of a run share, and the comparisons."""

    recognizer: str
    recognizer_note: str
    normalizer: str
    scorers: dict[str, ScorerInfo]
    sampling: SamplingConfig
    seeds: list[int]
    prompt_seeds: list[int]
    corpus: dict[str, Any]
    methods: dict[str, dict[str, str]]  # identity of each
    models: dict[str, str]
    parameters: int
    heads: int
    codes: int
    training: str
    tuned: dict[str, Any] | None
    threads: int
    processes: int
    device: str
    provenance: dict[str, Any]
    config: dict[str, Any]
    comparisons: list[Measured]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def first(self) -> Measured:
        """The comparison of the first set of texts, by all methods that decode all of it."""
        return self.comparisons[0]


# --- JSON -----------------------------------------------------------------------------------------

_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(of: Any) -> TypeAdapter[Any]:
    if of not in _adapters:
        _adapters[of] = TypeAdapter(of)
    return _adapters[of]


def to_json(value: Any, indent: int | None = None) -> str:
    """Return one of these objects as JSON."""
    return _adapter(type(value)).dump_json(value, indent=indent).decode()


def from_json(of: type[T], text: str | bytes) -> T:
    """Return an object of JSON. Raises ValueError for one of another shape."""
    value: T = _adapter(of).validate_json(text)
    return value


def from_versioned(
    of: type[T], text: str | bytes, where: Path, version: int, remedy: str, key: str
) -> T:
    """Return an object of JSON that has this version under `key`. Raises DataError, with what to
    do, for one of another version, ValueError for one of another shape."""
    check_format(where, from_json(dict, text).get(key), version, DataError, remedy)
    return from_json(of, text)


def write_result(path: Path, result: Result) -> None:
    """Write compare.json, whole or not at all."""
    with writing(path):
        write_text(path, to_json(result, indent=1) + "\n")


def read_result(folder: Path) -> Result:
    """Read compare.json of a comparison's folder. Raises DataError if it is missing, broken or of
    another format."""
    path = folder / "compare.json"
    again = f"run the comparison again (`dcar compare --config {folder}/config.yaml`)"
    try:
        text = path.read_text(encoding="utf-8")
        return from_versioned(Result, text, path, FORMAT_VERSION, again, "format_version")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({brief(error)}); {again}") from error


def brief(error: Exception) -> str:
    """Return an error in one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)


def read_jsonl(path: Path, read: Callable[[bytes], T], what: str = "record") -> Iterator[T]:
    """Iterate over the lines of a file as `read` returns them; none if it is missing. Raises
    DataError for a line that `read` rejects (by ValueError, LookupError or TypeError); only the
    last line may be broken, by an interrupted write."""
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        try:
            value = read(line)
        except (ValueError, LookupError, TypeError) as error:
            if number < len(lines):
                raise DataError(
                    f"{path}:{number}: not a {what} ({brief(error)}); delete this line and run "
                    "again"
                ) from error
            return
        yield value


def read_records(path: Path) -> list[Record]:
    """Return the records in a file. Raises DataError for one of another version."""
    remedy = "choose another `out`, or remove this folder: its utterances will be decoded again"
    return list(
        read_jsonl(
            path,
            lambda line: from_versioned(
                Record, line, path.parent, RECORD_VERSION, remedy, "version"
            ),
        )
    )
