"""What `dcar tune-voice` found: word errors, nearness to the voice and to its pace, before and after, and the advice.

The tuned voice is recommended where its word errors are fewer beyond chance; and where it is nearer to the voice or to
its pace beyond chance, farther from neither beyond chance, and the interval of the difference of word errors ends below
`margin`. `dcar speak` says one sentence at a time, so texts of one sentence decide; those of several are told besides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from dcar.speak.phrases import split_sentences
from eval.results.rows import compare_records
from eval.results.stats import PairedTest, paired_test
from eval.results.store import RECORDING, RESYNTHESIS, Record

Spoken = dict[str, list[Record]]  # method, or reference -> its records
FEW = 20  # held-out sentences, below which an interval says little
SIMILARITY = "speaker_similarity"  # of a record: cosine to the voice of the prompt
ANOTHER_VOCODER = "resynthesised by the tuned vocoder"


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
    """Those of texts of one sentence, as `dcar speak` says them, and those of several; where no text has one sentence,
    all stand first."""
    one: list[Record] = []
    several: list[Record] = []
    for record in records:
        (several if len(split_sentences(record["text"])) > 1 else one).append(record)
    return (one, several) if one else (several, [])


def similarity(record: Record) -> float | None:
    """To the voice of the prompt; None where none was measured."""
    found: float | None = record.get(SIMILARITY)
    return found


def off_pace(record: Record) -> float:
    """How far the length is from the recording's: |ln(length / its)|, at most that of a tenth of it, as of silence."""
    return abs(math.log(max(record["duration"] / record["reference_duration"], 0.1)))


def paired(measure: Callable[[Record], float | None], after: Sequence[Record], before: Sequence[Record],
           resamples: int) -> PairedTest | None:
    """The paired test of a measure, after - before, over the sentences; None where it was never taken."""
    sums: list[dict[str, list[float]]] = []
    for records in (after, before):
        found: dict[str, list[float]] = {}
        for r in records:
            if (value := measure(r)) is not None:
                found.setdefault(r["id"], []).append(value)
        sums.append(found)
    shared = sorted(set(sums[0]) & set(sums[1]))
    if not shared:
        return None
    a, b = (([sum(found[i]) for i in shared], [len(found[i]) for i in shared]) for found in sums)
    return paired_test(*a, *b, resamples=resamples)


def outcome(before: Sequence[Record], after: Sequence[Record] | None, resamples: int) -> dict[str, Any]:
    """Word errors, nearness and length of the decoder as it was, and of the tuned one with the paired differences, of
    `off_pace` too."""
    row: dict[str, Any] = {"start": rate(before), "sentences": len({r["id"] for r in before}),
                           "start_similarity": nearness(before), "start_length": length(before)}
    if after is not None:
        test, voice = compare_records(after, before, resamples), paired(similarity, after, before, resamples)
        pace = paired(off_pace, after, before, resamples)
        assert pace is not None  # every record has a length
        row |= {"tuned": rate(after), "difference": test.difference, "difference_ci": [test.low, test.high],
                "p": test.p_value, "detectable": test.detectable, "tuned_similarity": nearness(after),
                "tuned_length": length(after), "nearer": voice and voice.difference,
                "nearer_ci": voice and [voice.low, voice.high], "off_pace": pace.difference,
                "off_pace_ci": [pace.low, pace.high]}
    return row


def summary(spoken: dict[str, Spoken], methods: Sequence[str], tuned: str, margin: float, resamples: int,
            ) -> dict[str, Any]:
    """Word errors and nearness of what there was (`start`) and, where something was tuned, of that (`tuned`), with
    their paired differences, by method; of texts of several sentences; of the recordings and of their resynthesis; and
    the advice by the first method.

    tuned: what was, in words: "decoder", "vocoder", "decoder and vocoder"; "" for nothing.
    """
    rows = []
    parts = {name: {m: by_sentences(records) for m, records in found.items()} for name, found in spoken.items()}
    for method in methods:
        for part, of in enumerate(("one sentence", "several sentences")):
            if before := parts["start"][method][part]:
                after = parts["tuned"][method][part] if "tuned" in parts else None
                rows.append({"method": method, "texts": of, **outcome(before, after, resamples)})
    references = {name: parts["start"][name][0] for name in (RECORDING, RESYNTHESIS) if name in parts["start"]}
    if RESYNTHESIS in parts.get("tuned", {}):
        references[ANOTHER_VOCODER] = parts["tuned"][RESYNTHESIS][0]
    bounds = {name: {"wer": rate(records), "similarity": nearness(records)} for name, records in references.items()}
    return {"tuned_is_better": is_better(rows[0], margin), "advice": advice(rows[0], tuned, margin), "rows": rows,
            "bounds": bounds}


