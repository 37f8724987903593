"""What `dcar tune-voice` found: word errors, nearness to the voice and to its pace, before and after a change, and the
advice.

What was tuned is recommended where its word errors are fewer beyond chance; and where it is nearer to the voice or to
its pace beyond chance, farther from neither beyond chance, and the interval of the difference of word errors ends below
`margin`. `dcar speak` says one sentence at a time, so texts of one sentence decide; those of several are told besides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dcar.speak.phrases import split_sentences
from eval.results.rows import compare_records
from eval.results.store import RECORDING, RESYNTHESIS, Record

Spoken = dict[str, list[Record]]  # method, or reference -> its records
FEW = 20  # held-out sentences, below which an interval says little
SIMILARITY = "speaker_similarity"  # of a record: cosine to the voice of the prompt
NOTHING = ("Stay with what there was: dev sentences chose it, by their words and the nearness of the voice, so there "
           "is nothing to compare.")


def rate(records: Sequence[Record]) -> float:
    """The corpus word error rate."""
    return sum(sum(r["words"][:3]) for r in records) / sum(r["words"][3] for r in records)


def nearness(records: Sequence[Record]) -> float | None:
    """The mean similarity to the voice of the prompt; None where none was measured."""
    found = [r[SIMILARITY] for r in records if r.get(SIMILARITY) is not None]
    return sum(found) / len(found) if found else None


def length(records: Sequence[Record]) -> float:
    """How long it lasts beside the recordings: the pace of the speaker is 1, below it is faster."""
    return sum(r["duration"] for r in records) / sum(r["reference_duration"] for r in records)


def by_sentences(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Those of texts of one sentence, as `dcar speak` says them, and those of several."""
    one: list[Record] = []
    several: list[Record] = []
    for record in records:
        (several if len(split_sentences(record["text"])) > 1 else one).append(record)
    return one, several


def deciding(records: Sequence[Record]) -> list[Record]:
    """Those of texts of one sentence, or all where there are none."""
    one, several = by_sentences(records)
    return one or several


def off_pace(record: Record) -> float:
    """How far the length is from the recording's: |ln(length / its)|, at most that of a tenth of it, as of silence."""
    return abs(math.log(max(record["duration"] / record["reference_duration"], 0.1)))


def outcome(before: Sequence[Record], after: Sequence[Record] | None, resamples: int) -> dict[str, Any]:
    """Word errors, nearness and length of the decoder as it was, and of the tuned one with the paired differences, of
    `off_pace` too."""
    row: dict[str, Any] = {"start": rate(before), "sentences": len({r["id"] for r in before}),
                           "start_similarity": nearness(before), "start_length": length(before)}
    if after is not None:
        test = compare_records(after, before, resamples)
        pace = compare_records(after, before, resamples, lambda r: (off_pace(r), 1))
        voice = None
        if nearness(before) is not None and nearness(after) is not None:
            voice = compare_records(after, before, resamples,
                                    lambda r: None if r.get(SIMILARITY) is None else (r[SIMILARITY], 1))
        row |= {"tuned": rate(after), "difference": test.difference, "difference_ci": [test.low, test.high],
                "p": test.p_value, "detectable": test.detectable, "tuned_similarity": nearness(after),
                "tuned_length": length(after), "nearer": voice and voice.difference,
                "nearer_ci": voice and [voice.low, voice.high], "off_pace": pace.difference,
                "off_pace_ci": [pace.low, pace.high]}
    return row


def verdict(before: Spoken, after: Spoken, methods: Sequence[str], tuned: str, margin: float, resamples: int,
            ) -> dict[str, Any]:
    """What one change brought on held-out sentences: a row a method and kind of text, whether it is `better`, and the
    advice, both by the first row. tuned: what was changed, "decoder" or "vocoder"."""
    rows = rows_of(before, after, methods, resamples)
    return {"tuned": tuned, "better": is_better(rows[0], margin), "advice": advice(rows[0], tuned, margin),
            "rows": rows}


def rows_of(before: Spoken, after: Spoken | None, methods: Sequence[str], resamples: int) -> list[dict[str, Any]]:
    """By method, and texts of one sentence apart from those of several: `outcome`. The first decides (`deciding`)."""
    rows = []
    for method in methods:
        parts = by_sentences(before[method]), by_sentences(after[method]) if after else (None, None)
        for of, first, second in zip(("one sentence", "several sentences"), *parts, strict=True):
            if first:
                rows.append({"method": method, "texts": of, **outcome(first, second, resamples)})
    return rows


def bounds(spoken: Spoken) -> dict[str, dict[str, float | None]]:
    """Word errors and nearness of recordings and of their resynthesis, where they were heard."""
    heard = {name: deciding(spoken[name]) for name in (RECORDING, RESYNTHESIS) if name in spoken}
    return {name: {"wer": rate(records), "similarity": nearness(records)} for name, records in heard.items()}


