"""Home folder of the user: `~` in settings, the folder for caches, and their substitutes for a
user without one."""

import logging
import os
import re
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

TILDE = re.compile(r"(?:^|(?<=[=:,]))~[\w.-]*(?=[/,]|$)")


def substitute() -> Path:
    """Return the folder that replaces a home folder, for this user alone."""
    return Path(tempfile.gettempdir()) / f"dcar-{os.getuid()}"


def settle_home() -> None:
    """Set up a home folder in the temporary folder for a user without one (in a container:
    neither HOME nor an entry in passwd), and a folder for caches there for one who cannot write
    to ~/.cache, with a note. Libraries and child processes read HOME and XDG_CACHE_HOME."""
    home = os.path.expanduser("~")
    if home == "~":
        variable, lacking = "HOME", "this user has no home folder"
    elif "XDG_CACHE_HOME" not in os.environ and not _writable(caches := Path(home) / ".cache"):
        variable, lacking = "XDG_CACHE_HOME", f"{caches} cannot be written"
    else:
        return
    try:
        folder = substitute()
        folder.mkdir(mode=0o700, exist_ok=True)
        # made by somebody else, who could change what is in it
        if folder.stat().st_uid != os.getuid():
            folder = Path(tempfile.mkdtemp(prefix="dcar-"))
    except OSError:  # nothing can be written anywhere: whatever needs a folder says so
        return
    os.environ[variable] = str(folder)
    logger.warning(
        "%s: caches go to %s; set %s to a folder that is kept", lacking, folder, variable
    )


def _writable(path: Path) -> bool:
    """Return whether a folder is writable, or can be made."""
    return os.access(next(p for p in (path, *path.parents) if p.exists()), os.W_OK | os.X_OK)


def cache_folder(name: str) -> Path:
    """Return the folder `name` for files that can be made again, in `$XDG_CACHE_HOME` or
    ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / name


def expand(text: str) -> str:
    """Replace every `~` or `~user` with which a path begins by the home folder: at the start,
    and after `=`, `:` or `,`, as in name=~/policy and hubert:~/model."""
    return TILDE.sub(lambda found: os.path.expanduser(found[0]), text)
