"""The page: what its buttons call, what it says without gradio, and, where gradio is installed, the
page served.

What a person sees and hears of it is held by test_browser.py."""

import importlib.util
import socket
import sys
import threading

import numpy as np
import pytest
import soundfile
from test_studio import tone

from dcar.errors import AssetError, ConfigError
from eval.demo.page import handler, load_gradio, main, serve

needs_gradio = pytest.mark.skipif(
    not importlib.util.find_spec("gradio"), reason="no gradio (pip install '.[demo]')"
)


class Shown(Exception):
    """Stands for gradio.Error."""


def test_a_button_gives_sound_picture_and_facts(studio):
    (rate, samples), image, facts = handler(studio, Shown)(
        "The tide came in.", "", None, "car-2", 0.8, 0
    )
    wave = studio.speak("The tide came in.", method="car-2", temperature=0.8)[0].audio
    assert (
        rate == 24_000
        and samples.dtype == np.int16
        and image.ndim == 3
        and facts.startswith("car-2: ")
    )
    np.testing.assert_allclose(samples / 32767, wave, atol=1e-4)


def test_a_mistake_is_shown_and_nothing_else_is_hidden(studio, monkeypatch, tmp_path):
    bad = tmp_path / "bad.wav"
    bad.write_text("no sound")
    with pytest.raises(Shown, match=r"^voice bad\.wav: "):
        handler(studio, Shown)("Yes.", "", str(bad), "car-2", 0.8, 0)
    with pytest.raises(Shown, match="^text "):
        handler(studio, Shown)(None, "", None, "car-2", 0.8, None)
    monkeypatch.setattr(studio, "speak", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        handler(studio, Shown)("Yes.", "", None, "car-2", 0.8, 0)


def test_without_gradio_the_extra_is_named(monkeypatch):
    """And before models are loaded."""
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(AssetError, match=r"dcar\[demo\]"):
        load_gradio()
    with pytest.raises(AssetError, match=r"dcar\[demo\]"):
        main(["decoder=nowhere"])


def test_what_cannot_be_served_is_refused_before_models_are_loaded(monkeypatch):
    monkeypatch.setattr("eval.demo.page.load_gradio", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={taken}"):
            main([f"port={taken}", "decoder=nowhere"])


@pytest.fixture(scope="module")
def address(studio):
    pytest.importorskip("gradio")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    studio.config.port = port
    page = serve(studio)
    yield f"http://127.0.0.1:{port}/"
    page.close()


@needs_gradio
def test_two_users_are_both_served(address, studio):
    from gradio_client import Client

    found: dict[int, tuple] = {}

    def ask(seed: int) -> None:
        client = Client(address, verbose=False)
        found[seed] = client.predict(
            "Yes, we do.", "af_sarah", None, "car-3", 0.8, seed, api_name="/speak_a"
        )

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for seed, (sound, _, said) in found.items():
        wave, rate = soundfile.read(sound)
        alone = studio.speak("Yes, we do.", method="car-3", temperature=0.8, seed=seed)[0].audio
        assert rate == 24_000 and np.allclose(wave, alone, atol=1e-3) and said.startswith("car-3")
    assert set(found) == {1, 2}


@needs_gradio
def test_requests_that_go_round_the_page_are_refused_too(address, tmp_path):
    from gradio_client import Client, handle_file
    from gradio_client.exceptions import AppError

    client = Client(address, verbose=False)
    (tmp_path / "bad.wav").write_text("no sound")
    bad, long = handle_file(tmp_path / "bad.wav"), handle_file(tone(tmp_path / "long.flac", 21))
    for text, recording, method, said in (
        ("word " * 50, None, "car-3", "250 characters"),
        ("Yes.", None, "car-99", "not in the list"),
        ("Yes.", bad, "car-3", r"^voice bad\.wav"),
        ("Yes.", long, "car-3", "21.0 s"),
    ):
        with pytest.raises((AppError, ValueError), match=said):
            client.predict(text, "af_sarah", recording, method, 0.8, 0, api_name="/speak_a")
