"""The sections of the report that set methods against each other: speed, acceptance, equal speed, the papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.methods.families import family_label, group_families
from eval.report.html import Sheets, box, bullets, escape, figure, folded, heading, paragraphs, wide_picture
from eval.report.papers import HEAD, LEGEND, beside_papers, cells, conditions, general_remarks, verdict
from eval.report.table import filled_columns, lively_columns, lively_rows, pass_columns, rival_sentences
from eval.results.pareto import SPEED_AXES, pareto_front, sentence, speed_axis
from eval.results.rows import Row

LENGTH_COLORS = ["#e3e6ea", "#b3cfe9", "#84b3da", "#5595c9", "#2f75b2", "#185593", "#0a386b", "#041f3d"]


def chunk_figure(rows: Sequence[Row], folder: Path) -> str:
    """WER against tokens a pass, where the picture of the summary is against the measured speed."""
    if not speed_axis(rows):
        return ""
    title = "Errors against chunk size"
    return heading(title) + wide_picture(
        title, folder / "compare.png", "Against tokens a pass, which no machine distorts and which leave out what "
        f"drafting and verifying cost. {front_text(rows, 'tokens_per_pass')}")


def length_section(result: dict[str, Any], sheets: Sheets) -> str:
    """WER by length of the utterance; nothing where the utterances are too few or alike."""
    found = result.get("by_length")
    if not found:
        return ""
    head = ["method"]
    for b in found["bins"]:
        low, high = b["words"]
        head += [f"{low} words" if low == high else f"{low}–{high} words", f"95 % CI (n = {b['n']})"]
    rows = [[method, *(cell for bin_ in bins for cell in (
        f"{100 * bin_['wer']:.1f}", "–".join(f"{100 * end:.1f}" for end in bin_["ci"])))]
        for method, bins in found["methods"].items()]
    return (heading("Errors by length of the utterance") + sheets.table("Errors by length of the utterance", head, rows)
            + paragraphs(["WER in % of the utterances whose reference has so many words; n: how many those are. "
                          "Intervals: bootstrap over utterances."]))


def front_text(rows: Sequence[Row], axis: str) -> str:
    """The methods on the Pareto front, from slow to fast."""
    points = [r for r in rows if r["kind"] == "method" and r.get(axis) is not None]
    front = pareto_front([r[axis] for r in points], [r["wer"] for r in points])
    return f"On the Pareto front, from slow to fast: {', '.join(points[i]['method'] for i in front)}."


def verification(rows: Sequence[Row], folder: Path, sheets: Sheets) -> str:
    """Passes and acceptance; nothing where no method verifies and none uses a draft model."""
    spoken = [r for r in rows if r["kind"] == "method"]
    verifying = [r for r in spoken if r.get("acceptance_rate") is not None]
    if not verifying:
        return ""
    columns = filled_columns(pass_columns(spoken), spoken)
    out = [heading("Passes and acceptance"),
           sheets.table("Passes and acceptance", [t for t, _ in columns],
                        [[of(r) for _, of in columns] for r in spoken])]
    if any(r.get("acceptance_by_position") for r in verifying):
        out.append(figure("Acceptance by position", folder / "compare_acceptance.png",
                          "Of the drafted tokens that were judged at a position, because all before them had been "
                          "accepted, the share that was accepted. Stronger colour: larger setting."))
        out.append(accepted_lengths(verifying))
    return "".join(out)


def lively_section(rows: Sequence[Row], sheets: Sheets) -> str:
    """Variety, loops and cuts beside the errors, where sentences were spoken more than once."""
    spoken = lively_rows(rows)
    if not spoken:
        return ""
    columns = filled_columns(lively_columns(spoken), spoken)
    return (heading("What greediness costs")
            + sheets.table("What greediness costs", [t for t, _ in columns],
                           [[of(r) for _, of in columns] for r in spoken])
            + paragraphs(["Fewer errors at a low temperature are bought with sameness: choose by both figures."]))


def accepted_lengths(rows: Sequence[Row]) -> str:
    """The histogram of accepted tokens of every verifying method, as one bar each."""
    rows = [r for r in rows if r.get("accepted_lengths")]
    longest = max(int(n) for r in rows for n in r["accepted_lengths"])
    legend = "".join(f"<span><i style='background:{_color(n)}'></i>{n}</span>" for n in range(longest + 1))
    lines = []
    for row in rows:
        shares = {int(n): s for n, s in row["accepted_lengths"].items() if s > 0}
        blocks = "".join(f"<span style='flex:{s:.4f} 1 0;background:{_color(n)}' title='{n} accepted: "
                         f"{100 * s:.1f} % of passes'></span>" for n, s in shares.items())
        text = ", ".join(f"{n}: {100 * s:.0f} %" for n, s in shares.items())
        lines.append(f"<div class=lengths><span class=name>{escape(row['method'])}</span>"
                     f"<div class=bar role=img aria-label='{escape(text)}'>{blocks}</div>"
                     f"<span class=soft>{row['mean_accepted']:.2f}</span></div>")
    return (heading("Accepted lengths") + "<p class=soft>How many drafted tokens a verifying pass accepted: the width "
            "of a block is the share of passes; at the end of the bar, the mean. A pass emits one token more than it "
            f"accepts, unless the utterance ends.</p><div class=legend><span>accepted in a pass:</span>{legend}</div>"
            + "".join(lines))


def _color(length: int) -> str:
    return LENGTH_COLORS[min(length, len(LENGTH_COLORS) - 1)]


def equal_speed_section(result: dict[str, Any], sheets: Sheets) -> str:
    """Who wins at equal speed: sentences against fixed chunks and the policy, all pairs as a matrix, then in words."""
    pairs = result.get("equal_speed") or []
    if not pairs:
        return ""
    out = [heading("Who wins at equal speed"),
           paragraphs(["Between its measured settings a family is read as a straight line. Two families are compared "
                       "in the middle of the speeds that both reach and on average over them; intervals and p: paired "
                       "bootstrap over utterances, the speeds taken as measured."]),
           bullets(rival_sentences(result))]
    for axis in dict.fromkeys(p["axis"] for p in pairs):
        chosen = [p for p in pairs if p["axis"] == axis]
        title = f"At equal {'speed-up' if axis != 'tokens_per_pass' else 'tokens a pass'}"
        out.append(f"<h3>{title}</h3>" + matrix(title, chosen, list(group_families(result["rows"])), sheets))
        out.append(folded(f"All {len(chosen)} pairs in words ({SPEED_AXES[axis]})",
                          bullets([sentence(p) for p in chosen])))
    out.append(paragraphs(["Points of WER, row minus column, averaged over the shared speeds: blue where the row makes "
                           "fewer errors, red where it makes more, bold where p < 0.05 (one pair in twenty would be by "
                           "chance). · no shared speed. The interval is in the words above and in the tooltip."]))
    return "".join(out)


def matrix(title: str, pairs: Sequence[dict[str, Any]], families: Sequence[str], sheets: Sheets) -> str:
    """Mean WER differences of all pairs of families, row minus column, and their CSV."""
    found = {(p["a"], p["b"]): p for p in pairs}
    present = [f for f in families if any(f in key for key in found)]
    labels = [family_label(f) for f in present]
    cells = [[_difference(found, a, b) for b in present] for a in present]
    head = "<th scope=col>row − column</th>" + "".join(f"<th scope=col>{escape(label)}</th>" for label in labels)
    body = "".join(f"<tr><th scope=row>{escape(label)}</th>{''.join(html for html, _ in row)}</tr>"
                   for label, row in zip(labels, cells, strict=True))
    plain = [[label, *(text for _, text in row)] for label, row in zip(labels, cells, strict=True)]
    return (f"<div class=matrix>{box(title, f'<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')}"
            f"</div>{sheets.link(title, ['row minus column', *labels], plain)}")


def _difference(found: dict[tuple[str, str], dict[str, Any]], row: str, column: str) -> tuple[str, str]:
    """A cell of the matrix: its HTML, and its text."""
    if row == column:
        return "<td></td>", ""
    pair, sign = (found[row, column], 1) if (row, column) in found else (found[column, row], -1)
    if pair["shared"] is None:
        return "<td class=none>·</td>", ""
    mean = pair["average"]
    points = 100 * sign * mean["difference"]
    ends = sorted(100 * sign * v for v in mean["ci"])
    none = abs(points) < 0.05  # what is written as 0.0 is neither
    kind = "even" if none else ("better" if points < 0 else "worse") + (" sure" if mean["p"] < 0.05 else "")
    text = "0.0" if none else f"{points:+.1f}".replace("-", "−")
    return (f"<td class='{kind}' title='{ends[0]:+.1f} to {ends[1]:+.1f}, p = {mean['p']:.3f}'>".replace("-", "−")
            + f"{text}</td>", text)


def papers_section(result: dict[str, Any], sheets: Sheets) -> str:
    """Our numbers beside the papers', table by table, each folded; nothing where no paper has one of the methods."""
    blocks = beside_papers(result["rows"])
    if not blocks:
        return ""
    out = [heading("Beside the papers"), f"<p>Here: {escape(conditions(result))}.</p>",
           paragraphs(general_remarks(result))]
    for block in blocks:
        s = block.setup
        title = f"{s.paper}, {s.table}"
        out.append(folded(title, (
            f"<p class=soft>There: {escape(s.model)}; {escape(s.data)}; WER by {escape(s.recognizer)}; "
            f"{escape(s.machine)}. Baseline: {escape(s.baseline_name)}, {s.baseline_wer} % (here "
            f"{escape(s.wer_baseline)} for WER, {escape(s.speed_baseline)} for speed).</p>"
            + sheets.table(f"{s.paper.split()[0]}, {s.table}", HEAD, [cells(m) for m in block.matches])
            + bullets([*(f"{m.result.name}: {verdict(m)}." for m in block.matches), *s.remarks]))))
    out.append(paragraphs([LEGEND]))
    return "".join(out)
