"""What verification kept: rates overall and by position in the draft, and how many tokens a pass accepted.

Every verifying pass checks drafted tokens in order and stops at the first that it rejects, so the i-th is judged only
where the i - 1 before it were accepted. Rate by position i = accepted at i / judged at i; it falls with i where the
drafter's guesses get worse, and says how long a draft is worth its cost. A tree of candidates offers several tokens a
position and a pass counts as one: its rate at depth i is the share of passes that got past depth i of those that
reached it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dcar.errors import DataError
from dcar.text.bootstrap import RESAMPLES, corpus_interval


def check_rounds(utterance_id: str, method: str, proposed: Sequence[int], accepted: Sequence[int]) -> None:
    """DataError unless every verifying pass has both counts and accepted no more than was drafted."""
    if len(proposed) != len(accepted) or any(not 0 <= a <= p for p, a in zip(proposed, accepted, strict=False)):
        raise DataError(f"{utterance_id}: {method} reports {len(proposed)} verifying passes with drafted tokens and "
                        f"{len(accepted)} with accepted ones, each accepting at most what was drafted; the method "
                        "counts wrongly: its `rounds_proposed` and `rounds_accepted` must describe the same passes")


def acceptance(records: Sequence[dict[str, Any]], resamples: int = RESAMPLES) -> dict[str, Any]:
    """The fields of a table row that describe verification; None where the method verifies nothing.

    acceptance_rate and its interval: accepted / drafted tokens, bootstrap over utterances.
    acceptance_by_position: dicts of position (from 1), judged, accepted (counts), rate; up to the last position that
    was ever judged.
    """
    drafted: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for r in records:
        drafted[r["id"]] += r["proposed"]
        kept[r["id"]] += r["accepted"]
    ids = sorted(i for i in drafted if drafted[i])
    empty = {"acceptance_rate": None, "acceptance_rate_ci": None, "mean_accepted": None,
             "acceptance_by_position": None}
    if not ids:
        return empty
    rate = corpus_interval([kept[i] for i in ids], [drafted[i] for i in ids], resamples=resamples)
    row = {**empty, "acceptance_rate": rate.value, "acceptance_rate_ci": [rate.low, rate.high]}
    rounds = [(p, a) for r in records
              for p, a in zip(r["rounds_proposed"], r["rounds_accepted"], strict=True) if p]
    if not rounds:
        return row
    by_position = []
    for position in range(1, max(p for p, _ in rounds) + 1):
        judged = sum(p >= position and a >= position - 1 for p, a in rounds)
        if not judged:
            break
        accepted = sum(a >= position for _, a in rounds)
        by_position.append({"position": position, "judged": judged, "accepted": accepted, "rate": accepted / judged})
    return {**row, "mean_accepted": sum(a for _, a in rounds) / len(rounds), "acceptance_by_position": by_position}
