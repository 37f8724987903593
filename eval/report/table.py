"""Tables of a comparison as text, and the notes that explain them."""

from collections.abc import Callable, Sequence
from typing import Any

from dcar.sources.packages import templates
from eval.methods.families import group_families, short_name
from eval.report.blocks import Table
from eval.results.pareto import sentence
from eval.results.rows import Row

Column = tuple[str, Callable[[Row], str]]
# sentences compare every family with these; all pairs are in compare.json
RIVALS = {"car", "dcar"}
CONVENTION = (
    "Differences are method − baseline; below 0, the method makes fewer word errors. RTF: seconds "
    "of computing per second of speech, end to end (language model and vocoder), batch 1, median. "
    "× FAR: RTF of FAR / RTF of the method. First audio: seconds until a stream has its first "
    "samples, batch 1, median."
)
"""Note printed once below every table."""
NAME = 26  # characters of a method's name in the terminal, at most


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 2) -> str:
    return number(None if value is None else 100 * value, digits)


def _p(value: float | None) -> str:
    if value is None:
        return "–"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def interval(ends: Sequence[float] | None, digits: int = 2, scale: float = 100) -> str:
    return "–" if ends is None else "–".join(number(scale * end, digits) for end in ends)


def _of(key: str, form: Callable[..., str] = number, *more: Any) -> Callable[[Row], str]:
    """Return a function that formats a row's field."""
    return lambda r: form(r.get(key), *more)


METHOD: Column = ("method", lambda r: r["method"])
FIRST_AUDIO: Column = ("first audio", _of("first_audio", number, 3))
ERRORS: list[Column] = [
    ("WER %", _of("wer", percent)),
    ("95 % CI", _of("wer_ci", interval)),
    ("CER %", _of("cer", percent)),
    ("tok/pass", _of("tokens_per_pass")),
    ("RTF", _of("rtf", number, 4)),
    ("× FAR", _of("speedup_vs_far")),
    ("× CAR-1", _of("speedup_vs_car1")),
    ("LM RTF", _of("lm_rtf", number, 4)),
    ("LM × FAR", _of("lm_speedup_vs_far")),
    FIRST_AUDIO,
    ("n", lambda r: str(r["n"])),
]
TESTS: list[Column] = [
    (f"p {title}", _of(f"p_vs_{key}", _p))
    for title, key in (
        ("FAR", "far"),
        ("CAR-1", "car1"),
        ("bestCAR", "best_car"),
        ("SD", "sd"),
        ("random", "random"),
    )
]
SHAPE: list[Column] = [
    ("length", _of("duration_ratio")),
    ("cut %", _of("truncation_rate", percent, 1)),
    ("loop %", _of("loop_rate", percent, 1)),
]
VARIETY: Column = ("variety", _of("variety", number, 3))
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


def main_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of the whole table: name, sampling if rows differ in it, and every
    column that has a value."""
    return [
        METHOD,
        *sampling_columns(rows),
        *filled_columns([*ERRORS, *TESTS, *_scores(rows), VARIETY, *SHAPE], rows),
    ]


def column_groups(rows: Sequence[Row]) -> list[tuple[str, list[Column]]]:
    """Return the whole table in parts that fit on a screen: (title, columns)."""
    groups = zip(
        MEANINGS,
        (ERRORS, [*ERRORS[:2], *TESTS], [*_scores(rows), VARIETY, *SHAPE]),
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

    def columns(name: str) -> list[Column]:
        return [
            (name, lambda r: number(r["scores"][name]["mean"], 3)),
            ("95 % CI", lambda r: interval(r["scores"][name]["ci"], 3, scale=1)),
        ]

    return [column for name in rows[0]["scores"] for column in columns(name)]


def filled_columns(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Return the columns in which some row has a value."""
    return [(title, of) for title, of in columns if any(of(r) != "–" for r in rows)]


def sampling_columns(rows: Sequence[Row]) -> list[Column]:
    """Return those of temperature, top-k and top-p in which rows differ; nothing if all have the
    common sampling."""

    def general(value: float | None) -> str:
        return "–" if value is None else f"{value:g}"

    return [
        (title, _of(key, general))
        for title, key in (("T", "temperature"), ("top-k", "top_k"), ("top-p", "top_p"))
        if len({r[key] for r in rows if r.get(key) is not None}) > 1
    ]


def lively_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of the table on variety: distances, loops and cuts next to the errors."""
    return [
        METHOD,
        *sampling_columns(rows),
        ERRORS[0],
        VARIETY,
        ("95 % CI", _of("variety_ci", interval, 3, 1)),
        ("duration ± %", _of("duration_spread", percent, 1)),
        ("run", _of("longest_run", number, 1)),
        ("longest", _of("longest_run_max", number, 0)),
        *SHAPE[:0:-1],
    ]


def lively_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of that table: all methods, if sentences were generated more than once;
    else none."""
    spoken = [r for r in rows if r["kind"] == "method"]
    return spoken if any(r["duration_spread"] is not None for r in spoken) else []


