"""Recipes: YAML files of settings, found by path or, for shipped ones, by name; `NAME:VARIANT`
selects one of a recipe's variants.

    dcar train --config car_starter    # launch/recipes/car_starter.yaml, from any folder
    dcar train --config launch/recipes/car_starter.yaml:far
    dcar train --config mine.yaml

A variant is an entry under `variants:` in the file, with the settings in which it differs.
"""

import difflib
import importlib.util
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dcar.errors import ConfigError
from dcar.home import expand

PREFIX = "launch/recipes/"


@cache
def folder() -> Path:
    """Return the folder of the shipped recipes; `launch` is found by name, because this package
    may not import it."""
    spec = importlib.util.find_spec("launch")
    return Path(((spec and spec.submodule_search_locations) or [""])[0]) / "recipes"


def recipe_file(named: str | Path) -> tuple[Path, str]:
    """Return file and variant of `FILE`, `NAME`, `FILE:VARIANT` or `NAME:VARIANT`. Raises
    ConfigError if there is no such file."""
    named = expand(str(named))
    front, _, variant_name = named.rpartition(":")
    for name, variant in ((named, ""), (front, variant_name)):
        for path in (Path(name), folder() / f"{name}.yaml", folder() / name.removeprefix(PREFIX)):
            # False for what can be no path, which Path.is_file raises for
            if name and os.path.isfile(path):
                return path, variant
    if os.path.exists(named) or "\0" in named:  # for example a folder
        return Path(named), ""
    names = [f"{r.name}{v and ':'}{v}" for r in shipped() for v in ("", *r.variants)]
    near = difflib.get_close_matches(Path(named).name.removesuffix(".yaml"), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"{named}: neither a file nor a shipped recipe{hint} (`dcar --recipes` lists them)"
    )


@dataclass(frozen=True)
class Recipe:
    """Shipped recipe: its name, the first sentence of its head comment, and variant -> its
    comment."""

    name: str
    summary: str
    variants: dict[str, str]


@cache
def shipped() -> list[Recipe]:
    """Return all shipped recipes by name."""
    recipes = []
    for path in sorted(folder().glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        variants = re.findall(
            r"^  ([\w-]+):(?: &\w+)?(?:  # (.*))?$", text.partition("\nvariants:\n")[2], re.M
        )
        top = " ".join(
            line.lstrip("# ") for line in re.split(r"\n(?:#  |[^#])", text)[0].split("\n")
        )
        recipes.append(Recipe(path.stem, re.split(r"(?<!App)\.(?: |$)", top)[0], dict(variants)))
    return recipes
