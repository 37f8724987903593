"""The folder for caches, and `~` in settings."""

import os
import re
from pathlib import Path

TILDE = re.compile(r"(?:^|(?<=[=:,]))~[\w.-]*(?=[/,]|$)")


def cache_folder(name: str) -> Path:
    """Return the folder `name` for files that can be made again, in `$XDG_CACHE_HOME` or
    ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / name


def expand(text: str) -> str:
    """Replace every `~` or `~user` with which a path begins by the home folder: at the start,
    and after `=`, `:` or `,`, as in name=~/policy and hubert:~/model."""
    return TILDE.sub(lambda found: os.path.expanduser(found[0]), text)
