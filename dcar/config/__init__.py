"""One strict schema for every command: a dataclass, a YAML file, and `key=value` on the command line.

    schema   what a setting declares: default, meaning, bounds, choices, old names
    values   a value of a YAML file or of the command line as the type of its setting, within its bounds
    read     YAML files and command lines: which settings they name, and where
    help     what `--help` prints
    load     all of it together: `load_config`, `save_config`
"""

from dcar.config.load import load_config, save_config, schema_of
from dcar.config.schema import setting
from dcar.config.values import check

__all__ = ["check", "load_config", "save_config", "schema_of", "setting"]
