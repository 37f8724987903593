"""One self-contained report.html of a comparison: summary, tables, plots, training curves, chunk timelines, audio.

    dcar report compare=runs/quickstart training_log=runs/quickstart/policy/log.jsonl

The file needs nothing beside it and no network: plots, sounds and the CSV of every table are embedded; `report_tables/`
beside it has the same CSV as files. It follows the reader's light or dark scheme, is worked by keyboard, and reads well
on a phone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcar.config import load_config, setting
from dcar.errors import ConfigError, DataError
from dcar.process import run_command
from eval.report.curves import curves_section, read_log
from eval.report.html import Sheets, escape, folded, heading, paragraphs
from eval.report.listen import listen_section
from eval.report.look import SCRIPT, STYLE
from eval.report.methods_section import (
    chunk_figure,
    equal_speed_section,
    length_section,
    lively_section,
    papers_section,
    verification,
)
from eval.report.papers import papers_text
from eval.report.reasons_section import reasons_section
from eval.report.summary import summary_section
from eval.report.table import MEANINGS, column_groups, notes

ABOVE = ("rows", "samples", "equal_speed", "by_length", "reasons", "losses")  # of compare.json: in their own sections
FORMAT_VERSION = 2  # of compare.json; 2: acceptance by position, families, comparison at equal speed


@dataclass
class ReportConfig:
    """Settings of `dcar report`."""

    compare: str = setting("runs/compare", "Folder of a comparison (compare.json, audio/).", place="folder")
    training_log: str | None = setting(None, "log.jsonl of DCPO.")
    out: str | None = setting(None, "File to write; null = report.html in the folder.", place="file")


def write_report(compare: str | Path, training_log: str | Path | None = None, out: str | Path | None = None) -> Path:
    """Write the report of the comparison in folder `compare`, and beside it the CSV of its tables (NAME_tables/);
    returns its path. DataError if there is no comparison."""
    folder = Path(compare)
    result = read_comparison(folder)
    log = read_log(Path(training_log)) if training_log else []
    path = Path(out) if out else folder / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    part, sheets = path.with_name(path.name + ".part"), Sheets()
    try:
        text = page(result, folder, log, sheets)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DataError(f"{folder}: no report can be made of compare.json and what lies beside it "
                        f"({type(error).__name__}: {error}); run the comparison again, finished records are kept"
                        ) from error
    part.write_text(text, encoding="utf-8", errors="backslashreplace")
    part.replace(path)
    sheets.write(path.with_name(f"{path.stem}_tables"))
    return path


def read_comparison(folder: Path) -> dict[str, Any]:
    """compare.json of a comparison's folder; DataError where it is missing, broken or of another format."""
    try:
        result = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{folder}/compare.json: cannot be read ({error}); run `dcar compare` first") from error
    version = result.get("format_version") if isinstance(result, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"{folder}/compare.json: format {version}, this version reads {FORMAT_VERSION}; run the "
                        f"comparison again (`dcar compare --config {folder}/config.yaml`): it speaks anew what it "
                        "needs")
    return result


def page(result: dict[str, Any], folder: Path, log: Sequence[dict[str, Any]] = (),
         sheets: Sheets | None = None) -> str:
    """The whole HTML text; `folder` holds the files that `result` names. sheets: takes the tables of the page."""
    rows, sheets = result["rows"], Sheets() if sheets is None else sheets
    body = "\n".join(s for s in (
        summary_section(result, folder),
        _tables(result, sheets),
        length_section(result, sheets),
        equal_speed_section(result, sheets),
        chunk_figure(rows, folder),
        reasons_section(result, folder, sheets),
        verification(rows, folder, sheets),
        lively_section(rows, sheets),
        papers_section(result, sheets),
        curves_section(log),
        listen_section(result, folder),
        _details(result),
    ) if s)
    links = "".join(f"<li><a href='#{name}'>{title}</a></li>"
                    for name, title in re.findall(r"<h2 id='([a-z0-9-]+)'>(.*?)</h2>", body))
    return ("<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
            "<meta name=viewport content='width=device-width, initial-scale=1'>"
            f"<title>DCAR comparison</title><style>{STYLE}</style></head><body>"
            "<a class=skip href='#main'>To the results</a><h1>DCAR: how many tokens a step?</h1>"
            f"<nav aria-label=Sections><ul>{links}</ul></nav><main id=main>{body}</main>"
            f"<script>{SCRIPT}</script></body></html>\n")


def _tables(result: dict[str, Any], sheets: Sheets) -> str:
    """The rows of the comparison, in tables that fit on a screen, and what they mean."""
    rows = result["rows"]
    kinds = ["reference" if r["kind"] == "reference" else "dcar" if r["method"].startswith("dcar") else "plain"
             for r in rows]
    tables = [f"<h3>{escape(title)}</h3>" + paragraphs([MEANINGS[title]])
              + sheets.table(title, [t for t, _ in columns], [[of(r) for _, of in columns] for r in rows], kinds)
              for title, columns in column_groups(rows)]
    return (heading("Comparison") + "".join(tables)
            + folded("What the columns mean, and what this experiment can and cannot show",
                     paragraphs(notes(rows, result))))


def _details(result: dict[str, Any]) -> str:
    shown = {k: v for k, v in result.items() if k not in ABOVE}
    return heading("How it was made") + folded(
        "Judge, sampling, checksums, versions, machine",
        f"<pre tabindex=0>{escape(json.dumps(shown, indent=1, ensure_ascii=False))}</pre>")


def main(arguments: list[str] | None = None) -> None:
    config = load_config(ReportConfig, arguments)
    if not config.compare:
        raise ConfigError("compare: give the folder of a comparison")
    path = write_report(config.compare, config.training_log, config.out)
    print(f"{papers_text(read_comparison(Path(config.compare)))}\n\nwrote {path}")


if __name__ == "__main__":
    sys.exit(run_command("eval.report.page", main))
