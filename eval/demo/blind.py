"""The blind part of the page: two settings are heard in an order that nobody knows, one is preferred, a vote counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dcar.errors import DCARError
from eval.demo.player import HUSH, pcm
from eval.demo.studio import Studio, with_dial
from eval.demo.votes import Setting, Trial, Votes, shuffled, summary

HOW = """The settings A and B of the first tab say the text above with one new seed, in an order drawn at random. Which
is which is not shown until you have voted. Choose by ear; hear both to the end, as often as you like."""
BUTTONS = {"first": "First is better", "none": "No difference", "second": "Second is better"}
Sound = tuple[int, np.ndarray] | None


def pairing(studio: Studio, said: Callable[[DCARError, str | None], Exception]) -> Callable[..., tuple]:
    """What the button calls: (text, voice, recording; method, temperature, dial of A; those of B) → the two sounds, the
    trial (kept on the server), what to do. said: makes of an error what the page shows."""
    def pair(text: str, voice: str, recording: str | None, method_a: str, temperature_a: float, dial_a: float,
             method_b: str, temperature_b: float, dial_b: float) -> tuple[Sound, Sound, Trial, str]:
        try:
            a, b = (Setting(with_dial(method, float(dial or 0)), float(temperature)) for method, temperature, dial in (
                (method_a, temperature_a, dial_a), (method_b, temperature_b, dial_b)))
            trial = shuffled(text or "", "recording" if recording else voice, a, b)
            first, second = (studio.speak(trial.text, voice, recording, side.method, side.temperature, seed=trial.seed)
                             for side in (trial.first, trial.second))
        except DCARError as error:
            raise said(error, recording) from error
        return ((first.spoken.rate, pcm(first.spoken.wave)), (second.spoken.rate, pcm(second.spoken.wave)), trial,
                "Which one sounds better?")

    return pair


def voting(votes: Votes, choice: str,
           said: Callable[[DCARError, str | None], Exception]) -> Callable[[Trial | None], tuple[None, str, str]]:
    """What a vote's button calls: the trial → no trial any more, what was what, and the counts."""
    def vote(trial: Trial | None) -> tuple[None, str, str]:
        try:
            if trial is None:
                return None, "Nothing to vote on: speak a pair first. Every pair counts once.", counts(votes)
            votes.add(trial, choice)
            return None, f"Counted. First: **{trial.first}**. Second: **{trial.second}**.", counts(votes)
        except DCARError as error:
            raise said(error, None) from error

    return vote


def counts(votes: Votes) -> str:
    """The counts of all votes so far."""
    return summary(votes.tallies())


def blind_tab(gr: Any, studio: Studio, votes: Votes, inputs: list[Any],
              said: Callable[[DCARError, str | None], Exception]) -> None:
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
    table = gr.Markdown(lambda: counts(votes), elem_id="votes")
    speak.click(pairing(studio, said), inputs, [*sounds, trial, outcome], js=HUSH, concurrency_limit=1,
                concurrency_id="speak", api_visibility="private")
    for choice, button in buttons.items():
        button.click(voting(votes, choice, said), [trial], [trial, outcome, table], api_visibility="private")
