"""From records to the rows of a comparison: error rates and tests, passes and acceptance, speed, one row a method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dcar.text.bootstrap import corpus_interval
from eval.methods.families import at_sampling, parse_method
from eval.methods.samplings import split_label
from eval.results.acceptance import acceptance
from eval.results.stats import PairedTest, paired_test, utterances_needed
from eval.results.store import RECORDING, RESYNTHESIS, Record
from eval.results.timing import speedup, speedup_quartiles, summarize
from eval.results.variety import variety

Row = dict[str, Any]


def make_rows(records: Sequence[Record], methods: Sequence[str], timings: Sequence[dict[str, Any]] = (),
              resamples: int = 4000, scorers: Sequence[str] = (), distances: np.ndarray | None = None) -> list[Row]:
    """One row per method, in the order of `methods`; reference rows (recording, resynthesis) have no passes or times.

    Errors are tested against baselines of the same sampling (FAR, CAR-1, the best CAR-k, …; none where it was not
    spoken), times against one FAR and one CAR-1 for all rows, those of the common sampling where they are there.
    Error counts of an utterance are summed over its seeds and prompts before anything is resampled. scorers: names of
    the scores that the records carry, for `row["scores"]`. distances: of the codes [V, V], for `row["variety"]`.
    """
    grouped = {m: [r for r in records if r["method"] == m] for m in methods}
    rows = [{**_row(m, grouped[m], timings, resamples, distances), "scores": _scores(grouped[m], scorers, resamples)}
            for m in methods]
    spoken = [r for r in rows if r["kind"] == "method"]
    clocks = {label: next((r for r in spoken if split_label(r["method"])[0] == b), None)
              for label, b in (("far", "far"), ("car1", "car-1"))}
    for row in spoken:
        name = parse_method(row["method"])
        alike = [r for r in spoken if parse_method(r["method"]).sampling == name.sampling]
        cars = [r for r in alike if parse_method(r["method"]).kind == "car"]
        best = min(cars, key=lambda r: r["wer"])["method"] if cars else None
        random = next((r["method"] for r in alike if parse_method(r["method"]).kind == "random"), None)
        strict = strict_baseline(row["method"], list(grouped))
        drawn = random if name.entry and name.entry.policies else None  # what a policy must beat
        far, one = (at_sampling(b, name.sampling) for b in ("far", "car-1"))
        for label, baseline in (("far", far), ("car1", one), ("best_car", best), ("sd", strict), ("random", drawn)):
            other = None if baseline == row["method"] or baseline not in grouped else baseline
            test = compare_records(grouped[row["method"]], grouped[other], resamples) if other else None
            row[f"difference_vs_{label}"] = test and test.difference
            row[f"difference_vs_{label}_ci"] = test and [test.low, test.high]
            row[f"p_vs_{label}"] = test and test.p_value
            row[f"detectable_vs_{label}"] = test and test.detectable
        row["best_car"], row["sd_baseline"], row["random_baseline"] = best, strict, drawn
        row["detectable_difference"] = row["detectable_vs_best_car"] or row["detectable_vs_far"]
        for label, clock in clocks.items():
            row[f"speedup_vs_{label}"] = speedup(row, clock, "rtf")
            row[f"lm_speedup_vs_{label}"] = speedup(row, clock, "lm_rtf")
            row[f"speedup_vs_{label}_quartiles"] = speedup_quartiles(timings, row["method"], clock["method"]
                                                                     ) if clock else None
    return rows


def strict_baseline(method: str, methods: Sequence[str]) -> str | None:
    """The lossless method that a relaxed verifier is measured against: `sd` with the same kind of draft, else `sd`, at
    the verifier's own sampling: what it relaxes is the target's distribution at that temperature."""
    name = parse_method(method)
    if name.entry is None or not name.entry.verifies or name.kind == "sd":
        return None
    draft = at_sampling("@".join(["sd", *(word for word in name.words if word != "eos")]), name.sampling)
    plain = at_sampling("sd", name.sampling)
    return next((m for m in methods if parse_method(m).family == draft), plain if plain in methods else None)


def by_utterance(records: Sequence[Record], field: str = "words") -> tuple[list[int], list[int], list[str]]:
    """Errors and reference units summed over the seeds and prompts of each utterance, and the ids, sorted."""
    errors: Counter[str] = Counter()
    units: Counter[str] = Counter()
    for r in records:
        s, d, i, n = r[field]
        errors[r["id"]] += s + d + i
        units[r["id"]] += n
    ids = sorted(units)
    return [errors[i] for i in ids], [units[i] for i in ids], ids


def compare_records(a: Sequence[Record], b: Sequence[Record], resamples: int) -> PairedTest:
    """The paired test of two methods' records, a - b, on the utterances that both spoke."""
    ea, wa, ids_a = by_utterance(a)
    eb, wb, ids_b = by_utterance(b)
    shared = sorted(set(ids_a) & set(ids_b))
    pick_a, pick_b = [ids_a.index(i) for i in shared], [ids_b.index(i) for i in shared]
    return paired_test([ea[i] for i in pick_a], [wa[i] for i in pick_a], [eb[i] for i in pick_b],
                       [wb[i] for i in pick_b], resamples=resamples)


