"""Hours of one card for each stage of the DCAR paper's recipe, from measured rates.

The work of each stage is that of the recipes `car_paper`, `vocoder_paper`, `dcpo_paper`,
`profile_paper` and `compare_paper`; a test checks that the numbers below are those of the recipes.
"""

from __future__ import annotations

from collections.abc import Mapping

from eval.speed.measure import Row

LIBRITTS, SAMPLED = 585 * 3600.0, 73 * 3600.0  # seconds of LibriTTS train; those k-means reads
EPOCHS, TOKEN_RATE = 20, 50
VOCODER_STEPS = 200_000  # of our vocoder; the paper trains CTX-vec2wav for 1,000,000
SECONDS = 6.0  # mean length of a LibriTTS utterance
PROFILED = 500 * 7  # utterances times chunk sizes
ROLLOUTS = 980 * 3  # prompts times epochs; a group has 8 members, or 12 for three sizes
COMPARED = 500 * 12  # utterances, times FAR, CAR-1 … CAR-7, two policies, and both references


def spoken(count: int, recogniser: str) -> dict[str, float]:
    """Return the work of decoding, voicing and transcribing `count` utterances in turn."""
    return {"rollouts": count, "vocoder": count * SECONDS, recogniser: count * SECONDS}


WORK: dict[str, dict[str, float]] = {
    "tokenizer": {"tokens": SAMPLED},
    "prepare": {"tokens": LIBRITTS, "voices": LIBRITTS},
    "stage one, CAR; FAR takes no longer": {"stage_one": EPOCHS * LIBRITTS * TOKEN_RATE},
    "vocoder": {"vocoder_steps": VOCODER_STEPS},
    "profile": spoken(PROFILED, "nemo"),
    "DCPO, range [2, 3]": spoken(8 * ROLLOUTS, "nemo"),
    "DCPO, range [2, 3, 4]": spoken(12 * ROLLOUTS, "nemo"),
    "comparison, without its timing": spoken(COMPARED, "whisper"),
}
"""Work of each stage by name of the rate (`Row.rate`): seconds of audio for `tokens`, `voices`,
`vocoder`, `nemo` and `whisper`; speech tokens for `stage_one`; updates for `vocoder_steps`;
utterances of 5 s, as tokens, for `rollouts`."""


def hours(rates: Mapping[str, float]) -> list[Row]:
    """Return the hours of each stage and their sum, given work per second by name. A row whose
    rates were not measured has no values and names them."""
    rows, total = [], 0.0
    for stage, work in WORK.items():
        missing = [name for name in work if name not in rates]
        spent = {} if missing else {"": sum(n / rates[name] for name, n in work.items()) / 3600}
        rows.append(Row(f"{stage}, hours", spent, ", ".join(missing)))
        total += spent.get("", 0.0)
    complete = all(row.values for row in rows)
    return [*rows, Row("all, hours" if complete else "all that is measured, hours", {"": total})]
