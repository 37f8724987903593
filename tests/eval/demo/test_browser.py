"""The page as a person meets it, in a headless browser: type, speak, hear while it is spoken, switch, vote blindly, a
bad recording, a long text, two people at once, a phone. Skipped without gradio, selenium and chromium."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import time
from pathlib import Path

import pytest
from browser import PHONE, driver, needs_browser, shoot, too_wide

from eval.demo.page import DemoConfig, serve
from eval.demo.studio import Limits, Studio

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not importlib.util.find_spec("gradio"), reason="no gradio (pip install '.[demo]')"), needs_browser]

LONG = "The harbour was quiet, the boats lay still, and nobody had thought of the tide. " * 2
SHOTS = os.environ.get("DEMO_SHOTS")  # a folder: pictures of the page are left there


@pytest.fixture(scope="module")
def votes(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("votes")


@pytest.fixture(scope="module")
def address(votes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    studio = Studio.load(limits=Limits(characters=200, seconds=5.0, megabytes=1.0))
    page = serve(studio, DemoConfig(port=port, megabytes=1.0, votes=str(votes)), block=False)
    yield f"http://127.0.0.1:{port}/"
    page.close()


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
        button = self.until(lambda: self.one(css))
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()

    def tab(self, name: str) -> None:
        tabs = self.driver.find_elements("css selector", "button[role=tab]")
        next(t for t in tabs if t.text == name and t.is_displayed()).click()

    def speak(self, side: str, method: str) -> None:
        self.click(f"#speak-{side}")
        self.until(lambda: self.facts(side).startswith(f"{method}:"))

    def choose(self, side: str, method: str) -> None:
        from selenium.webdriver.common.keys import Keys

        box = self.one(f"#method-{side} input")
        box.click()
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(method, Keys.ENTER)

    def heard(self) -> list[dict]:
        return self.driver.execute_script("return window.dcarPlayer.log")

    def shoot(self, name: str) -> None:
        if SHOTS:
            shoot(self.driver, Path(SHOTS, f"{name}.png"))

    def fits(self) -> bool:
        """Nothing is wider than the screen."""
        return not too_wide(self.driver)


@pytest.fixture
def person(address, request):
    one = Person(address, getattr(request, "param", 1280))
    yield one
    one.driver.quit()


def test_sound_comes_while_it_is_spoken(person):
    """The player has sound, and plays it, before the facts of the whole utterance are there."""
    person.type(LONG)
    person.click("#speak-A")
    person.until(person.heard)
    assert "dcar:" not in person.facts("A")  # the utterance is not finished
    before = len(person.heard())
    person.until(lambda: person.facts("A").startswith("dcar:"))
    pieces = person.heard()
    assert len(pieces) > before and len({p["id"] for p in pieces}) == 1
    seconds = sum(p["seconds"] for p in pieces)
    assert seconds == pytest.approx(float(re.search(r"([\d.]+) s of speech", person.facts("A"))[1]), abs=0.05)
    clock = "return [window.dcarPlayer.context.state, window.dcarPlayer.context.currentTime]"
    state, now = person.driver.execute_script(clock)
    time.sleep(0.5)
    assert state == "running" and person.driver.execute_script(clock)[1] > now  # it is playing


def test_type_speak_switch_and_look(person):
    person.type("We went home.")
    person.speak("A", "dcar")
    person.until(lambda: re.search(r"0:0[1-9]", person.one("#sound-A").text))  # can be heard again
    assert person.until(lambda: person.one("#picture-A img")).size["width"] > 200
    person.speak("B", "far")
    person.until(lambda: person.one("#picture-B img"))
    assert [len(set(p["id"] for p in person.heard() if p["side"] == side)) for side in "AB"] == [1, 1]
    assert person.fits()
    person.shoot("page-1280")
    person.choose("A", "car-7")
    person.speak("A", "car-7")


def test_a_long_text_and_a_bad_recording(person, tmp_path):
    person.type("word " * 50)  # the box takes what is allowed
    assert len(person.box.get_attribute("value")) == 200
    person.type("Yes.")
    (tmp_path / "bad.wav").write_text("no sound")
    person.one("#recording input[type=file]").send_keys(str(tmp_path / "bad.wav"))
    time.sleep(2)
    person.click("#speak-B")
    person.until(lambda: "bad.wav: not readable" in person.body)


def test_a_blind_vote_is_counted(person, votes):
    """Neither method is named before the vote, both are after it, and the pair counts once."""
    person.type("We went home.")
    person.tab("Blind vote")
    person.click("#blind-speak")
    person.until(lambda: person.one("#outcome") and "Which one sounds better?" in person.one("#outcome").text)
    person.until(lambda: all(re.search(r"0:0[1-9]", person.one(f"#blind-{n}").text) for n in ("first", "second")))
    shown = person.one("#blind-first").text + person.one("#blind-second").text + person.one("#outcome").text
    assert "dcar" not in shown and "far" not in shown
    assert person.fits()
    person.click("#vote-second")
    person.until(lambda: "Counted. First:" in person.one("#outcome").text)
    (line,) = (votes / "votes.jsonl").read_text().splitlines()
    vote = json.loads(line)
    assert vote["preferred"] == vote["second"] and vote["text"] == "We went home."
    assert f"Second: {vote['second']['method']} at 0.8" in person.one("#outcome").text
    person.until(lambda: "exact binomial" in person.one("#votes").text)
    person.shoot("blind-1280")
    person.click("#vote-first")
    person.until(lambda: "Nothing to vote on" in person.one("#outcome").text)
    assert len((votes / "votes.jsonl").read_text().splitlines()) == 1


def test_two_people_at_once(address):
    """Both are served, each with the own text and sound."""
    people = [Person(address, 1280), Person(address, 1280)]
    try:
        for person, text in zip(people, ("Yes, we do.", "The tide came in before the boats."), strict=True):
            person.type(text)
        for person in people:
            person.click("#speak-A")
        for person in people:
            person.until(lambda p=person: p.facts("A").startswith("dcar:"))
        first, second = (sum(p["seconds"] for p in person.heard()) for person in people)
        assert 0 < first < second
    finally:
        for person in people:
            person.driver.quit()


@pytest.mark.parametrize("person", [PHONE], indirect=True)
def test_on_a_phone(person):
    person.type("We went home.")
    assert person.fits()
    person.speak("A", "dcar")
    image = person.until(lambda: person.one("#picture-A img"))
    assert image.size["width"] <= PHONE and person.fits()
    person.shoot("page-phone")
    person.tab("Blind vote")
    person.until(lambda: person.one("#blind-speak").is_displayed())
    assert person.fits()
    person.shoot("blind-phone")