def pass_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of the second table: passes, and acceptance by as many positions as
    some method reached."""

    def at(position: int) -> Callable[[Row], str]:
        return lambda r: next(
            (
                percent(p["rate"], 1)
                for p in r["accepted_by_position"] or ()
                if p["position"] == position
            ),
            "–",
        )

    reached = max(len(r["accepted_by_position"] or ()) for r in rows)
    return [
        METHOD,
        ("tok/pass", _of("tokens_per_pass")),
        ("passes", _of("passes", number, 1)),
        ("draft passes", lambda r: number(r["draft_passes"] or None, 1)),
        ("accepted %", _of("accepted", percent, 1)),
        ("95 % CI", _of("accepted_ci", interval, 1)),
        ("accepted/pass", _of("accepted_per_pass")),
        *((f"% at {i}", at(i)) for i in range(1, reached + 1)),
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


def short_table(result: dict[str, Any]) -> list[str]:
    """Return the table for a terminal of 100 columns: errors on each set of texts; tokens per pass
    and speed end to end on the first."""
    rows = result["rows"]

    def name(row: Row) -> str:
        whole = short_name(row["method"])
        return whole if len(whole) <= NAME else f"{whole[: NAME - 1]}…"

    def elsewhere(more: dict[str, Any]) -> Column:
        errors = {r["method"]: r["wer"] for r in more["rows"]}
        return more["title"], lambda r: percent(errors.get(r["method"]), 1)

    clock = [ERRORS[5]] if any(r.get("speedup_vs_far") for r in rows) else [ERRORS[6]]
    columns: list[Column] = [
        ("method", name),
        ("WER %", _of("wer", percent, 1)),
        ("95 % CI", _of("wer_ci", interval, 1)),
        *map(elsewhere, result["more_texts"]),
        VARIETY,
        ("tok/pass", _of("tokens_per_pass")),
        ("RTF", _of("rtf", number, 3)),
        *clock,
        FIRST_AUDIO,
        ("n", lambda r: str(r["n"])),
    ]
    return aligned(table_of("", filled_columns(columns, rows), rows))


def table_text(result: dict[str, Any]) -> str:
    """Return the content of compare.txt: of every set of texts the tables and the comparison at
    equal speed; the notes."""
    lines = _set_lines(result)
    for more in result["more_texts"]:
        lines += [f"{more['title']}:", "", *_set_lines(more)]
    convention = (
        f"{CONVENTION} LM: the same for the language model alone, with draft and verification."
    )
    return "\n".join([*lines, convention, *notes(result)])


def _set_lines(measured: dict[str, Any]) -> list[str]:
    """Return the tables of a set of texts, and its comparison at equal speed."""
    rows = measured["rows"]
    tables = [table_of("", main_columns(rows), rows)]
    spoken = [r for r in rows if r["kind"] == "method"]
    if any(r["accepted"] is not None or r["draft_passes"] for r in spoken):
        tables.append(table_of("", pass_columns(spoken), spoken))
    if lively := lively_rows(rows):
        tables.append(table_of("", lively_columns(lively), lively))
    if measured["by_category"]:
        tables.append(binned_table("WER %", measured["by_category"]))
    lines = [line for table in tables for line in (*aligned(table), "")]
    if sentences := rival_sentences(rows, measured["equal_speed"]):
        lines += [
            "At equal speed (linear between the settings of a family, paired bootstrap):",
            *(f"- {s}" for s in sentences),
            "",
        ]
    return lines


def binned_table(title: str, errors: dict[str, Any]) -> Table:
    """Return error rates in bins of utterances (`by_length`, `by_category`), a pair of columns
    each."""
    head = ["method"]
    for b in errors["bins"]:
        head += [_bin_name(b), f"95 % CI (n = {b['n']})"]
    rows = []
    for method, rates in errors["methods"].items():
        cells = [(percent(rate["wer"], 1), interval(rate["ci"], 1)) for rate in rates]
        rows.append([method, *(cell for pair in cells for cell in pair)])
    return Table(title, head, rows)


def _bin_name(b: dict[str, Any]) -> str:
    if "category" in b:
        return b["category"]
    low, high = b["words"]
    return f"{low} words" if low == high else f"{low}–{high} words"


def corpus_kind(header: dict[str, Any]) -> str:
    """Return the kind of corpus that the prompts come from (docs/data.md); unknown for
    utterances made in a notebook."""
    return header["corpus"].get("corpus", {}).get("kind", "unknown")


def rival_sentences(rows: Sequence[Row], pairs: Sequence[dict[str, Any]]) -> list[str]:
    """Compare every family with fixed chunks and with the policy of the same sampling, at equal
    measured time (else at equal tokens per pass), if both reach one."""
    families = {family.label: family for family in group_families(rows)}
    sentences = []
    for pair in pairs:
        a, b = families[pair["a"]], families[pair["b"]]
        if (
            pair["axis"] == pairs[0]["axis"]
            and pair["shared"]
            and a.sampling == b.sampling
            and {a.method, b.method} & RIVALS
        ):
            sentences.append(sentence(pair))
    return sentences


def notes(header: dict[str, Any]) -> list[str]:
    """Return notes on the columns, and on what the experiment can and cannot show; also printed
    in the report."""
    rows = header["rows"]
    spoken = [r for r in rows if r["kind"] == "method"]
    meanings = {"similarity": "cosine to the voice of the prompt", "quality": "predicted rating"}
    scorers = [
        (
            name,
            meanings[scorer["kind"]],
            [
                f"{r['method']} {r['records'] - r['scores'][name]['records']}"
                for r in rows
                if r["scores"][name]["records"] < r["records"]
            ],
        )
        for name, scorer in header["scorers"].items()
    ]
    text = (
        templates("eval.report")
        .get_template("notes.txt")
        .render(
            header=header,
            spoken=spoken,
            scorers=scorers,
            own_samplings=sampling_columns(spoken),
            partial=len({r["n"] for r in spoken}) > 1,
            has=lambda key: any(r[key] is not None for r in spoken),
            alike=[r["method"] for r in spoken if r["variety"] == 0],
            best=next((r["best_car"] for r in spoken if r["best_car"]), None),
        )
    )
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]
