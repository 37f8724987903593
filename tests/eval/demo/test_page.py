"""The page: what its buttons call, what it says without gradio, and, where gradio is installed, the page served."""

from __future__ import annotations

import importlib.util
import re
import shutil
import socket
import sys
import threading
import time

import numpy as np
import pytest
import soundfile
from test_studio import tone

from dcar.errors import AssetError, ConfigError
from eval.demo.page import DemoConfig, handler, load_gradio, main, serve
from eval.demo.studio import Limits, Studio


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


needs_gradio = pytest.mark.skipif(not has("gradio"), reason="no gradio (pip install '.[demo]')")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


class Shown(Exception):
    """Stands for gradio.Error."""


@pytest.fixture(scope="module")
def studio() -> Studio:
    return Studio.load(limits=Limits(characters=200, seconds=5.0, megabytes=1.0))


def test_a_button_gives_sound_picture_and_facts(studio):
    (rate, samples), image, facts = handler(studio, Shown)("Yes.", "", None, "car-2", 0.8, 0)
    assert rate == 24_000 and samples.dtype == np.int16 and len(samples) > 2_000
    assert image.ndim == 3 and facts.startswith("car-2: ")


def test_a_mistake_is_shown_and_nothing_else_is_hidden(studio, monkeypatch, tmp_path):
    bad = tmp_path / "bad.wav"
    bad.write_text("no sound")
    with pytest.raises(Shown, match=r"^bad\.wav: not readable"):
        handler(studio, Shown)("Yes.", "", str(bad), "car-2", 0.8, 0)
    with pytest.raises(Shown, match="text is empty"):
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


def test_it_listens_on_this_machine_alone_unless_told():
    assert DemoConfig().host == "127.0.0.1"
    assert DemoConfig(characters=5).limits == Limits(characters=5)
    with pytest.raises(ConfigError, match="port"):
        DemoConfig(port=0)


@pytest.fixture(scope="module")
def address(studio):
    pytest.importorskip("gradio")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page = serve(studio, DemoConfig(port=port, megabytes=1.0), block=False)
    yield f"http://127.0.0.1:{port}/"
    page.close()


@needs_gradio
def test_two_users_are_both_served(address, studio):
    from gradio_client import Client

    found: dict[int, tuple] = {}

    def ask(seed: int) -> None:
        client = Client(address, verbose=False)
        found[seed] = client.predict("Yes, we do.", "af_sarah", None, "car-3", 0.8, seed, api_name="/speak_a")

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for seed, (sound, _, said) in found.items():
        wave, rate = soundfile.read(sound)
        alone = studio.speak("Yes, we do.", method="car-3", seed=seed).spoken.wave
        assert rate == 24_000 and np.allclose(wave, alone, atol=1e-3) and said.startswith("car-3")
    assert set(found) == {1, 2}


@needs_gradio
def test_requests_that_go_round_the_page_are_refused_too(address, tmp_path):
    from gradio_client import Client, handle_file
    from gradio_client.exceptions import AppError

    client = Client(address, verbose=False)
    (tmp_path / "bad.wav").write_text("no sound")
    bad, long = handle_file(tmp_path / "bad.wav"), handle_file(tone(tmp_path / "long.wav", 6))
    for text, recording, method, said in (
            ("word " * 50, None, "car-3", "250 characters"), ("Yes.", None, "car-9", "not in the list"),
            ("Yes.", bad, "car-3", r"^bad\.wav"), ("Yes.", long, "car-3", "lasts 6 s")):
        with pytest.raises((AppError, ValueError), match=said):
            client.predict(text, "af_sarah", recording, method, 0.8, 0, api_name="/speak_a")


@pytest.mark.slow
@pytest.mark.skipif(not (has("gradio") and has("selenium") and BROWSER and DRIVER),
                    reason="no gradio, selenium, chromium or chromedriver")
def test_in_a_browser(address, tmp_path):
    """Type, speak, play, switch the method, a bad recording, a long text."""
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1100,1400",
                   "--autoplay-policy=no-user-gesture-required"):
        options.add_argument(option)
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))

    def until(what, seconds: float = 60):
        end = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < end, browser.find_element(By.TAG_NAME, "body").text
            time.sleep(0.2)
        return found

    def one(css: str):
        found = browser.find_elements(By.CSS_SELECTOR, css)
        return found[0] if found else None

    def speak(side: str, begins: str) -> None:
        until(lambda: one(f"#speak-{side}")).click()
        until(lambda: (said := one(f"#facts-{side}")) is not None and said.text.startswith(begins))

    try:
        browser.get(address)
        box = until(lambda: one("#text textarea"))
        box.clear()
        box.send_keys("We went home.")
        speak("A", "dcar:")
        until(lambda: re.search(r"0:0[1-9]", one("#sound-A").text))  # the player knows how long the sound is
        assert until(lambda: one("#picture-A img")).size["width"] > 200
        speak("B", "far:")
        method = one("#method-A input")
        method.click()
        method.send_keys(Keys.CONTROL, "a")
        method.send_keys("car-7", Keys.ENTER)
        speak("A", "car-7:")
        box.clear()
        box.send_keys("word " * 50)  # the box takes what is allowed
        assert len(box.get_attribute("value")) == 200
        box.clear()
        box.send_keys("Yes.")
        (tmp_path / "bad.wav").write_text("no sound")
        one("#recording input[type=file]").send_keys(str(tmp_path / "bad.wav"))
        time.sleep(2)
        one("#speak-B").click()
        until(lambda: "bad.wav" in browser.find_element(By.TAG_NAME, "body").text)
    finally:
        browser.quit()
