"""Self-contained report.html of a comparison: verdict, audio samples, a picture, a table; the rest
folded.

    dcar report compare=runs/quickstart training_logs=[runs/quickstart/dcpo/log.jsonl]

The file needs no other file and no network: plots, sounds and the CSV of every table are embedded;
`report_tables/` next to it contains the same CSV as files. It follows the reader's light or dark
scheme, can be used by keyboard, and is readable on a phone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dcar.config import load_config, setting
from dcar.errors import ConfigError
from dcar.process import claimed
from dcar.sources.packages import templates
from dcar.storage import replacing
from eval.report.blocks import Section, Table, tables_of, write_tables
from eval.report.listen import listening
from eval.report.plots import curves_section
from eval.report.sections import folded_sections
from eval.report.summary import summary, terminal_text
from eval.report.table import MEANINGS, column_groups, notes, table_of
from eval.results.types import Result, Row, read_result, to_json


@dataclass
class ReportConfig:
    """Settings of `dcar report`."""

    compare: str = setting(
        "runs/compare", "Folder of a comparison (compare.json, audio/).", place="folder"
    )
    training_logs: list[str] = setting([], "log.jsonl of DCPO runs.")
    out: str | None = setting(
        None, "File to write; null = report.html in the folder.", place="file"
    )


def write_report(
    compare: str | Path, training_logs: Sequence[str | Path] = (), out: str | Path | None = None
) -> Path:
    """Write the report of the comparison in folder `compare`, and next to it the CSV of its
    tables (NAME_tables/). Return its path. Raises DataError if there is no comparison."""
    folder = Path(compare)
    result = read_result(folder)
    curves = list(filter(None, map(curves_section, map(Path, training_logs))))
    path = Path(out) if out else folder / "report.html"
    text, tables = page(result, folder, curves)
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
    write_tables(tables, path.with_name(f"{path.stem}_tables"))
    return path


def page(result: Result, folder: Path, curves: Sequence[Section] = ()) -> tuple[str, list[Table]]:
    """Return the whole HTML text, and its tables; `folder` holds the files that `result` names."""
    sections = [*_tables(result), *folded_sections(result, folder), *curves]
    sections.append(Section("What this experiment can and cannot show", notes(result)))
    shared = replace(result, comparisons=[])  # those are in their own sections
    head = summary(result, folder)
    text = (
        templates("eval.report", autoescape=True)
        .get_template("page.html")
        .render(
            result=result,
            summary=head,
            listen=listening(result, folder),
            sections=sections,
            details=to_json(shared, indent=1),
        )
    )
    tests = [of.tests for of in head.verdict if of.tests]
    return text.lstrip(), [*tests, *tables_of(sections)]


def _row_class(row: Row) -> str:
    if not row.family:
        return "reference"
    return "dcar" if row.family.method.startswith("dcar") else "plain"


def _tables(result: Result) -> list[Section]:
    """Return the rows of the first comparison in tables that fit on a screen, with explanations;
    the first is not folded."""
    rows = result.first.rows
    kinds = [_row_class(row) for row in rows]
    return [
        Section(title, [MEANINGS[title], table_of(title, columns, rows, kinds)])
        for title, columns in column_groups(rows)
    ]


CONFIG = ReportConfig


def main(arguments: list[str] | None = None) -> None:
    config = load_config(CONFIG, arguments)
    if not config.compare:
        raise ConfigError("compare: give the folder of a comparison")
    with claimed(config.out or Path(config.compare) / "report.html"):
        path = write_report(config.compare, config.training_logs, config.out)
    folder = Path(config.compare)
    print(f"{terminal_text(read_result(folder), folder)}\n\nwrote {path}")
