"""The blind part of the page: two settings heard in an order that nobody knows, what was preferred, and what chance
would have to do with it.

Every vote is a line of votes.jsonl in a folder that the user names, with everything that made the two sounds.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dcar.errors import ConfigError, DataError
from eval.demo.studio import Studio, shown, sound, with_dial
from eval.results.store import read_jsonl

HOW = """The settings A and B of the first tab say the text above with one new seed, in an order drawn at random. Which
is which is not shown until you have voted. Choose by ear; hear both to the end, as often as you like."""
BUTTONS = {"first": "First is better", "none": "No difference", "second": "Second is better"}
Sound = tuple[int, np.ndarray] | None


@dataclass(frozen=True, order=True)
class Setting:
    """What one side speaks with; the seed is the trial's."""

    method: str
    temperature: float

    def __str__(self) -> str:
        return f"{self.method} at {self.temperature:g}"


@dataclass(frozen=True)
class Trial:
    """A text as two settings say it, in the order in which they are played."""

    text: str
    voice: str  # its name, or "recording"
    seed: int
    first: Setting
    second: Setting


def shuffled(text: str, voice: str, a: Setting, b: Setting, rng: random.Random | None = None) -> Trial:
    """A trial with a seed and an order of its own. ConfigError where the two settings are the same."""
    if a == b:
        raise ConfigError(f"both sides are {a}: choose two different methods or temperatures, then listen blindly")
    rng = rng or random.SystemRandom()
    pair = [a, b]
    rng.shuffle(pair)
    return Trial(text, voice, rng.randrange(2**31), *pair)


@dataclass(frozen=True)
class Tally:
    """The votes about a pair of settings: for `a`, for `b`, for neither; p of so uneven a split by chance."""

    a: Setting
    b: Setting
    for_a: int
    for_b: int
    neither: int

    @property
    def p(self) -> float:
        """Exact two-sided binomial test of one half; votes for neither are left out. 1 without a vote."""
        from scipy.stats import binomtest

        decided = self.for_a + self.for_b
        return float(binomtest(self.for_a, decided, 0.5).pvalue) if decided else 1.0


class Votes:
    """votes.jsonl in a folder: votes are appended, one line at once, and never changed."""

    def __init__(self, folder: str | Path):
        self.path = Path(folder) / "votes.jsonl"
        self._lock = threading.Lock()

    def add(self, trial: Trial, choice: str) -> dict[str, Any]:
        """Append a vote; returns what was written. ConfigError for another choice, DataError where it cannot be
        kept."""
        if choice not in BUTTONS:
            raise ConfigError(f"a vote is one of {', '.join(BUTTONS)}; not '{choice[:40]}'")
        preferred = None if choice == "none" else asdict(trial.first if choice == "first" else trial.second)
        vote = {"time": round(time.time(), 3), "choice": choice, "preferred": preferred, **asdict(trial)}
        with self._lock:
            self._append((json.dumps(vote, ensure_ascii=False) + "\n").encode())
        return vote

    def check(self) -> None:
        """DataError where votes cannot be kept, or what is there are none; makes the folder."""
        self._append(b"")
        self.read()

    def _append(self, line: bytes) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One write to a file opened for appending: lines of several processes do not mix.
            with self.path.open("ab", buffering=0) as file:
                if file.write(line) != len(line):
                    raise OSError("it was written in part")
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(f"{self.path}: votes cannot be written ({error.strerror or error}); give another folder as "
                            "votes") from error

    def read(self) -> list[dict[str, Any]]:
        """All votes. DataError for a line that is none; a last line that was cut off is left out."""
        return list(read_jsonl(self.path, "vote", _settings))


def tallies(votes: Sequence[dict[str, Any]]) -> list[Tally]:
    """The votes by pair of settings, whichever was played first; pairs of most votes first."""
    counts: dict[tuple[Setting, Setting], list[int]] = {}
    for vote in votes:
        first, second = _settings(vote)
        a, b = sorted((first, second))
        chosen = {"first": first, "second": second, "none": None}[vote["choice"]]
        counts.setdefault((a, b), [0, 0, 0])[2 if chosen is None else 0 if chosen == a else 1] += 1
    found = [Tally(a, b, *of) for (a, b), of in counts.items()]
    return sorted(found, key=lambda t: -(t.for_a + t.for_b + t.neither))


