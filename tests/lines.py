"""Which lines of the core (dcar, heads, rl, eval) the tests run, at a price that every run of them can pay.

While sys.settrace is on, Python 3.11 slows all code of all libraries, and the tests took hours. SlipCover writes probes
into the bytecode of the core and leaves the rest as it is. A process that finds the path of this file in DCAR_LINES
measures itself, whoever started it, and leaves its lines in `.coverage-lines` when it ends; a killed one leaves none.

    python tests/lines.py start                          # empties that folder; a .pth file of this environment
    DCAR_LINES=$PWD/tests/lines.py python -m pytest …    # as often as wanted
    python tests/lines.py combine                        # -> .coverage, for `coverage report`
"""

import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".coverage-lines"
CORE = tuple(f"{ROOT / room}{os.sep}" for room in ("dcar", "heads", "rl", "eval"))
NEVER = 2**31 - 1  # probes stay: SlipCover would take them out by exchanging the code of functions that are running
HOOK = """import os; f = os.environ.get("DCAR_LINES"); f and __import__("runpy").run_path(f)["measure"]()\n"""


def start() -> None:
    """Empty the folder, and have every process of this environment look for DCAR_LINES, whatever its PYTHONPATH."""
    import sysconfig

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    Path(sysconfig.get_path("purelib"), "dcar_lines.pth").write_text(HOOK)


def measure() -> None:
    """Probe what this process imports of the core from now on; its lines are written when it ends."""
    import atexit
    from importlib.machinery import SourceFileLoader

    from slipcover import Slipcover

    read, leave = SourceFileLoader.get_code, os._exit
    if read.__name__ == "probed":
        return  # Python reads the .pth files of a folder twice where lib64 is a link to lib
    probes = Slipcover(d_miss_threshold=NEVER)

    def probed(self, name):  # the code of what is imported, and of `python -m`
        code = read(self, name)
        return probes.instrument(code) if self.path.startswith(CORE) else code

    def write():
        with probes.lock:
            lines = {path: sorted(seen) for path, seen in probes.newly_seen.items()}
        (FOLDER / f"{os.getpid()}-{os.urandom(4).hex()}.json").write_text(json.dumps(lines))

    def _exit(status):  # the end of a forked process
        write()
        leave(status)

    SourceFileLoader.get_code = probed
    os._exit = _exit
    atexit.register(write)


def combine() -> None:
    """The lines of all processes as coverage.py's data, with the files of the core that none of them imported."""
    from coverage import CoverageData

    lines: dict[str, set[int]] = {str(path): set() for room in CORE for path in Path(room).rglob("*.py")}
    for file in FOLDER.glob("*.json"):
        for path, seen in json.loads(file.read_text()).items():
            lines[path].update(seen)
    data = CoverageData(str(ROOT / ".coverage"))
    data.erase()
    data.add_lines(lines)
    data.touch_files(lines)
    data.write()


if __name__ == "__main__":
    {"start": start, "combine": combine}[sys.argv[1]]()
