"""The measurement of lines that `launch/test.sh --coverage` uses, on a core of one file."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from coverage import CoverageData
from lines import HOOK

PART = """\
import os


def even(number):
    if number % 2 == 0:
        return True
    return False


def forked():
    return 1


if __name__ == "__main__":
    even(4)
    if not (child := os.fork()):
        forked()
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_lines_of_all_processes_come_together(tmp_path):
    (tmp_path / "tests").mkdir()
    tool = shutil.copy(Path(__file__).with_name("lines.py"), tmp_path / "tests")
    for room in ("dcar", "heads", "rl", "eval"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("")
    part = tmp_path / "dcar" / "part.py"
    part.write_text(PART)
    (tmp_path / "eval" / "never.py").write_text("print(1)\n")
    (tmp_path / ".coverage-lines").mkdir()
    environment = {**os.environ, "DCAR_LINES": tool}

    def python(*arguments: str, **more) -> None:
        subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True, timeout=60, **more)

    def seen() -> list[int] | None:
        python(tool, "combine")
        data = CoverageData(str(tmp_path / ".coverage"))
        data.read()
        assert data.measured_files() == {str(path) for path in tmp_path.rglob("*.py") if path != Path(tool)}
        return data.lines(str(part))

    assert not seen()
    python("-c", HOOK + "from dcar.part import even; even(3)", env=environment)
    assert sorted(seen()) == [1, 4, 5, 7, 10, 14]
    python("-c", HOOK + "import runpy; runpy.run_module('dcar.part', run_name='__main__')", env=environment)
    assert sorted(seen()) == [1, 4, 5, 6, 7, 10, 11, 14, 15, 16, 17, 18, 19]
