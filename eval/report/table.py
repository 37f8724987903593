"""Tables of a comparison as text, and the notes that explain them."""

from collections.abc import Callable, Sequence
from typing import Any

from dcar.sources.packages import templates
from dcar.text.bootstrap import Interval
from eval.methods.families import short_name
from eval.report.blocks import Table
from eval.results.equal_variety import missing
from eval.results.pareto import AXES, signed_points, speed_range
from eval.results.stats import PairedTest
from eval.results.types import Bins, EqualVariety, Measured, Pair, Result, Row

Column = tuple[str, Callable[[Row], str]]
# every family is compared with these; all pairs are in the report
RIVALS = {"car", "dcar"}
TESTED = ["difference", "at equal", "baseline %", "points", "95 % interval", "p", "detectable"]
CLOCK = (
    "RTF: seconds of computing per second of speech, end to end (language model and vocoder), "
    "batch 1, median. × FAR: RTF of FAR / RTF of the method."
)
DETECTABLE = (
    "Detectable: a true difference that would be found four times of five, where the measured one "
    "could be chance."
)
CONVENTION = (
    f"Differences are method − baseline; below 0, the method makes fewer errors. {CLOCK} First "
    "audio: seconds until a stream has its first samples, batch 1, median."
)
"""Note printed once below every table."""
NAME = 26  # characters of a method's name in the terminal, at most


def clipped(name: str, width: int) -> str:
    """Return a name of at most so many characters."""
    return name if len(name) <= width else f"{name[: width - 1]}…"


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 2) -> str:
    return number(None if value is None else 100 * value, digits)


def _p(value: float | None) -> str:
    if value is None:
        return "–"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def interval(of: Interval | None, digits: int = 2, scale: float = 100) -> str:
    """Return the two ends of an interval."""
    ends = of and of.ends
    return "–".join(number(scale * end, digits) for end in ends) if ends else "–"


def difference_cells(test: PairedTest) -> list[str]:
    """Return a difference as cells: points, interval, p, and what would have been detected if it
    could be chance."""
    chance = test.detectable if test.by_chance else None
    ends = [signed_points(end) for end in test.ends or ()]
    return [
        signed_points(test.difference),
        " to ".join(ends) or "–",
        _p(test.p_value),
        percent(chance, 1),
    ]


def _column(
    title: str, of: Callable[[Row], Any], form: Callable[..., str] = number, *more: Any
) -> Column:
    """Return a column: its title, and a function that formats a value of a row; a value of a part
    that the row lacks is missing."""
    return title, lambda row: form(of(row), *more)


def _speed(name: str) -> Callable[[Row], float | None]:
    return lambda row: getattr(row.speed, name) if row.speed else None


def _speedup(baseline: str, name: str) -> Callable[[Row], float | None]:
    return lambda row: getattr(row.speedups[baseline], name) if baseline in row.speedups else None


def _p_against(baseline: str) -> Callable[[Row], float | None]:
    return lambda row: row.tests[baseline].p_value if baseline in row.tests else None


def _variety(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.variety, name) if row.variety else None


def _distance(row: Row) -> Interval | None:
    return row.variety.distance if row.variety else None


def _value(of: Interval | None) -> float | None:
    return of.value if of else None


METHOD: Column = ("method", lambda row: row.method)
N: Column = ("n", lambda row: str(row.n))
FIRST_AUDIO = _column("first audio", _speed("first_audio"), number, 3)
VARIETY = _column("variety", lambda row: _value(_distance(row)), number, 3)
TOKENS = _column("tok/pass", lambda row: row.tokens_per_pass)
CLOCKS = [
    _column("× FAR", _speedup("far", "total")),
    _column("× CAR-1", _speedup("car1", "total")),
]
MEASURES = [
    TOKENS,
    _column("RTF", _speed("rtf"), number, 4),
    *CLOCKS,
    _column("LM RTF", _speed("lm_rtf"), number, 4),
    _column("LM × FAR", _speedup("far", "lm")),
    FIRST_AUDIO,
    N,
]
BASELINES = {
    "far": "FAR",
    "car1": "CAR-1",
    "best_car": "bestCAR",
    "sd": "SD",
    "random": "random",
}
TESTS = [_column(f"p {title}", _p_against(key), _p) for key, title in BASELINES.items()]
SHAPE = [
    _column("length", lambda row: row.duration_ratio),
    _column("cut %", lambda row: row.truncation_rate, percent, 1),
    _column("loop %", _variety("loop_rate"), percent, 1),
]
MEANINGS = {
    "Errors and speed": "WER, CER: word and character error rates with 95 % confidence intervals; "
    f"lower is better. tok/pass: tokens per forward pass. {CONVENTION} LM: language model alone.",
    "Significance": "p: probability that chance alone gives a difference this large from FAR, "
    "CAR-1, the best fixed size or random sizes. Above 0.05, the difference may be chance.",
    "Scores, lengths and loops": "Scores: similarity to the voice of the prompt, at most 1, or a "
    "predicted rating, with 95 % confidence intervals. length: duration relative to the recording. "
    "cut %: share of utterances that the length limit ended. loop %: share of utterances in which "
    "a piece is repeated over and over.",
}
"""Tables of the report, and explanations of their columns."""