def is_better(row: dict[str, Any], margin: float) -> bool:
    """Fewer word errors beyond chance, or nearer to voice or pace beyond chance, and farther from neither, at no more
    than `margin` more of them."""
    if "difference" not in row:
        return False
    high = row["difference_ci"][1]
    return bool(high < 0 or high <= margin and gains(row) and not losses(row))


def gains(row: dict[str, Any]) -> list[str]:
    """What the tuned one is nearer to beyond chance."""
    return [*(["the voice"] if row["nearer_ci"] and row["nearer_ci"][0] > 0 else []),
            *(["its pace"] if row["off_pace_ci"][1] < 0 else [])]


def losses(row: dict[str, Any]) -> list[str]:
    """What it is farther from beyond chance."""
    return [*(["the voice"] if row["nearer_ci"] and row["nearer_ci"][1] < 0 else []),
            *(["its pace"] if row["off_pace_ci"][0] > 0 else [])]


def advice(row: dict[str, Any], tuned: str, margin: float) -> str:
    """What to take, in words, by the row that decides."""
    if "difference" not in row:
        return ("Stay with what there was: the dev sentences chose it, by their words and the nearness of the voice, "
                "so there is nothing to compare.")
    low, high = (100 * x for x in row["difference_ci"])
    found = (f"{100 * row['tuned']:.1f} % word errors instead of {100 * row['start']:.1f}, a difference of "
             f"{100 * row['difference']:+.1f} points ({low:+.1f} to {high:+.1f})")
    if row["nearer_ci"]:
        found += (f"; similarity to the voice {row['tuned_similarity']:.3f} instead of {row['start_similarity']:.3f} "
                  f"({row['nearer_ci'][0]:+.3f} to {row['nearer_ci'][1]:+.3f})")
    found += f"; {row['tuned_length']:.2f} of the recordings' length instead of {row['start_length']:.2f}."
    if row["sentences"] < FEW:
        found += f" {row['sentences']} sentences are few: their interval is too narrow."
    power = (f" With {row['sentences']} sentences a true difference of {100 * row['detectable']:.1f} points would have "
             "been seen in four of five such comparisons.")
    if high < 0:
        return f"Take the tuned {tuned}: {found}"
    if low > 0:
        return f"Stay with what there was, the tuned {tuned} makes more word errors: {found}"
    near, far = " and ".join(gains(row)), " and ".join(losses(row))
    if is_better(row, margin):
        return (f"Take the tuned {tuned}, nearer to {near} at no more than {100 * margin:g} points of word errors for "
                f"sure: {found}{power}")
    if far:
        return f"Stay with what there was, the tuned {tuned} is farther from {far}: {found}{power}"
    if near:
        return (f"Stay with what there was: the tuned {tuned} is nearer to {near}, but may make more than "
                f"{100 * margin:g} points more word errors (margin): {found}{power}")
    return f"Stay with what there was: the tuned {tuned} is better in nothing beyond chance: {found}{power}"


def table(found: dict[str, Any]) -> str:
    """The figures, the advice, and how to speak with what is recommended."""
    lines = []
    for t in found["tried"]:
        near = "" if t["similarity"] is None else f", similarity {t['similarity']:.3f}"
        lines.append(f"dev, {'tuned vocoder, ' if t['vocoder_tuned'] else ''}{t['share']:.0%} of the way: "
                     f"{100 * t['wer']:.1f} % word errors{near}, length {t['length']:.2f}"
                     + ("   ← chosen" if (t["share"], t["vocoder_tuned"]) == (found["share"], found["vocoder_tuned"])
                        else ""))
    names = [f"{row['method']}, texts of {row['texts']} ({row['sentences']})" for row in found["rows"]]
    wide = max(map(len, names))
    lines += ["", f"{'held out':{wide}}   as it was     tuned   difference (95 %)       voice         length"]
    for name, row in zip(names, found["rows"], strict=True):
        line = f"{name:{wide}}   {100 * row['start']:7.1f} %"
        if "difference" in row:
            low, high = (100 * x for x in row["difference_ci"])
            change = f"{100 * row['difference']:+.1f} ({low:+.1f} to {high:+.1f})"
            line += f"   {100 * row['tuned']:5.1f} %   {change:21}"
            if row["nearer_ci"]:
                line += f"   {row['start_similarity']:.3f}, {row['tuned_similarity']:.3f}"
            line += f"   {row['start_length']:.2f}, {row['tuned_length']:.2f}"
        lines.append(line)
    bounds = "; ".join(f"{name} {100 * b['wer']:.1f} %" + ("" if b["similarity"] is None else
                                                          f", voice {b['similarity']:.3f}")
                       for name, b in found["bounds"].items())
    seeds = ", ".join(map(str, found["seeds"]))
    lines += [f"Seeds {seeds}, judge {found['judge']}; length: beside the recordings."
              + (f" Texts of one sentence: {bounds}." if bounds else ""), "", found["advice"]]
    return "\n".join(lines)
