"""The section of the report that says why chunks end where they do, and where an oracle would end them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.report.html import Sheets, folded, heading, paragraphs, wide_picture
from eval.report.reasons_plots import PICTURES

KEPT_CAPTION = (
    "One line a method. Left: how often it kept how many tokens. Right: the last token that it kept (blue) and the "
    "first that it dropped (orange); a dot is the median, a bar holds the middle half. Where blue lies right of "
    "orange, chunks end on a likely token, before an unlikely one: what follows is then predicted from firm ground. A "
    "fixed size cannot choose, so its two colours nearly coincide.")
LOSS_CAPTION = (
    "How surprised each head is by each token of the recording: strong blue, it knew; faint, it did not. One pass is a "
    "line that climbs from head 1 at its first token to the head of its last; a thin line stands where it ends. In red "
    "the path of the policy; below it the path of least loss that as many passes can have. That oracle sees the tokens "
    "to come, so nothing that speaks can follow it: it shows how much room there is.")


def reasons_section(result: Mapping[str, Any], folder: Path, sheets: Sheets) -> str:
    """The policy's reasons and the map of losses; nothing of comparisons that did not note them."""
    found = {name: of for name, of in (result.get("reasons") or {}).items() if of["decisions"]}
    losses = result.get("losses")
    return (_reasons(found, folder, sheets) if found else "") + (_losses(losses, folder, sheets) if losses else "")


def _reasons(found: Mapping[str, Any], folder: Path, sheets: Sheets) -> str:
    rows = []
    for name, of in found.items():
        for entry in of["sizes"]:
            kept, dropped = entry["kept"], entry["dropped"]
            rows.append([name, str(entry["size"]), f"{100 * entry['share']:.1f}",
                         *(f"{side[key]:.2f}" if side else "–" for key in ("drawn", "entropy")
                           for side in (kept, dropped))])
    head = ["method", "tokens kept", "% of chunks", "log p last kept", "log p first dropped", "entropy last kept",
            "entropy first dropped"]
    decisions = ", ".join(f"{name} {of['decisions']}" for name, of in found.items())
    agreed = [f"{name} {100 * of['likeliest']:.0f} %" for name, of in found.items() if of["likeliest"] is not None]
    notes = [f"Means over the decisions whose chunk was spoken whole ({decisions}), in nats; log p: log-probability of "
             "the token drawn, in the law of its head before temperature and top-k, those below -8 counted as -8. The "
             "first dropped token is the one that the next head drew; where all heads were kept there is none."]
    if agreed:
        notes.append("Chunks that end on the likeliest of the tokens that the method could end on, which is the whole "
                     f"rule of sure-last: {', '.join(agreed)}.")
    return (heading("Why chunks end where they do")
            + wide_picture("Sizes of chunks, and the last kept and first dropped token", folder / PICTURES["reasons"],
                           KEPT_CAPTION)
            + folded("By size of the chunk", sheets.table("Last kept and first dropped token", head, rows)
                     + paragraphs(notes)))


def _losses(losses: Mapping[str, Any], folder: Path, sheets: Sheets) -> str:
    shown = losses["shown"]
    led = [row for row in losses["table"] if not row["path"].startswith("car-")]
    speeds = [row["tokens_per_pass"] for row in led]
    near = [row for row in losses["table"] if row["path"].startswith("car-")
            and min(speeds) - 1.1 < row["tokens_per_pass"] < max(speeds) + 1.1]
    rows = [[row["path"], f"{row['tokens_per_pass']:.2f}", f"{row['nats_per_token']:.3f}"] for row in (*near, *led)]
    return (heading("Loss by head and position")
            + wide_picture("Loss by head and position, with paths", folder / PICTURES["losses"],
                           f"“{shown['text']}” {LOSS_CAPTION}")
            + sheets.table("Loss along the recordings", ["path", "tokens a pass", "nats a token"], rows)
            + paragraphs([
                f"{losses['utterances']} recordings, followed token by token (teacher forcing), with the fixed sizes "
                "next to the policy's. Less loss along recordings need not mean fewer word errors: a decoder that "
                "speaks follows its own tokens, and the policy was trained on those."]))