def error_rate(rows: Sequence[Row]) -> str:
    """Return the name of the error rate of rows: WER, or CER in languages that need it."""
    return rows[0].error_rate if rows else "WER"


def errors_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of errors and their interval, and then, unless it is the same, CER."""
    name = error_rate(rows)
    columns = [
        _column(f"{name} %", lambda row: row.wer.value, percent),
        _column("95 % CI", lambda row: row.wer, interval),
    ]
    more = [] if name == "CER" else [_column("CER %", lambda row: row.cer.value, percent)]
    return [*columns, *more]


def main_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of the whole table: name, sampling if rows differ in it, and every
    column that has a value."""
    return [
        METHOD,
        *sampling_columns(rows),
        *filled_columns(
            [*errors_columns(rows), *MEASURES, *TESTS, *_scores(rows), VARIETY, *SHAPE], rows
        ),
    ]


def column_groups(rows: Sequence[Row]) -> list[tuple[str, list[Column]]]:
    """Return the whole table in parts that fit on a screen: (title, columns)."""
    errors = errors_columns(rows)
    groups = zip(
        MEANINGS,
        ([*errors, *MEASURES], [*errors[:2], *TESTS], [*_scores(rows), VARIETY, *SHAPE]),
        strict=True,
    )
    filled = [(title, filled_columns(columns, rows)) for title, columns in groups]
    return [
        (title, [METHOD, *sampling_columns(rows), *columns])
        for title, columns in filled
        if title != "Significance" or len(columns) > 2
    ]


def _scores(rows: Sequence[Row]) -> list[Column]:
    """Return columns for mean and interval of every scorer."""

    def mean(name: str) -> Callable[[Row], Interval | None]:
        return lambda row: row.scores[name].mean

    def value(name: str) -> Callable[[Row], float | None]:
        return lambda row: _value(row.scores[name].mean)

    return [
        column
        for name in rows[0].scores
        for column in (
            _column(name, value(name), number, 3),
            _column("95 % CI", mean(name), interval, 3, 1),
        )
    ]