def is_better(row: dict[str, Any], margin: float) -> bool:
    """Fewer word errors beyond chance, or nearer to voice or pace beyond chance, and farther from neither, at no more
    than `margin` more of them."""
    high, (near, far) = row["difference_ci"][1], moved(row)
    return bool(high < 0 or high <= margin and near and not far)


def moved(row: dict[str, Any]) -> tuple[str, str]:
    """What the tuned one is nearer to beyond chance, and what it is farther from."""
    voice, pace = row["nearer_ci"] or [0.0, 0.0], row["off_pace_ci"]
    near = (("the voice", voice[0] > 0), ("its pace", pace[1] < 0))
    far = (("the voice", voice[1] < 0), ("its pace", pace[0] > 0))
    return " and ".join(name for name, so in near if so), " and ".join(name for name, so in far if so)


def advice(row: dict[str, Any], tuned: str, margin: float) -> str:
    """What to take, in words, by the row that decides."""
    low, high = (100 * x for x in row["difference_ci"])
    found = (f"{100 * row['tuned']:.1f} % word errors instead of {100 * row['start']:.1f}, a difference of "
             f"{100 * row['difference']:+.1f} points ({low:+.1f} to {high:+.1f})")
    if row["nearer_ci"]:
        found += (f"; similarity to the voice {row['tuned_similarity']:.3f} instead of {row['start_similarity']:.3f} "
                  f"({row['nearer_ci'][0]:+.3f} to {row['nearer_ci'][1]:+.3f})")
    found += f"; {row['tuned_length']:.2f} of the recordings' length instead of {row['start_length']:.2f}."
    if row["sentences"] < FEW:
        found += f" {row['sentences']} sentences are few: their interval is too narrow."
    if high < 0:
        return f"Take the tuned {tuned}: {found}"
    if low > 0:
        return f"Leave the tuned {tuned}, which makes more word errors: {found}"
    near, far = moved(row)
    if is_better(row, margin):
        said = (f"Take the tuned {tuned}, nearer to {near} at no more than {100 * margin:g} points of word errors for "
                "sure")
    elif far:
        said = f"Leave the tuned {tuned}, which is farther from {far}"
    elif near:
        said = (f"Leave the tuned {tuned}: nearer to {near}, but it may make more than {100 * margin:g} points more "
                "word errors (margin)")
    else:
        said = f"Leave the tuned {tuned}, which is better in nothing beyond chance"
    return (f"{said}: {found} With {row['sentences']} sentences a true difference of {100 * row['detectable']:.1f} "
            "points would have been seen in four of five such comparisons.")


def table(found: dict[str, Any]) -> str:
    """What dev sentences chose, what each change brought on held-out ones, and the advice."""
    lines = []
    for t in found["tried"]:
        near = "" if t["similarity"] is None else f", similarity {t['similarity']:.3f}"
        lines.append(f"dev, vocoder {t['vocoder_share']:.0%} of the way, decoder {t['share']:.0%}: "
                     f"{100 * t['wer']:.1f} % word errors{near}, length {t['length']:.2f}"
                     + ("   ← chosen" if (t["share"], t["vocoder_share"]) == (found["share"], found["vocoder_share"])
                        else ""))
    for step in found["steps"]:
        lines += ["", *held_out(step["rows"], f"held out, tuned {step['tuned']}"), step["advice"]]
    if not found["steps"]:
        lines += ["", *held_out(found["start_rows"], "held out"), NOTHING]
    told = "; ".join(f"{name} {100 * b['wer']:.1f} %" + ("" if b["similarity"] is None else
                                                        f", voice {b['similarity']:.3f}")
                     for name, b in found["bounds"].items())
    seeds = ", ".join(map(str, found["seeds"]))
    lines += ["", f"Seeds {seeds}, judge {found['judge']}; length: beside the recordings."
              + (f" Of the texts that decide: {told}." if told else "")]
    return "\n".join(lines)


def held_out(rows: Sequence[dict[str, Any]], title: str) -> list[str]:
    """Lines of a table of rows, before and after."""
    names = [f"{row['method']}, texts of {row['texts']} ({row['sentences']})" for row in rows]
    wide = max(map(len, [title, *names]))
    lines = [f"{title:{wide}}     before     after   difference (95 %)       voice         length"]
    for name, row in zip(names, rows, strict=True):
        line = f"{name:{wide}}   {100 * row['start']:6.1f} %"
        if "difference" in row:
            low, high = (100 * x for x in row["difference_ci"])
            change = f"{100 * row['difference']:+.1f} ({low:+.1f} to {high:+.1f})"
            line += f"   {100 * row['tuned']:5.1f} %   {change:21}"
            if row["nearer_ci"]:
                line += f"   {row['start_similarity']:.3f}, {row['tuned_similarity']:.3f}"
            line += f"   {row['start_length']:.2f}, {row['tuned_length']:.2f}"
        lines.append(line)
    return lines
