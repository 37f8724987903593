"""Tests of the documentation as a site: it is built strictly, every page of settings is current,
and nothing is loaded from elsewhere."""

import importlib
import re
from pathlib import Path

import pytest
from browser import DESKTOP, PHONE, needs_browser, opened, too_wide

from dcar.cli import jobs
from dcar.config.read import load_yaml
from dcar.config.schema import settings_of

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.needs("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        config = load_config(str(ROOT / "docs/site/mkdocs.yml"), strict=True, site_dir=str(folder))
        config.plugins.on_startup(command="build", dirty=False)
        build(config)  # raises if a link or an anchor leads nowhere
    return folder


def test_every_page_of_the_documentation_is_on_the_site_and_no_other_file(site):
    pages = [p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md")]
    html = {
        "index.html"
        if p.as_posix() == "README.md"
        else p.with_suffix(".html").as_posix().replace("README.html", "index.html")
        for p in pages
    }
    there = {p.relative_to(site).as_posix() for p in site.rglob("*.html")}
    made = {
        "404.html",
        "CHANGELOG.html",
        "CONTRIBUTING.html",
        "commands.html",
        "recipes.html",
        *map(page_of, jobs()),
    }
    cards = {f"cards/{p.parent.name}.html" for p in (ROOT / "dcar/assets").glob("*/README.md")}
    assert there == html | made | cards
    assert not (site / "site").exists()


def page_of(job: str) -> str:
    return f"settings/{re.sub(r' [a-z]+=', '-', job)}.html"


@pytest.mark.parametrize("job", jobs())
def test_every_setting_of_a_command_is_on_its_page(job, site):
    page = (site / page_of(job)).read_text()
    shown = set(re.findall(r"<td><code>([^<]+)</code></td>", page.replace("&#95;", "_")))
    schema = importlib.import_module(jobs()[job][0]).CONFIG
    refused = getattr(schema, "REFUSED", frozenset())
    known = {
        s.key for s in settings_of(schema).values() if not s.group and s.path[-1] not in refused
    }
    assert known <= shown
    assert f'{page_of(job)}">dcar {job}</a>' in (site / "commands.html").read_text()


def test_every_recipe_and_variant_is_listed(site):
    listed = (site / "recipes.html").read_text().replace("&#95;", "_")
    for path in (ROOT / "launch/recipes").glob("*.yaml"):
        variants = (load_yaml(path.read_text()) or {}).get("variants", {})
        for name in (path.stem, *(f"{path.stem}:{variant}" for variant in variants)):
            assert f"<code>{name}</code>" in listed, name


def test_formulas_are_drawn_and_sounds_played(site):
    methods = (site / "methods.html").read_text()
    assert "<math" in methods and "arithmatex" not in methods and "$$" not in methods
    assert "<audio" in (site / "index.html").read_text() and (site / "audio/dcar.mp3").is_file()


def test_pictures_are_drawn_from_the_tables_of_the_results(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/site"))
    pictures = importlib.import_module("pictures")
    for name, (heading, across, label, size, also) in pictures.PICTURES.items():
        rows = pictures.points(heading, across)
        assert len(rows) > 8 and sum(row[0].startswith("DCAR") for row in rows) >= 1
        pictures.draw(heading, across, label, tmp_path / name, size, also)
        assert (tmp_path / name).stat().st_size > 10_000 and (ROOT / "docs/images" / name).is_file()
    for number, seldom in ((0, "ours, one candidate, rewarded by word errors"), (1, "FAR")):
        fixed, others = pictures.policies(number)
        assert {"T 1.0", "T 0.8", "T 0.5"} <= set(fixed) and seldom in others
        assert len(others["ours, one candidate"]) == len(others["the paper's policy"]) == 3
    pictures.draw_policies(tmp_path / "policies.png")
    assert (tmp_path / "policies.png").stat().st_size > 10_000


def test_nothing_is_loaded_from_elsewhere(site):
    for page in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]+src=\"?(?:https?:)?//[^\s>]+", text)
        loaded += re.findall(r"<link[^>]+href=\"?(?:https?:)?//[^\s>]+", text)
        loaded += re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\s]+", text)
        assert not loaded, page


def test_links_out_of_the_documentation_are_pages_or_names(site):
    assert 'href="cards/recognizer.html"' in (site / "results.html").read_text()
    assert "../dcar/assets" not in "".join(p.read_text() for p in site.glob("*.html"))


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_no_page_is_wider_than_the_screen(site, width):
    """Check the pages with the widest tables and blocks of code, which must scroll by
    themselves."""
    with opened(site / "index.html", width) as browser:
        for name in "index start methods results your_voice recipes settings/compare".split():
            browser.get((site / f"{name}.html").as_uri())
            assert not too_wide(browser), name
            pictures = browser.find_elements("css selector", ".md-content img")
            assert all(picture.get_property("naturalWidth") > 0 for picture in pictures), name
