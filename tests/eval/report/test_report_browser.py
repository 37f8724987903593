"""The report in a real browser: nothing is cut off on a desktop or a phone, tables sort, links
unfold, light and dark can be read. Skipped without a browser."""

import pytest
from browser import DESKTOP, PHONE, needs_browser, opened, too_wide

from eval.report.page import write_report
from eval.report.plots import draw_plots
from eval.results.types import write_result

SORTED = """const table = document.querySelectorAll("table.sortable")[arguments[0]];
  const column = [...table.tHead.rows[0].cells].findIndex(cell => cell.textContent.startsWith(arguments[1]));
  const title = table.tHead.rows[0].cells[column];
  title.querySelector("button").click();
  return [title.getAttribute("aria-sort"), [...table.tBodies[0].rows].map(row => row.cells[column].textContent)]"""
CONTRAST = """
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
  return worst"""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(DESKTOP, False), (PHONE, True)])
def test_the_page_in_a_browser(width, dark, comparison, tmp_path):
    write_result(tmp_path / "compare.json", comparison)
    draw_plots(comparison.first.rows, tmp_path)
    with opened(write_report(tmp_path), width, dark) as browser:
        find = "return document.getElementById('comparison-at-equal-speed').open"
        assert not browser.execute_script(find)
        browser.find_element("link text", "Comparison at equal speed").click()
        assert browser.execute_script(find)

        browser.execute_script("document.querySelectorAll('details').forEach(e => e.open = true)")
        assert not too_wide(browser)
        wers = [f"{100 * row.wer.value:.2f}" for row in comparison.first.rows]
        titles, orders = zip(
            *(browser.execute_script(SORTED, 0, "WER") for _ in range(3)), strict=True
        )
        assert titles == ("ascending", "descending", None)
        up, down, again = ([cell.split()[0] for cell in order] for order in orders)
        assert (up, down, again) == (
            sorted(wers, key=float),
            sorted(wers, key=float, reverse=True),
            wers,
        )
        _, p = browser.execute_script(SORTED, 1, "p FAR")  # "<0.001" first, "–" last
        known = [0.0 if text.startswith("<") else float(text) for text in p if text != "–"]
        assert known == sorted(known) and "–" not in p[: len(known)] and len(known) > 5

        worst = browser.execute_script(CONTRAST)  # 4.5 : 1 (WCAG AA), small print too
        assert worst[0] >= 4.5, worst