def _settings(vote: dict[str, Any]) -> tuple[Setting, Setting]:
    if vote["choice"] not in BUTTONS:
        raise ValueError(f"choice {vote['choice']}")
    first, second = (Setting(str(vote[k]["method"]), float(vote[k]["temperature"])) for k in ("first", "second"))
    return first, second


def summary(found: Sequence[Tally]) -> str:
    """The counts as a Markdown table with a sentence that says how to read them."""
    if not found:
        return "No votes yet."
    rows = "\n".join(f"| {t.a}<br>{t.b} | {t.for_a}<br>{t.for_b} | {t.neither} | {t.p:.3f} |" for t in found)
    return ("| setting | votes | equal | p |\n| --- | ---: | ---: | ---: |\n" + rows  # narrow enough for a phone
            + "\n\np: how often votes at least as uneven would come about if listeners tossed a coin (exact binomial "
              "test, both sides, without votes for no difference). Below 0.05 is usually taken as a preference.")


def pairing(studio: Studio, failure: Callable[[str], Exception]) -> Callable[..., tuple]:
    """What the button calls: (text, voice, recording; method, temperature, dial of A; those of B) → the two sounds, the
    trial (kept on the server), what to do. failure: makes of an error what the page shows."""
    def pair(text: str, voice: str, recording: str | None, method_a: str, temperature_a: float, dial_a: float,
             method_b: str, temperature_b: float, dial_b: float) -> tuple[Sound, Sound, Trial, str]:
        with shown(failure, recording):
            a, b = (Setting(with_dial(method, float(dial or 0)), float(temperature)) for method, temperature, dial in (
                (method_a, temperature_a, dial_a), (method_b, temperature_b, dial_b)))
            trial = shuffled(text or "", "recording" if recording else voice, a, b)
            first, second = (studio.speak(trial.text, voice, recording, side.method, side.temperature, seed=trial.seed)
                             for side in (trial.first, trial.second))
        return sound(first.spoken), sound(second.spoken), trial, "Which one sounds better?"

    return pair


def voting(votes: Votes, choice: str,
           failure: Callable[[str], Exception]) -> Callable[[Trial | None], tuple[None, str, str]]:
    """What a vote's button calls: the trial → no trial any more, what was what, and the counts."""
    def vote(trial: Trial | None) -> tuple[None, str, str]:
        told = "Nothing to vote on: speak a pair first. Every pair counts once."
        with shown(failure):
            if trial is not None:
                votes.add(trial, choice)
                told = f"Counted. First: **{trial.first}**. Second: **{trial.second}**."
            return None, told, summary(tallies(votes.read()))

    return vote


def blind_tab(gr: Any, studio: Studio, votes: Votes, inputs: list[Any], failure: Callable[[str], Exception]) -> None:
    """inputs: the components of text, voice, recording, and method, temperature and dial of both sides."""
    gr.Markdown(HOW)
    speak = gr.Button("Speak both, shuffled", variant="primary", elem_id="blind-speak")
    sounds = []
    with gr.Row():
        for name in ("First", "Second"):
            with gr.Column():  # one below the other on a phone
                sounds.append(gr.Audio(label=name, interactive=False, buttons=[], elem_id=f"blind-{name.lower()}"))
    trial = gr.State(None)
    with gr.Row():
        buttons = {choice: gr.Button(label, elem_id=f"vote-{choice}") for choice, label in BUTTONS.items()}
    outcome = gr.Markdown(elem_id="outcome")
    gr.Markdown("### Votes so far")
    table = gr.Markdown(lambda: summary(tallies(votes.read())), elem_id="votes")
    speak.click(pairing(studio, failure), inputs, [*sounds, trial, outcome], concurrency_limit=1,
                concurrency_id="speak", api_visibility="private")
    for choice, button in buttons.items():
        button.click(voting(votes, choice, failure), [trial], [trial, outcome, table], api_visibility="private")
