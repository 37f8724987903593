"""`dcar demo`: one text spoken by two methods side by side, with the chunks under a spectrogram.

pip install 'dcar[demo]'
dcar demo                # http://127.0.0.1:7860, reachable from this machine only
dcar demo decoder=runs/car far_decoder=runs/far policy=runs/policy
"""

import logging
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dcar.config import load_config
from dcar.errors import AssetError, ConfigError, DCARError
from dcar.sources.packages import pip_extra
from dcar.speak.defaults import SAMPLING
from dcar.speak.voice import MAX_PROMPT_SECONDS
from eval.demo.studio import TEMPERATURES, DemoConfig, Studio, chunk_spans
from eval.report.listen import spectrum_picture

logger = logging.getLogger(__name__)

STYLE = """/* on a phone a picture keeps its size, so that it can be read, and scrolls */
@media (max-width: 640px) {
  .picture .image-frame { overflow-x: auto; justify-content: flex-start !important; }
  .picture img { width: 46rem !important; max-width: none !important; height: auto !important; }
}"""
EXAMPLE = "The tide came in before the boats were ready."
INTRODUCTION = """# DCAR: how many tokens per step?
Synthesise the same sentence with two methods, and listen to what speed costs. All speech is
synthetic; use your own voice, or that of someone who agrees. Limits: {characters} characters;
{seconds} s and {megabytes:g} MB for a recorded voice."""
METHODS = (
    "far: one token per step; car-k: k tokens; dcar: a policy chooses how many; @n4: it also "
    "chooses among four candidates"
)


def load_gradio() -> Any:
    """Import gradio. AssetError, naming the extra, if it is not installed."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # nothing is sent anywhere
    try:
        import gradio
    except ImportError as error:
        raise AssetError(f"the page needs gradio ({error}); run: {pip_extra('demo')}") from error
    return gradio


def handler(
    studio: Studio, failure: Callable[[str], Exception]
) -> Callable[..., tuple[Any, Any, str]]:
    """Make the function of a button: (text, voice, recording, method, temperature, seed) →
    (rate, samples), picture, facts. failure: function that makes the page's message from that of
    an error."""

    def speak(
        text: str, voice: str, recording: str | None, method: str, temperature: float, seed: float
    ) -> Any:
        try:
            spoken, facts = studio.speak(
                text or "", voice, recording, method, temperature, int(seed or 0)
            )
        except DCARError as error:  # the user knows the name of a recording, not its path
            said = str(error)
            raise failure(
                said.replace(recording, Path(recording).name) if recording else said
            ) from error
        samples = (np.clip(spoken.audio, -1.0, 1.0) * 32767).astype(np.int16)
        picture = spectrum_picture(spoken.audio, spoken.sample_rate, chunk_spans(spoken), width=7.5)
        return (spoken.sample_rate, samples), picture, facts

    return speak


def build(studio: Studio) -> Any:
    """Lay out the page, a gradio.Blocks."""
    gr = load_gradio()
    speak = handler(studio, lambda said: gr.Error(said, print_exception=False))
    with gr.Blocks(title="DCAR", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION.format(seconds=MAX_PROMPT_SECONDS, **vars(studio.config)))
        text = gr.Textbox(
            EXAMPLE,
            label="Text (English)",
            lines=3,
            max_length=studio.config.characters,
            elem_id="text",
        )
        with gr.Row():
            with gr.Column():  # columns are stacked on a phone
                voice = gr.Dropdown(list(studio.voices), label="Voice", elem_id="voice")
            with gr.Column():
                recording = gr.Audio(
                    sources=["upload", "microphone"],
                    type="filepath",
                    elem_id="recording",
                    buttons=[],
                    label="or a recording of the voice (at least one second)",
                )
        with gr.Row():
            for side, start in (
                ("A", studio.start),
                ("B", "far" if "far" in studio.methods else "car-1"),
            ):
                with gr.Column():
                    method = gr.Dropdown(
                        studio.methods,
                        value=start,
                        elem_id=f"method-{side}",
                        info=METHODS,
                        label=f"Method {side}",
                    )
                    temperature = gr.Slider(
                        *TEMPERATURES,
                        SAMPLING.temperature,
                        step=0.1,
                        label="Temperature",
                        elem_id=f"temperature-{side}",
                    )
                    seed = gr.Number(0, label="Seed", precision=0, elem_id=f"seed-{side}")
                    button = gr.Button(f"Speak {side}", variant="primary", elem_id=f"speak-{side}")
                    facts = gr.Markdown(elem_id=f"facts-{side}")
                    sound = gr.Audio(
                        label="Speech",
                        interactive=False,
                        autoplay=True,
                        buttons=["download"],
                        # no button that would put it on a hub
                        elem_id=f"sound-{side}",
                    )
                    picture = gr.Image(
                        label="Chunks under the spectrogram",
                        show_label=False,
                        interactive=False,
                        buttons=["fullscreen", "download"],
                        elem_classes="picture",
                        elem_id=f"picture-{side}",
                    )
                    button.click(
                        speak,
                        [text, voice, recording, method, temperature, seed],
                        [sound, picture, facts],
                        concurrency_limit=1,
                        concurrency_id="speak",
                        api_name=f"speak_{side.lower()}",
                    )
    return page.queue(max_size=8)  # requests that may wait


def serve(studio: Studio) -> Any:
    """Start to serve the page in the background, and return it. There is no share link and no
    analytics."""
    config, page = studio.config, build(studio)
    # system fonts, so that none are downloaded
    plain = load_gradio().themes.Default(font=["system-ui", "sans-serif"])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # gradio polls itself
    page.launch(
        server_name=config.host,
        server_port=config.port,
        share=False,
        prevent_thread_lock=True,
        quiet=True,
        max_file_size=f"{math.ceil(config.megabytes)}mb",
        css=STYLE,
        theme=plain,
    )
    logger.info("http://%s:%d (press Ctrl-C to stop)", config.host, config.port)
    return page


CONFIG = DemoConfig


def main(arguments: list[str] | None = None) -> None:
    """Serve the page until it is interrupted."""
    config = load_config(CONFIG, arguments)
    load_gradio()  # fail before models are loaded
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        socket.create_server((config.host, config.port), family=family).close()
    except OSError as error:
        raise ConfigError(
            f"host={config.host} port={config.port}: {error.strerror or error}; another page may "
            "be using it: choose another port"
        ) from error
    logger.info("loading models")
    studio = Studio(config)
    studio.speak(EXAMPLE)  # warm-up, so that the first visitor need not wait
    serve(studio).block_thread()
