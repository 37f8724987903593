"""`dcar demo`: a page to play with. Text, a voice, two settings side by side or blind; sound, and chunks under its
spectrogram and phonemes.

    pip install 'dcar[demo]'
    dcar demo                # http://127.0.0.1:7860, seen from this machine alone
    dcar demo decoder=runs/car far_decoder=runs/far policy=runs/policy
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable
from typing import Any

from dcar.config import load_config
from dcar.errors import AssetError, ConfigError
from dcar.sources.packages import pip_extra
from dcar.speak.defaults import SAMPLING
from eval.demo.studio import DIALS, TEMPERATURES, DemoConfig, Studio, shown, sound, with_dial
from eval.demo.votes import Votes, blind_tab

STYLE = """
/* On a phone the letters of a picture would be too small: it keeps its size and scrolls in its box. */
@media (max-width: 640px) {
  .picture .image-frame { overflow-x: auto; justify-content: flex-start !important; }
  .picture img { width: 46rem !important; max-width: none !important; height: auto !important; }
}"""
logger = logging.getLogger(__name__)

WAITING = 8  # requests that may wait; one is spoken at a time
EXAMPLE = "The tide came in before the boats were ready."
INTRODUCTION = """# DCAR: how many tokens a step?
Say the same sentence with two methods and hear what speed costs. All of it is synthetic speech; use your own voice, or
one whose owner agrees. {characters} characters, {seconds:g} s of a recorded voice and {megabytes:g} MB at most."""


def load_gradio() -> Any:
    """The module gradio. AssetError, naming the extra, where it is not installed."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # nothing is sent anywhere
    try:
        import gradio
    except ImportError as error:
        raise AssetError(f"the page needs gradio ({error}); run: {pip_extra('demo')}") from error
    return gradio


def handler(studio: Studio, failure: Callable[[str], Exception]) -> Callable[..., tuple[Any, Any, str]]:
    """What a button calls: (text, voice, recording, method, temperature, dial, seed) → (rate, samples), picture, facts.

    failure: makes, of an error that a user can act on, what the page shows.
    """
    def speak(text: str, voice: str, recording: str | None, method: str, temperature: float, dial: float,
              seed: float) -> tuple[Any, Any, str]:
        with shown(failure, recording):
            take = studio.speak(text or "", voice, recording, with_dial(method, float(dial or 0)), temperature,
                                seed=int(seed or 0))
            return sound(take.spoken), studio.picture(take.spoken), take.facts

    return speak


def build(studio: Studio, votes: Votes) -> Any:
    """The page, a gradio.Blocks."""
    gr = load_gradio()

    def failure(said: str) -> Exception:
        return gr.Error(said, print_exception=False)

    speak, limits = handler(studio, failure), studio.config
    with gr.Blocks(title="DCAR", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION.format(**vars(limits)))
        text = gr.Textbox(EXAMPLE, label="Text (English)", lines=3, max_length=limits.characters, elem_id="text")
        with gr.Row():
            with gr.Column():  # one below the other on a phone
                voice = gr.Dropdown(list(studio.voices), label="Voice", elem_id="voice")
            with gr.Column():
                recording = gr.Audio(sources=["upload", "microphone"], type="filepath", elem_id="recording", buttons=[],
                                     label="or a recording of the voice, a second or more")
        common = [text, voice, recording]
        with gr.Tab("Side by side"), gr.Row():
            sides = []
            for side, method in zip("AB", first_two(studio), strict=True):
                with gr.Column():
                    sides += _side(gr, side, method, studio.methods, common, speak)
        with gr.Tab("Blind vote"):
            blind_tab(gr, studio, votes, [*common, *sides], failure)
    return page.queue(max_size=WAITING)


def first_two(studio: Studio) -> list[str]:
    """What the two sides start with: the policy against next-token decoding."""
    return [studio.start, "far" if "far" in studio.methods else "car-1"]


def _side(gr: Any, side: str, method: str, methods: list[str], common: list[Any],
          speak: Callable[..., Any]) -> list[Any]:
    """One of the settings that are set side by side: its choices, its button and what comes of it. Returns the
    components of its method, temperature and dial."""
    low, high = TEMPERATURES
    chosen = gr.Dropdown(methods, value=method, elem_id=f"method-{side}", label=f"Method {side}",
                         info="far: one token a step; car-k: k, faster and less sure; dcar: a policy chooses how many, "
                              "@n4 among four candidates")
    temperature = gr.Slider(low, high, SAMPLING.temperature, step=0.1, label="Temperature",
                            elem_id=f"temperature-{side}")
    dial = gr.Slider(*DIALS, 0.0, step=0.1, label="Speed of dcar", elem_id=f"dial-{side}",
                     info="its dial: above 0 longer chunks, below 0 more careful ones")
    seed = gr.Number(0, label="Seed", precision=0, elem_id=f"seed-{side}")
    button = gr.Button(f"Speak {side}", variant="primary", elem_id=f"speak-{side}")
    facts = gr.Markdown(elem_id=f"facts-{side}")
    kept = ["download"]  # and no button that would put the speech on a hub
    played = gr.Audio(label="Speech", interactive=False, autoplay=True, buttons=kept, elem_id=f"sound-{side}")
    image = gr.Image(label="Chunks under spectrogram and phonemes", show_label=False, interactive=False,
                     buttons=["fullscreen", *kept], elem_id=f"picture-{side}", elem_classes="picture")
    button.click(speak, [*common, chosen, temperature, dial, seed], [played, image, facts], concurrency_limit=1,
                 concurrency_id="speak", api_name=f"speak_{side.lower()}")
    return [chosen, temperature, dial]


def main(arguments: list[str] | None = None) -> None:
    """The command: serves the page until it is interrupted."""
    config = load_config(DemoConfig, arguments)
    load_gradio()  # before models are loaded, as is what follows
    check_free(config.host, config.port)
    Votes(config.votes).check()
    logger.info("loading models; votes go to %s", config.votes)
    studio = Studio.load(config)
    for method in first_two(studio):  # so that the first to come need not wait
        studio.warm_up(method)
    serve(studio, config)


def check_free(host: str, port: int) -> None:
    """ConfigError where the page cannot be served at this address."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ConfigError(f"host={host} port={port}: {error.strerror or error}; another page may be served there: give "
                          "another port") from error


def serve(studio: Studio, config: DemoConfig, block: bool = True) -> Any:
    """Serve the page; returns it, at once unless `block`. Nothing leaves this machine: no share link, no analytics."""
    page = build(studio, Votes(config.votes))
    plain = load_gradio().themes.Default(font=["system-ui", "sans-serif"])  # the fonts that Gradio brings lack letters
    logging.getLogger("httpx").setLevel(logging.WARNING)  # gradio asks itself whether it is there
    page.launch(server_name=config.host, server_port=config.port, share=False, prevent_thread_lock=True, quiet=True,
                max_file_size=f"{math.ceil(config.megabytes)}mb", css=STYLE, theme=plain)
    logger.info("http://%s:%d (Ctrl-C ends it)", config.host, config.port)
    if block:
        page.block_thread()
    return page
