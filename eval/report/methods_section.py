"""The sections of the report that set methods against each other: speed, acceptance, equal speed, the papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.methods.families import family_label, group_families
from eval.report.html import bullets, escape, figure, paragraphs, table
from eval.report.papers import HEAD, LEGEND, beside_papers, cells, conditions, general_remarks, verdict
from eval.report.table import lively_columns, lively_rows, pass_columns, rival_sentences
from eval.results.pareto import SPEED_AXES, pareto_front, sentence, speed_axis
from eval.results.rows import Row

LENGTH_COLORS = ["#e3e6ea", "#b3cfe9", "#84b3da", "#5595c9", "#2f75b2", "#185593", "#0a386b", "#041f3d"]
CAPTION = ("One line per method, through its settings; bars: 95 % intervals. Lower and further right is better. A "
           "policy or a verifier is worth its cost where it lies below the line of CAR-k, a fixed number of tokens a "
           "pass. The error axis need not start at 0.")


def error_figures(rows: Sequence[Row], folder: Path) -> str:
    """WER against measured speed-up, where there are timings, and against tokens a pass."""
    axis = speed_axis(rows)
    parts = []
    if axis:
        parts.append(figure("Errors against speed", folder / "compare_speed.png",
                            f"{CAPTION} {front_text(rows, axis)}"))
    text = front_text(rows, "tokens_per_pass")
    parts.append(figure("Errors against chunk size", folder / "compare.png",
                        f"The same against tokens a pass, which no machine distorts and which leave out what drafting "
                        f"and verifying cost. {text}" if axis else f"{CAPTION} {text}"))
    return "".join(parts)


def front_text(rows: Sequence[Row], axis: str) -> str:
    """The methods on the Pareto front, from slow to fast."""
    points = [r for r in rows if r["kind"] == "method" and r.get(axis) is not None]
    front = pareto_front([r[axis] for r in points], [r["wer"] for r in points])
    return f"On the Pareto front, from slow to fast: {', '.join(points[i]['method'] for i in front)}."


def verification(rows: Sequence[Row], folder: Path) -> str:
    """Passes and acceptance; nothing where no method verifies and none uses a draft model."""
    spoken = [r for r in rows if r["kind"] == "method"]
    verifying = [r for r in spoken if r.get("acceptance_rate") is not None]
    if not verifying:
        return ""
    columns = pass_columns(spoken)
    out = ["<h2>Passes and acceptance</h2>",
           table([t for t, _ in columns], [[of(r) for _, of in columns] for r in spoken])]
    if any(r.get("acceptance_by_position") for r in verifying):
        out.append(figure("Acceptance by position", folder / "compare_acceptance.png",
                          "Of the drafted tokens that were judged at a position, because all before them had been "
                          "accepted, the share that was accepted. Stronger colour: larger setting."))
        out.append(accepted_lengths(verifying))
    return "".join(out)


def lively_section(rows: Sequence[Row]) -> str:
    """Variety, loops and cuts beside the errors, where sentences were spoken more than once."""
    spoken = lively_rows(rows)
    if not spoken:
        return ""
    columns = lively_columns(spoken)
    return ("<h2>What greediness costs</h2>"
            + table([t for t, _ in columns], [[of(r) for _, of in columns] for r in spoken])
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
    return ("<h2>Accepted lengths</h2><p class=soft>How many drafted tokens a verifying pass accepted: the width of a "
            "block is the share of passes; at the end of the bar, the mean. A pass emits one token more than it "
            f"accepts, unless the utterance ends.</p><div class=legend><span>accepted in a pass:</span>{legend}</div>"
            + "".join(lines))


def _color(length: int) -> str:
    return LENGTH_COLORS[min(length, len(LENGTH_COLORS) - 1)]


def equal_speed_section(result: dict[str, Any]) -> str:
    """Who wins at equal speed: sentences against fixed chunks and the policy, all pairs as a matrix, then in words."""
    pairs = result.get("equal_speed") or []
    if not pairs:
        return ""
    out = ["<h2>Who wins at equal speed</h2>",
           paragraphs(["Between its measured settings a family is read as a straight line. Two families are compared "
                       "in the middle of the speeds that both reach and on average over them; intervals and p: paired "
                       "bootstrap over utterances, the speeds taken as measured."]),
           bullets(rival_sentences(result))]
    for axis in dict.fromkeys(p["axis"] for p in pairs):
        chosen = [p for p in pairs if p["axis"] == axis]
        out.append(f"<h3>At equal {escape('speed-up' if axis != 'tokens_per_pass' else 'tokens a pass')}</h3>"
                   + matrix(chosen, list(group_families(result["rows"]))))
        out.append("<details><summary>" + escape(f"All {len(chosen)} pairs in words ({SPEED_AXES[axis]})")
                   + "</summary>" + bullets([sentence(p) for p in chosen]) + "</details>")
    out.append(paragraphs(["Points of WER, row minus column, averaged over the shared speeds: blue where the row makes "
                           "fewer errors, red where it makes more, bold where p < 0.05 (one pair in twenty would be by "
                           "chance). · no shared speed. The interval is in the words above and in the tooltip."]))
    return "".join(out)


def matrix(pairs: Sequence[dict[str, Any]], families: Sequence[str]) -> str:
    """Mean WER differences of all pairs of families, row minus column."""
    found = {(p["a"], p["b"]): p for p in pairs}
    present = [f for f in families if any(f in key for key in found)]

    def cell(row: str, column: str) -> str:
        if row == column:
            return "<td></td>"
        pair, sign = (found[row, column], 1) if (row, column) in found else (found[column, row], -1)
        if pair["shared"] is None:
            return "<td class=none>·</td>"
        mean = pair["average"]
        points = 100 * sign * mean["difference"]
        ends = sorted(100 * sign * v for v in mean["ci"])
        kind = ("better" if points < 0 else "worse") + (" sure" if mean["p"] < 0.05 else "")
        return (f"<td class='{kind}' title='{ends[0]:+.1f} to {ends[1]:+.1f}, p = {mean['p']:.3f}'>"
                f"{points:+.1f}</td>".replace("-", "−"))

    head = "<th></th>" + "".join(f"<th>{escape(family_label(f))}</th>" for f in present)
    body = "".join(f"<tr><td>{escape(family_label(a))}</td>{''.join(cell(a, b) for b in present)}</tr>"
                   for a in present)
    return f"<div class='scroll matrix'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def papers_section(result: dict[str, Any]) -> str:
    """Our numbers beside the papers', table by table; nothing where no paper has a method of this comparison."""
    blocks = beside_papers(result["rows"])
    if not blocks:
        return ""
    out = ["<h2>Beside the papers</h2>", f"<p>Here: {escape(conditions(result))}.</p>",
           paragraphs(general_remarks(result))]
    for block in blocks:
        s = block.setup
        out.append(
            f"<h3>{escape(s.paper)}, {escape(s.table)}</h3><p class=soft>There: {escape(s.model)}; {escape(s.data)}; "
            f"WER by {escape(s.recognizer)}; {escape(s.machine)}. Baseline: {escape(s.baseline_name)}, "
            f"{s.baseline_wer} % (here {escape(s.wer_baseline)} for WER, {escape(s.speed_baseline)} for speed).</p>"
            + table(HEAD, [cells(m) for m in block.matches])
            + bullets([*(f"{m.result.name}: {verdict(m)}." for m in block.matches), *s.remarks]))
    out.append(paragraphs([LEGEND]))
    return "".join(out)
