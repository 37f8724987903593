"""One strict schema for every command: a dataclass, a YAML file, and `key=value` on the command line.

    schema   what a setting declares: default, meaning, bounds, choices, old names; values as the type of their setting
    recipes  recipes by path and by name, and their variants
    read     YAML files and command lines: which settings they name, and where
    load     all of it together: `load_config`, `save_config`, `--help`
"""

from dcar.config.load import load_config, save_config, schema_of
from dcar.config.schema import check, setting

__all__ = ["check", "load_config", "save_config", "schema_of", "setting"]