def _row(method: str, records: Sequence[Record], timings: Sequence[dict[str, Any]], resamples: int,
         distances: np.ndarray | None) -> Row:
    errors, words, ids = by_utterance(records)
    wer = corpus_interval(errors, words, resamples=resamples)
    character, characters, _ = by_utterance(records, "characters")
    cer = corpus_interval(character, characters, resamples=resamples)
    s, d, i, n = (sum(r["words"][k] for r in records) for k in range(4))
    capped = sum(min(sum(r["words"][:3]), r["words"][3]) for r in records)
    recorded = sum(r["reference_duration"] for r in records)  # 0 where texts have no recordings
    row: Row = {
        "method": method, "kind": "reference" if method in (RECORDING, RESYNTHESIS) else "method",
        "wer": wer.value, "wer_ci": [wer.low, wer.high], "wer_se": wer.standard_error, "wer_capped": capped / n,
        "cer": cer.value, "cer_ci": [cer.low, cer.high],
        "substitutions": s, "deletions": d, "insertions": i, "reference_words": n,
        "empty_transcripts": sum(not r["hypothesis"].strip() for r in records),
        "speaker_similarity": _mean(records, "speaker_similarity"),
        "duration_ratio": sum(r["duration"] for r in records) / recorded if recorded else None,
        "n": len(ids), "seeds": len({r["seed"] for r in records}), "records": len(records),
        "prompts": len({r.get("prompt_seed") for r in records}),
    }
    if row["kind"] == "method":
        passes, tokens = sum(r["passes"] for r in records), sum(len(r["tokens"]) for r in records)
        actions = Counter(a for r in records for a in r["actions"])
        total = sum(actions.values())
        name = parse_method(method)
        row |= {
            "family": name.family, "setting": name.setting,
            "tokens_per_pass": tokens / passes,
            "target_passes": passes / len(records),  # per utterance and seed, as the next two
            "draft_passes": sum(r["draft_passes"] for r in records) / len(records),
            "tokens": tokens / len(records),
            "chunk_sizes": {str(a): actions[a] / total for a in sorted(actions)},
            "truncation_rate": sum(r["truncated"] for r in records) / len(records),
            **acceptance(records, resamples),
            **variety(records, distances, resamples),
            **summarize(timings, method),
            "timed_n": sum(t["method"] == method for t in timings),
        }
    return row


def _scores(records: Sequence[Record], scorers: Sequence[str], resamples: int) -> dict[str, dict[str, Any]]:
    """By scorer: mean over the records that have a score, its bootstrap interval over utterances (all seeds of one stay
    together), and how many utterances and records that are."""
    found = {}
    for name in scorers:
        totals: dict[str, list[float]] = {}
        for r in records:
            if (score := r["scores"][name]) is not None:
                total = totals.setdefault(r["id"], [0.0, 0.0])
                total[0], total[1] = total[0] + score, total[1] + 1
        count = int(sum(t[1] for t in totals.values()))
        entry: dict[str, Any] = {"mean": None, "ci": None, "n": len(totals), "records": count}
        if totals:
            sums = [totals[i] for i in sorted(totals)]
            mean = corpus_interval([s for s, _ in sums], [n for _, n in sums], resamples=resamples)
            entry |= {"mean": mean.value, "ci": [mean.low, mean.high]}
        found[name] = entry
    return found


def _mean(records: Sequence[Record], field: str) -> float | None:
    values = [r[field] for r in records if r.get(field) is not None]
    return float(np.mean(values)) if values else None


def power_statement(rows: Sequence[Row]) -> dict[str, Any] | None:
    """What this experiment could detect between a method and the best CAR, from the median paired standard error."""
    found = [r["detectable_difference"] for r in rows if r.get("detectable_difference")]
    best = next((r for r in rows if r["method"] == r.get("best_car")), None)
    if not found or best is None or best["wer"] <= 0:
        return None
    absolute = float(np.median(found))
    return {
        "baseline": best["method"], "baseline_wer": best["wer"], "absolute": absolute,
        "relative": absolute / best["wer"], "power": 0.8, "significance": 0.05, "n": best["n"], "seeds": best["seeds"],
        "tests": sum(r.get("p_vs_best_car") is not None for r in rows),
        "utterances_for_10_percent": utterances_needed(best["n"], absolute, 0.1 * best["wer"]),
    }
