"""Users without a home folder, as containers have them, and folders that are not theirs to
write."""

import os
from pathlib import Path

import pytest

from dcar import home


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # what the test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_user_without_a_home_folder_has_one_in_the_temporary_folder(temporary, caplog):
    home.settle_home()
    home.settle_home()  # as a process that this one starts does
    folder = temporary / f"dcar-{os.getuid()}"
    assert Path.home() == folder and folder.stat().st_mode & 0o777 == 0o700
    assert home.cache_folder("x") == folder / ".cache" / "x"
    [record] = caplog.records
    assert str(folder) in record.message and "HOME" in record.message
    assert home.expand("~/run") == f"{folder}/run"


def test_a_home_folder_that_cannot_be_written_keeps_its_name_and_caches_go_elsewhere(
    temporary, monkeypatch, caplog
):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(home, "_writable", lambda path: False)
    home.settle_home()
    assert (
        home.cache_folder("x").parent == temporary / f"dcar-{os.getuid()}"
        and home.expand("~/a") == "/home/me/a"
    )
    assert "/home/me/.cache" in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", "~/caches")
    home.settle_home()
    assert home.cache_folder("x") == Path("/home/me/caches/x")


def test_a_folder_that_somebody_else_has_made_is_not_used(temporary, monkeypatch):
    uid = os.getuid()
    (temporary / f"dcar-{uid + 1}").mkdir()
    monkeypatch.setattr("os.getuid", lambda: uid + 1)
    home.settle_home()
    assert Path.home().parent == temporary and Path.home().name != f"dcar-{uid + 1}"
