"""CITATION.cff: one file of the format's version, of this version of the project, citing the paper."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def test_the_citation_is_of_this_project_and_its_paper():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors", "type"} <= set(cited)  # the first four are required
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    paper = cited["preferred-citation"]
    assert {"type", "title", "authors"} <= set(paper) and len(paper["authors"]) == 8
    assert paper["title"] in " ".join((ROOT / "README.md").read_text().split()) and "2506.22023" in paper["url"]
