"""Headless browser for tests: a page at the width of a desktop or of a phone, light or dark."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (importlib.util.find_spec("selenium") and BROWSER and DRIVER),
    reason="no selenium, chromium or chromedriver (pip install '.[dev]'; apt-get install chromium "
    "chromium-driver)",
)
DESKTOP, PHONE = 1100, 390

TOO_WIDE = """
const held = e => { for (let p = e.parentElement; p; p = p.parentElement)
  if (getComputedStyle(p).overflowX !== "visible") return true; return false; };
return [...document.querySelectorAll("body *")].filter(e => e.checkVisibility()
  && e.getBoundingClientRect().right > innerWidth + 1 && e.getBoundingClientRect().width > 1 && !held(e)
).map(e => e.outerHTML.slice(0, 120));"""


def driver(width: int, height: int = 900, dark: bool = False, *options: str) -> Any:
    """Return a webdriver whose pages are `width` CSS pixels wide; `quit` ends it."""
    from selenium import webdriver

    chosen = webdriver.ChromeOptions()
    chosen.binary_location = BROWSER
    for option in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={width},{height}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        *options,
    ):
        chosen.add_argument(option)
    if width < 500:  # windows have a minimum width, emulated phones do not
        chosen.add_experimental_option(
            "mobileEmulation",
            {
                "deviceMetrics": {
                    "width": width,
                    "height": height,
                    "pixelRatio": 1.0,
                    "touch": False,
                }
            },
        )
    return webdriver.Chrome(chosen, webdriver.ChromeService(DRIVER))


@contextmanager
def opened(page: Path, width: int, dark: bool = False) -> Iterator[Any]:
    """Open a file and yield its driver."""
    browser = driver(width, dark=dark)
    try:
        browser.get(page.as_uri())
        assert browser.execute_script("return innerWidth") == width
        yield browser
    finally:
        browser.quit()


def too_wide(browser: Any) -> list[str]:
    """Return the elements that extend beyond the screen outside of any box that scrolls or
    clips, and the page itself if it is wider."""
    found = browser.execute_script(TOO_WIDE)
    wide = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
    return [*found, *([f"the page, by {wide} pixels"] if wide > 0 else [])]
