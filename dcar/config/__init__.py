"""One strict schema for every command: a dataclass, a YAML file, and `key=value` on the command
line.

schema   declaration of a setting: default, help text, bounds, choices; conversion of values
recipes  recipes by path and by name, and their variants
read     YAML files and command lines -> settings with their places
load     `load_config`, `save_config`, `--help`
"""

from dcar.config.load import load_config, save_config
from dcar.config.schema import check, setting

__all__ = ["check", "load_config", "save_config", "setting"]
