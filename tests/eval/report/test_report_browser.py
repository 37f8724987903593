"""The report in a real browser: nothing is cut off on a desktop or a phone, buttons sort tables,
light and dark, keys. Skipped without a browser."""

import json

import pytest
from browser import DESKTOP, PHONE, needs_browser, opened, too_wide
from test_verifier_report import comparison  # noqa: F811, F401  a fixture

from eval.report.page import write_report
from eval.report.plots import draw_plots

pytestmark = [pytest.mark.slow, needs_browser]

SCROLLED = """return [...document.querySelectorAll(".scroll, .wide")].filter(e => e.scrollWidth > e.clientWidth + 1)
  .map(e => [e.getAttribute("aria-label"), e.classList.contains("more")])"""
ORDER = """const table = document.querySelector("table.sortable"), title = table.tHead.rows[0].cells[arguments[0]];
  title.querySelector("button").click();
  return [title.getAttribute("aria-sort"), [...table.tBodies[0].rows].map(row => row.cells[0].textContent)]"""


@pytest.fixture(scope="module")
def page(comparison, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("report")
    (folder / "compare.json").write_text(json.dumps(comparison))
    draw_plots(comparison["rows"], folder)
    return write_report(folder)


@pytest.fixture(scope="module")
def desktop(page):
    with opened(page, DESKTOP) as browser:
        yield browser


@pytest.fixture(scope="module")
def phone(page):
    with opened(page, PHONE) as browser:
        yield browser


def test_tables_sort_and_say_so(desktop, comparison):  # noqa: F811
    wers = {r["method"]: round(100 * r["wer"], 2) for r in comparison["rows"]}
    said, orders = zip(*(desktop.execute_script(ORDER, 1) for _ in range(3)), strict=True)
    assert said == ("ascending", "descending", None)
    up, down, _ = ([wers[name] for name in order] for order in orders)
    assert up == sorted(up) and down == sorted(down, reverse=True)
    assert orders[2] == list(wers)


def test_p_below_a_thousandth_sorts_first(desktop):
    """It is written <0.001, not 0.000, and stands before all others; methods without a p stay
    last."""
    p = desktop.execute_script("""
        const table = document.querySelectorAll("table.sortable")[1];
        const column = [...table.tHead.rows[0].cells].findIndex(cell => cell.textContent.startsWith("p FAR"));
        table.tHead.rows[0].cells[column].querySelector("button").click();
        return [...table.tBodies[0].rows].map(row => row.cells[column].textContent)""")
    known = [text for text in p if text != "–"]
    assert p == [*known, *["–"] * (len(p) - len(known))] and "0.000" not in p
    values = [0.0 if text.startswith("<") else float(text) for text in known]
    assert values == sorted(values) and len(values) > 5


@pytest.mark.parametrize("width", ["desktop", "phone"])
def test_nothing_is_wider_than_the_screen(width, request):
    """Tables and pictures scroll in boxes of their own, which fade where there is more; all
    sections unfolded."""
    browser = request.getfixturevalue(width)
    browser.execute_script(
        "for (const folded of document.querySelectorAll('details')) folded.open = true"
    )
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert not too_wide(browser)
    scrolled = browser.execute_script(SCROLLED)
    assert all(fades for _, fades in scrolled) and (width == "desktop" or len(scrolled) > 3)


def test_a_link_unfolds_its_section(page):
    with opened(page, DESKTOP) as browser:
        find = "return document.getElementById('comparison-at-equal-speed').open"
        assert not browser.execute_script(find)
        browser.find_element("link text", "Comparison at equal speed").click()
        assert browser.execute_script(find)


def test_no_column_of_this_comparison_has_to_be_scrolled_to(desktop):
    """On a desktop, the p columns among them."""
    desktop.execute_script(
        "for (const id of ['significance', 'voices-lengths-and-loops']) "
        "document.getElementById(id).open = true"
    )
    scrolled = {label for label, _ in desktop.execute_script(SCROLLED)}
    assert not {"Errors and speed", "Significance", "Voices, lengths and loops"} & scrolled


def test_a_phone_shows_figures_beside_the_names(phone):
    """The column of names stays where it is and leaves the most of the screen to figures;
    scrolled to its end a table no longer fades."""
    name, right, fades = phone.execute_async_script("""
        const box = document.querySelector(".scroll"), cell = box.querySelector("tbody th"), done = arguments[0];
        box.scrollLeft = box.scrollWidth;
        setTimeout(() => done([cell.getBoundingClientRect().left, cell.getBoundingClientRect().right,
                               box.classList.contains("more")]), 200)""")
    assert 0 <= name < 25 and right < 0.45 * PHONE and not fades


def test_a_phone_shows_the_first_picture_in_a_size_that_can_be_read(phone):
    """Its smallest print is 6.5 points on 7.4 inches: at 560 pixels 7 of them, at the width of
    the phone not 5."""
    assert (
        phone.execute_script(
            "return document.querySelector('.wide img').getBoundingClientRect().width"
        )
        >= 560
    )


def test_the_keyboard_reaches_results_tables_and_buttons(desktop):
    """The first key leads past the list of sections; focus can be seen."""
    from selenium.webdriver.common.keys import Keys

    desktop.execute_script("scrollTo(0, 0); document.activeElement.blur()")
    desktop.find_element("tag name", "body").send_keys(Keys.TAB)
    active = desktop.switch_to.active_element
    assert active.text == "To the results"
    active.send_keys(Keys.ENTER)
    assert desktop.current_url.endswith("#main")
    seen = []
    for _ in range(4):
        desktop.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(
            desktop.execute_script("""const e = document.activeElement;
            return [e.className || e.tagName, parseFloat(getComputedStyle(e).outlineWidth)]""")
        )
    assert [kind for kind, _ in seen] == ["wide", "scroll", "BUTTON", "BUTTON"]
    assert all(outline >= 2 for _, outline in seen)


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(page, dark):
    """Text keeps a contrast of 4.5 : 1 to what it stands on (WCAG AA), small print too."""
    with opened(page, DESKTOP, dark) as browser:
        paper, worst = browser.execute_script("""
            const parse = text => text.match(/[\\d.]+/g).map(Number);
            const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .04045 ? v / 12.92
              : ((v + .055) / 1.055) ** 2.4).reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
            const ground = e => { for (; e; e = e.parentElement) {
              const color = parse(getComputedStyle(e).backgroundColor); if (color[3] !== 0) return color; }
              return [255, 255, 255]; };
            const worst = [99, ""];
            for (const e of document.querySelectorAll("p, td, th, a, summary, li, strong, h1, h2, h3, ins, del")) {
              const a = light(parse(getComputedStyle(e).color)), b = light(ground(e));
              const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
              if (e.textContent.trim() && ratio < worst[0]) worst.splice(0, 2, ratio, e.outerHTML.slice(0, 100));
            }
            return [getComputedStyle(document.body).backgroundColor, worst]""")
    assert paper == ("rgb(20, 20, 20)" if dark else "rgb(255, 255, 255)")
    assert worst[0] >= 4.5, worst