def filled_columns(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Return the columns in which some row has a value."""
    return [(title, of) for title, of in columns if any(of(r) != "–" for r in rows)]


def sampling_columns(rows: Sequence[Row]) -> list[Column]:
    """Return those of temperature, top-k and top-p in which rows differ; nothing if all have the
    common sampling."""

    def general(value: float | None) -> str:
        return "–" if value is None else f"{value:g}"

    def of(name: str) -> Callable[[Row], float | None]:
        return lambda row: getattr(row.sampling, name) if row.sampling else None

    return [
        _column(title, of(name), general)
        for title, name in (("T", "temperature"), ("top-k", "top_k"), ("top-p", "top_p"))
        if len({of(name)(r) for r in rows} - {None}) > 1
    ]


def lively_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of the table on variety: distances, loops and cuts next to the errors."""
    return [
        METHOD,
        *sampling_columns(rows),
        errors_columns(rows)[0],
        VARIETY,
        _column("95 % CI", _distance, interval, 3, 1),
        _column("duration ± %", _variety("duration_spread"), percent, 1),
        _column("run", _variety("longest_run"), number, 1),
        _column("longest", _variety("longest_run_max"), number, 0),
        *SHAPE[:0:-1],
    ]


def lively_rows(measured: Measured) -> list[Row]:
    """Return the rows of that table: all methods, if sentences were generated more than once;
    else none."""
    several = any(r.variety and r.variety.duration_spread is not None for r in measured.spoken)
    return measured.spoken if several else []


def pass_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of the second table: passes, and acceptance by as many positions as
    some method reached."""

    def accepted(row: Row) -> Interval | None:
        return row.acceptance.share if row.acceptance else None

    def at(position: int) -> Callable[[Row], float | None]:
        def rate(row: Row) -> float | None:
            positions = row.acceptance.by_position if row.acceptance else []
            return next((p.rate for p in positions if p.position == position), None)

        return rate

    reached = max(len(r.acceptance.by_position) if r.acceptance else 0 for r in rows)
    return [
        METHOD,
        TOKENS,
        _column("passes", lambda row: row.passes, number, 1),
        _column("draft passes", lambda row: row.draft_passes or None, number, 1),
        _column("accepted %", lambda row: _value(accepted(row)), percent, 1),
        _column("95 % CI", accepted, interval, 1),
        _column("accepted/pass", lambda row: row.acceptance and row.acceptance.per_pass),
        *(_column(f"% at {i}", at(i), percent, 1) for i in range(1, reached + 1)),
    ]


def table_of(
    title: str, columns: Sequence[Column], rows: Sequence[Row], classes: Sequence[str] = ()
) -> Table:
    """Return rows as texts under columns (title, text of a row)."""
    return Table(
        title, [t for t, _ in columns], [[of(r) for _, of in columns] for r in rows], classes
    )


def aligned(table: Table) -> list[str]:
    """Format a table as lines of equal length; the first column is left-aligned, the others
    right-aligned."""
    cells = [[str(cell) for cell in row] for row in (table.head, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def nearest_rows(result: Result, measured: Measured) -> list[Row]:
    """Return the rows of a comparison that a terminal shows: all of them, or, of a part, those that
    no larger part has, with FAR, the policies, and the baselines of all of these."""
    if measured.whole:
        return measured.rows
    larger = [of for of in result.comparisons if of.utterances > measured.utterances]
    shown = {row.method for of in larger for row in of.rows}
    policies = {r.method for r in measured.spoken if r.family and r.family.method == "dcar"}
    own = [r for r in measured.spoken if r.method in policies or r.method not in shown]
    names = {r.method for r in own} | {test.baseline for r in own for test in r.tests.values()}
    return [r for r in measured.spoken if r.method in names or r.method == "far"]


def short_table(rows: Sequence[Row]) -> list[str]:
    """Return rows of a comparison as a table for a terminal of 100 columns."""

    columns: list[Column] = [
        ("method", lambda row: clipped(short_name(row.method, row.spec or {}), NAME)),
        _column(f"{error_rate(rows)} %", lambda row: row.wer.value, percent, 1),
        _column("95 % CI", lambda row: row.wer, interval, 1),
        VARIETY,
        TOKENS,
        _column("RTF", _speed("rtf"), number, 3),
        next((clock for clock in CLOCKS if filled_columns([clock], rows)), CLOCKS[0]),
        FIRST_AUDIO,
        N,
    ]
    return aligned(table_of("", filled_columns(columns, rows), rows))


def table_text(result: Result) -> str:
    """Return the content of compare.txt: of every comparison the tables and the comparison at
    equal speed; the notes."""
    lines: list[str] = []
    for measured in result.comparisons:
        if len(result.comparisons) > 1:
            lines += [f"{measured.title}:", ""]
        lines += _lines_of(measured)
    convention = (
        f"{CONVENTION} LM: the same for the language model alone, with draft and verification."
    )
    return "\n".join([*lines, convention, *notes(result)])


def _lines_of(measured: Measured) -> list[str]:
    """Return the tables of a comparison, and its comparison at equal speed."""
    rows, spoken = measured.rows, measured.spoken
    tables = [table_of("", main_columns(rows), rows)]
    if any(r.acceptance or r.draft_passes for r in spoken):
        tables.append(table_of("", pass_columns(spoken), spoken))
    if lively := lively_rows(measured):
        tables.append(table_of("", lively_columns(lively), lively))
    if measured.by_category:
        tables.append(binned_table(f"{error_rate(rows)} %", measured.by_category))
    lines = [line for table in tables for line in (*aligned(table), "")]
    if pairs := rivals(measured.pairs):
        lines += [
            "At equal speed (linear between the settings of a family, paired bootstrap):",
            *aligned(pairs_table("", pairs)),
            "",
        ]
    if (varied := variety_table("", measured)).rows:
        lines += ["At equal variety:", *aligned(varied), ""]
    if lacks := missing(measured.equal_variety):
        lines += [*lacks, ""]
    return lines


def binned_table(title: str, bins: Bins) -> Table:
    """Return error rates in groups of utterances, a pair of columns each."""
    head = ["method"]
    for label, n in zip(bins.labels, bins.sizes, strict=True):
        head += [label, f"95 % CI (n = {n})"]
    rows = []
    for method, rates in bins.rates.items():
        cells = [(percent(rate.value, 1), interval(rate, 1)) for rate in rates]
        rows.append([method, *(cell for pair in cells for cell in pair)])
    return Table(title, head, rows)


def corpus_kind(result: Result) -> str:
    """Return the kind of corpus that the prompts come from (docs/data.md); unknown for
    utterances made in a notebook."""
    return result.corpus.get("corpus", {}).get("kind", "unknown")


def rivals(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs of every family with fixed chunks and with the policy of the same sampling,
    at equal measured time (else at equal tokens per pass), if both reach one."""
    return [
        pair
        for pair in pairs
        if pair.axis == pairs[0].axis
        and pair.shared
        and pair.a.sampling == pair.b.sampling
        and {pair.a.method, pair.b.method} & RIVALS
    ]


def pair_row(pair: Pair) -> list[str]:
    """Return two families at equal speed, averaged over the speeds that both reach, under
    TESTED."""
    axis = AXES[pair.axis]
    name = f"{pair.a.label} − {pair.b.label}"
    if pair.shared is None or pair.test is None:
        return [name, f"{axis.quantity} (none)", *["–"] * (len(TESTED) - 2)]
    low, high = pair.shared
    quantity = axis.quantity if low == high else axis.short
    where = f"{quantity} ({speed_range(pair.shared)}{axis.unit})"
    return [name, where, percent(pair.wer_b, 1), *difference_cells(pair.test)]


def best_row(row: Row, best: Row) -> list[str]:
    """Return a policy and the best fixed size of its sampling, under TESTED."""
    assert row.family
    name, where = f"{row.family.label} − best", f"sampling ({best.method})"
    return [name, where, percent(best.wer.value, 1), *difference_cells(row.tests["best_car"])]


def variety_row(of: EqualVariety, rows: Sequence[Row]) -> list[str]:
    """Return a policy and fixed sizes of the same variety and speed, under TESTED."""
    assert of.test is not None
    (row,) = [row for row in rows if row.method == of.method]
    name = f"{row.family.label} {row.setting}".rstrip() if row.family else of.method
    where = f"{AXES[of.axis].short}, variety ({number(of.variety, 3)})"
    return [f"{name} − CAR-k", where, percent(of.wer_fixed, 1), *difference_cells(of.test)]


def pairs_table(title: str, pairs: Sequence[Pair]) -> Table:
    """Return families at equal speed as a table."""
    return Table(title, TESTED, list(map(pair_row, pairs)))


def variety_table(title: str, measured: Measured) -> Table:
    """Return policies and fixed sizes of the same variety and speed as a table, with the rows of
    CAR-k that make up these fixed sizes."""
    rows = [
        [*variety_row(of, measured.rows), ", ".join(of.shares)]
        for of in measured.equal_variety
        if of.test
    ]
    return Table(title, [*TESTED, "between"], rows)


def notes(result: Result) -> list[str]:
    """Return notes on the columns, and on what the experiment can and cannot show; also printed
    in the report."""
    meanings = {"similarity": "cosine to the voice of the prompt", "quality": "predicted rating"}
    first = result.first
    scorers = [
        (
            name,
            meanings[scorer.kind],
            [
                f"{r.method} {r.records - r.scores[name].records}"
                for r in first.rows
                if r.scores[name].records < r.records
            ],
        )
        for name, scorer in result.scorers.items()
    ]
    every = [row for measured in result.comparisons for row in measured.spoken]
    text = (
        templates("eval.report")
        .get_template("notes.txt")
        .render(
            result=result,
            power=first.power,
            spoken=first.spoken,
            scorers=scorers,
            own_samplings=sampling_columns(every),
            lively=any(lively_rows(measured) for measured in result.comparisons),
            verifies=any(row.acceptance for row in every),
            against_sd=any("sd" in row.tests for row in every),
            alike=[row.method for row in first.spoken if _value(_distance(row)) == 0],
            best=next((r.tests["best_car"].baseline for r in every if "best_car" in r.tests), None),
        )
    )
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]
