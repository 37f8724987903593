"""`dcar demo` as a person meets it, in a headless browser as wide as that of a desk or of a
phone: type, speak, hear, switch, a bad recording, a long text. Skipped without gradio, selenium
and chromium."""

import importlib.util
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from browser import PHONE, driver, needs_browser, too_wide

from dcar.speak.defaults import NUM_CANDIDATES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not importlib.util.find_spec("gradio"), reason="no gradio (pip install '.[demo]')"
    ),
    needs_browser,
]

DESK = 1440
WIDTHS = pytest.mark.parametrize("person", [DESK, PHONE], indirect=True)
FRAME = """
const image = document.querySelector("#picture-A img"), frame = image.parentElement;
frame.scrollLeft = 0;
return [Math.abs(image.getBoundingClientRect().left - frame.getBoundingClientRect().left), frame.clientWidth,
  frame.scrollWidth];"""
START = f"dcar@n{NUM_CANDIDATES}"  # what side A is set to
LISTEN = """
const players = root => [...root.querySelectorAll("*")].flatMap(e => [...(e.tagName == "AUDIO" && e.src ? [e] : []),
  ...(e.shadowRoot ? players(e.shadowRoot) : [])]);
const done = arguments[1], box = document.querySelector(arguments[0]), [player] = box ? players(box) : [];
if (!player) done(null);
else fetch(player.src).then(got => got.arrayBuffer()).then(bytes => new AudioContext().decodeAudioData(bytes))
  .then(sound => done([sound.duration, Math.max(...sound.getChannelData(0).map(Math.abs))]), () => done(null));"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of the command itself, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("demo") / "log.txt"
    with log.open("w") as written:
        page = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "dcar.cli",
                "demo",
                f"port={port}",
                "characters=200",
                "megabytes=1",
            ],
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + 180
        while not answers(f"http://127.0.0.1:{port}/"):
            assert page.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/"
    finally:
        page.terminate()
        page.wait(30)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=10) as got:
            return got.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


class Person:
    """A browser of its own, and what a person does with it."""

    def __init__(self, address: str, width: int):
        self.driver = driver(width, 1500, False, "--autoplay-policy=user-gesture-required")
        self.driver.get(address)
        self.box = self.until(lambda: self.one("#text textarea"))

    def one(self, css: str):
        found = self.driver.find_elements("css selector", css)
        return found[0] if found else None

    def until(self, what, seconds: float = 180):
        end = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < end, self.body
            time.sleep(0.1)
        return found

    @property
    def body(self) -> str:
        return self.driver.find_element("tag name", "body").text

    def type(self, text: str) -> None:
        self.box.clear()
        self.box.send_keys(text)

    def facts(self, side: str) -> str:
        said = self.one(f"#facts-{side}")
        return said.text if said else ""

    def click(self, css: str) -> None:
        """Click on an element, once nothing lies over it: while the page is laid out its parts
        still move."""
        from selenium.common.exceptions import (
            ElementClickInterceptedException,
            StaleElementReferenceException,
        )

        def pressed() -> bool:
            if (found := self.one(css)) is None:
                return False
            try:
                self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
                found.click()
            except (ElementClickInterceptedException, StaleElementReferenceException):
                return False
            return True

        self.until(pressed)

    def speak(self, side: str, method: str) -> None:
        self.click(f"#speak-{side}")
        self.until(lambda: self.facts(side).startswith(f"{method}:"))

    def choose(self, side: str, method: str) -> None:
        from selenium.webdriver.common.keys import Keys

        box = self.one(f"#method-{side} input")
        box.click()
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(method, Keys.ENTER)

    def kept(self, css: str) -> tuple[float, float]:
        """Seconds and loudest sample of what an audio element would play."""
        return tuple(self.until(lambda: self.driver.execute_async_script(LISTEN, css)))

    def fits(self) -> bool:
        """Nothing is wider than the screen."""
        return not too_wide(self.driver)


@pytest.fixture
def person(address, request):
    one = Person(address, getattr(request, "param", DESK))
    yield one
    one.driver.quit()


@WIDTHS
def test_type_speak_hear_switch_and_look(person):
    person.type("We went home, and the tide came in.")
    person.speak("A", START)
    seconds, loudest = person.kept("#sound-A")
    said = float(re.search(r"([\d.]+) s of speech", person.facts("A"))[1])
    assert seconds == pytest.approx(said, abs=0.01) and loudest > 0.05
    image = person.until(lambda: person.one("#picture-A img"))
    assert image.size["width"] > 550  # on a phone it scrolls, so that its letters can be read
    frame, seen, whole = person.driver.execute_script(FRAME)
    assert whole == max(seen, image.size["width"]) and frame <= 1  # from its left edge to its right
    person.speak("B", "far")
    person.until(lambda: person.one("#picture-B img"))
    assert person.fits()
    person.choose("A", "car-7")
    person.speak("A", "car-7")
    said = float(re.search(r"([\d.]+) s of speech", person.facts("A"))[1])
    # the new sound, not the one before
    person.until(lambda: abs(person.kept("#sound-A")[0] - said) < 0.01)
    assert person.fits()
