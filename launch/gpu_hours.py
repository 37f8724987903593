"""Hours of one card for each stage of the DCAR paper's recipe, from measured rates.

The work of each stage is that of the recipes `car_paper`, `vocoder_paper`, `dcpo_paper`,
`profile_paper` and `compare_paper`; a test checks that the numbers below are those of the recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

LIBRITTS, SAMPLED = 585 * 3600.0, 73 * 3600.0
"""Seconds of audio: LibriTTS train, and its share that k-means reads."""
EPOCHS, TOKEN_RATE = 20, 50
VOCODER_STEPS = 200_000
"""Training steps of our vocoder; the paper trains CTX-vec2wav for 1,000,000."""
VOCODER_HOURS = 60
"""Hours of the training pack: they are on the device, so a step takes as long with any number."""
SECONDS = 6.0
"""Mean length of a LibriTTS utterance."""
PROFILED = 500 * 7
"""Utterances times chunk sizes."""
ROLLOUTS = 980 * 3
"""Prompts times epochs; a group has 8 members, or 12 for three sizes."""
COMPARED = 500 * 12
"""Utterances times methods: FAR, CAR-1 … CAR-7, two policies, recordings and resynthesis."""

Rates = Mapping[str, float]
"""Work that the card does per second, by name (`launch.gpu_rows`): seconds of audio for
`tokens`, `voices`, `vocoder`, `nemo` and `whisper`; speech tokens for `stage_one`; updates for
`vocoder_steps`; utterances of 5 s, as tokens, for `rollouts`."""


@dataclass(frozen=True)
class Stage:
    """Stage of the recipe: its work, the rates that it needs, and a function from these to its
    seconds."""

    name: str
    work: str
    needs: tuple[str, ...]
    seconds: Callable[[Rates], float]


def spoken(name: str, count: int, judge: str) -> Stage:
    """Return a stage that decodes, voices and transcribes `count` utterances in turn."""
    audio = count * SECONDS

    def seconds(rates: Rates) -> float:
        return count / rates["rollouts"] + audio / rates["vocoder"] + audio / rates[judge]

    needs = ("rollouts", "vocoder", judge)
    return Stage(name, f"{count:,} utterances of {SECONDS:g} s", needs, seconds)


STAGES = (
    Stage("tokenizer", "73 h through HuBERT-Large", ("tokens",), lambda r: SAMPLED / r["tokens"]),
    Stage(
        "prepare",
        "585 h, tokens and voices",
        ("tokens", "voices"),
        lambda r: LIBRITTS / r["tokens"] + LIBRITTS / r["voices"],
    ),
    Stage(
        "stage one, CAR; FAR takes no longer",
        f"{EPOCHS} × 585 h × {TOKEN_RATE} tokens/s",
        ("stage_one",),
        lambda r: EPOCHS * LIBRITTS * TOKEN_RATE / r["stage_one"],
    ),
    Stage(
        "vocoder",
        f"{VOCODER_STEPS:,} steps on {VOCODER_HOURS} h (the paper's vocoder: 1,000,000)",
        ("vocoder_steps",),
        lambda r: VOCODER_STEPS / r["vocoder_steps"],
    ),
    spoken("profile", PROFILED, "nemo"),
    spoken("DCPO, range [2, 3]", 8 * ROLLOUTS, "nemo"),
    spoken("DCPO, range [2, 3, 4]", 12 * ROLLOUTS, "nemo"),
    spoken("comparison, without its timing", COMPARED, "whisper"),
)


def hours(rates: Rates) -> list[tuple[str, str, str]]:
    """Return (stage, hours, work) for each stage and for their sum. If rates were not measured,
    their names take the place of the hours."""
    rows: list[tuple[str, str, str]] = []
    total, whole = 0.0, True
    for stage in STAGES:
        missing = [name for name in stage.needs if name not in rates]
        if missing:
            rows.append((stage.name, f"not measured: {', '.join(missing)}", stage.work))
            whole = False
            continue
        spent = stage.seconds(rates) / 3600
        total += spent
        rows.append((stage.name, f"{spent:.2f}", stage.work))
    return [
        *rows,
        ("all" if whole else "all that is measured", f"{total:.2f}", "one after the other"),
    ]
