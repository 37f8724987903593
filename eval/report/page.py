"""Self-contained report.html of a comparison: verdict, audio samples, a picture, a table; the rest
folded.

    dcar report compare=runs/quickstart training_log=runs/quickstart/policy/log.jsonl

The file needs no other file and no network: plots, sounds and the CSV of every table are embedded;
`report_tables/` next to it contains the same CSV as files. It follows the reader's light or dark
scheme, can be used by keyboard, and is readable on a phone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcar.config import load_config, setting
from dcar.errors import ConfigError, DataError, check_format
from dcar.process import claimed
from dcar.sources.packages import templates
from dcar.storage import replacing
from eval.report.blocks import Section, Table, tables_of, write_tables
from eval.report.listen import listening
from eval.report.plots import curves_section, read_log
from eval.report.sections import folded_sections, texts_section
from eval.report.summary import summary, terminal_text
from eval.report.table import MEANINGS, column_groups, notes, table_of

# of compare.json: in their own sections
ABOVE = ("rows", "samples", "equal_speed", "by_length", "by_category", "more_texts")
FORMAT_VERSION = 5  # of compare.json


@dataclass
class ReportConfig:
    """Settings of `dcar report`."""

    compare: str = setting(
        "runs/compare", "Folder of a comparison (compare.json, audio/).", place="folder"
    )
    training_log: str | None = setting(None, "log.jsonl of a DCPO run.")
    out: str | None = setting(
        None, "File to write; null = report.html in the folder.", place="file"
    )


def write_report(
    compare: str | Path, training_log: str | Path | None = None, out: str | Path | None = None
) -> Path:
    """Write the report of the comparison in folder `compare`, and next to it the CSV of its
    tables (NAME_tables/). Return its path. Raises DataError if there is no comparison."""
    folder = Path(compare)
    result = read_comparison(folder)
    log = read_log(Path(training_log)) if training_log else []
    path = Path(out) if out else folder / "report.html"
    text, tables = page(result, folder, log)
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
    write_tables(tables, path.with_name(f"{path.stem}_tables"))
    return path


def read_comparison(folder: Path) -> dict[str, Any]:
    """Read compare.json of a comparison's folder. Raises DataError if it is missing, broken or
    of another format."""
    try:
        result = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder}/compare.json: cannot be read ({error}); run `dcar compare` first"
        ) from error
    version = result.get("format_version") if isinstance(result, dict) else None
    check_format(
        folder / "compare.json",
        version,
        FORMAT_VERSION,
        DataError,
        f"run the comparison again (`dcar compare --config {folder}/config.yaml`)",
    )
    return result


def page(
    result: dict[str, Any], folder: Path, log: Sequence[dict[str, Any]]
) -> tuple[str, list[Table]]:
    """Return the whole HTML text, and its tables; `folder` holds the files that `result` names."""
    head, curves = summary(result, folder), curves_section(log)
    sections = [*_tables(result), *folded_sections(result, folder), *([curves] if curves else [])]
    tables = list(tables_of(sections))
    shown = {k: v for k, v in result.items() if k not in ABOVE}
    text = (
        templates("eval.report", autoescape=True)
        .get_template("page.html")
        .render(
            result=result,
            summary=head,
            listen=listening(result, folder),
            sections=sections,
            details=json.dumps(shown, indent=1, ensure_ascii=False),
        )
    )
    return text.lstrip(), tables


def _row_class(row: dict[str, Any]) -> str:
    if row["kind"] == "reference":
        return "reference"
    return "dcar" if row["settings"]["method"].startswith("dcar") else "plain"


def _tables(result: dict[str, Any]) -> list[Section]:
    """Return the rows of the comparison in tables that fit on a screen, with explanations; the
    first is not folded."""
    rows = result["rows"]
    kinds = [_row_class(r) for r in rows]
    sections = [
        Section(title, [MEANINGS[title], table_of(title, columns, rows, kinds)])
        for title, columns in column_groups(rows)
    ]
    return [
        *sections,
        *map(texts_section, result["more_texts"]),
        Section("What this experiment can and cannot show", notes(result)),
    ]


CONFIG = ReportConfig


def main(arguments: list[str] | None = None) -> None:
    config = load_config(CONFIG, arguments)
    if not config.compare:
        raise ConfigError("compare: give the folder of a comparison")
    with claimed(config.out or Path(config.compare) / "report.html"):
        path = write_report(config.compare, config.training_log, config.out)
    print(
        f"{terminal_text(read_comparison(Path(config.compare)), Path(config.compare))}\n\nwrote "
        f"{path}"
    )
