"""The report in a real browser: nothing is cut off, buttons sort tables, light and dark. Skipped without a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
from test_papers import comparison  # noqa: F401  a fixture

from eval.report.page import write_report
from eval.report.plots import draw_plots

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no browser (apt-get install chromium)")]

PROBE = """<script>
const table = document.querySelector("table.sortable"), wer = table.tHead.rows[0].cells[1];
const order = () => [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
const cut = [...document.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth + 1);
const found = {scrolled: cut.map(box => box.getAttribute("aria-label")),
               width: document.documentElement.scrollWidth, inner: innerWidth, before: order(), said: [],
               paper: getComputedStyle(document.body).backgroundColor, orders: []};
for (let i = 0; i < 3; i++) {
  const button = wer.querySelector("button");
  button.focus(); found.focus = document.activeElement === button;
  button.click(); found.said.push(wer.getAttribute("aria-sort")); found.orders.push(order());
}
document.body.dataset.found = JSON.stringify(found);
</script></body>"""


@pytest.fixture
def page(comparison, tmp_path):  # noqa: F811
    (tmp_path / "compare.json").write_text(json.dumps(comparison))
    draw_plots(comparison["rows"], tmp_path)
    path = write_report(tmp_path)
    path.write_text(path.read_text().replace("</body>", PROBE))
    return path


def looked_at(path, width: int, dark: bool = False) -> dict:
    done = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900",
         f"--user-data-dir={path.parent / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
         "--virtual-time-budget=2000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(found[1].replace("&quot;", '"'))


def test_tables_sort_and_say_so(page, comparison):  # noqa: F811
    found = looked_at(page, 1100)
    assert found["said"] == ["ascending", "descending", None] and found["focus"]
    wers = {r["method"]: round(100 * r["wer"], 2) for r in comparison["rows"]}
    up, down, back = ([wers[name] for name in order] for order in found["orders"])
    assert up == sorted(up) and down == sorted(down, reverse=True)
    assert found["orders"][2] == found["before"] == list(wers)


@pytest.mark.parametrize("width", [1100, 500])
def test_nothing_is_cut_off(page, width):
    """Tables scroll in boxes of their own: the page is never wider than the screen."""
    found = looked_at(page, width)
    assert found["width"] <= found["inner"]


def test_no_column_of_this_comparison_has_to_be_scrolled_to(page):
    """On a screen of 1,100 pixels, the p columns among them; the papers' tables are folded and may."""
    assert "Could it be chance?" not in looked_at(page, 1100)["scrolled"]
    assert not {"Errors and speed", "Voices, lengths and loops"} & set(looked_at(page, 1100)["scrolled"])


def test_light_and_dark(page):
    assert looked_at(page, 1100)["paper"] == "rgb(255, 255, 255)"
    assert looked_at(page, 1100, dark=True)["paper"] == "rgb(20, 20, 20)"
