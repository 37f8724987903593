"""Whole files, manifests, full disks; `dcar doctor`."""

import errno
import json
import signal
from pathlib import Path

import pytest

from dcar import doctor as command
from dcar.errors import DataError, ProcessError, StorageError
from dcar.process import meeting_others, run_command
from dcar.storage import (
    MANIFEST,
    digest,
    faults,
    files_of,
    is_write_failure,
    json_lines,
    read_manifest,
    seal,
    unseal,
    write_text,
)
from dcar.storage import writing as writing_to
from dcar.tracking import provenance


def folder_of(path: Path) -> Path:
    (path / "inner").mkdir(parents=True)
    for name, content in (("a.bin", b"12345"), ("inner/b.bin", b"x" * 1000)):
        (path / name).write_bytes(content)
    return path


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b"])
def test_lines_of_json_end_with_line_feeds_alone(separator: str, tmp_path):
    file, row = tmp_path / "a.jsonl", {"text": f"one{separator}two"}
    line = json.dumps(row, ensure_ascii=False)
    file.write_text(f"\ufeff{line}\r\n\n{line}\n", encoding="utf-8")
    assert list(json_lines(file, "a row", "write objects")) == [
        (f"{file}:1", row),
        (f"{file}:3", row),
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"[1]", "a JSON list"),
        (b"null", "a JSON NoneType"),
        (b"{", "no JSON"),
        (b'"caf\xe9"', r"not UTF-8 \(byte 5"),
    ],
)
def test_a_line_that_is_no_object_is_named(line: bytes, fault: str, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{}\n" + line)
    with pytest.raises(DataError, match=rf"a.jsonl:2: .*a row: .*{fault}.*; write objects"):
        list(json_lines(tmp_path / "a.jsonl", "a row", "write objects"))


def test_a_sealed_folder_and_what_may_happen_to_it(tmp_path):
    folder = folder_of(tmp_path / "run")
    unseal(folder)
    assert faults(folder, read_manifest(folder))
    seal(folder, {name: digest(folder / name) for name in files_of(folder)}, step=3)
    manifest = read_manifest(folder)
    assert manifest["step"] == 3 and set(manifest["files"]) == {"a.bin", "inner/b.bin"}
    assert faults(folder, manifest) == []
    (folder / "a.bin").write_bytes(b"12346")
    (folder / "inner" / "b.bin").write_bytes(b"x" * 999)
    changed, short = faults(folder, manifest)
    assert changed.startswith("a.bin ") and short.startswith("inner/b.bin has 999 of 1000 bytes")
    (folder / "a.bin").unlink()
    assert faults(folder, manifest)[0] not in ("", changed)
    assert read_manifest(tmp_path) is None


def test_a_text_is_the_old_one_or_the_whole_new_one(tmp_path, monkeypatch):
    path = tmp_path / "new" / "log"
    write_text(path, "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    said = rf"{path}: .*Errno 28.* GB .*{path.parent}.* 5.0 MB"
    with pytest.raises(StorageError, match=said), writing_to(path, needed=5_000_000):
        write_text(path, "new")
    assert path.read_text() == "old"


def test_only_writes_that_fail_are_taken_for_such():
    streams = (
        "[enforce fail at inline_container.cc:672] . unexpected pos 40448 vs 40340",
        "Error while serializing: I/O error: No space left on device (os error 28)",
    )
    assert all(is_write_failure(RuntimeError(text)) for text in streams)
    assert is_write_failure(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert not is_write_failure(
        FileNotFoundError(errno.ENOENT, "No such file")
    ) and not is_write_failure(RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes"), writing_to("x"):
        raise RuntimeError("shapes do not fit")


def test_verify_recomputes_every_list_of_digests(tmp_path, capsys):
    checkpoint = folder_of(tmp_path / "run" / "checkpoint-2")
    seal(checkpoint, {name: digest(checkpoint / name) for name in files_of(checkpoint)})
    data = folder_of(tmp_path / "data")
    (data / "prepared.json").write_text(json.dumps({"files": {"a.bin": digest(data / "a.bin")}}))
    assert command.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("ok ") == 2
    (data / "a.bin").write_bytes(b"flips")
    assert command.main([str(tmp_path)]) == 1
    assert f"BAD   {data}/prepared.json\n      a.bin " in capsys.readouterr().out
    (checkpoint / MANIFEST).write_text("{")
    assert command.main([str(tmp_path / "run")]) == 1
    with pytest.raises(DataError, match="inner: .*manifest.json"):
        command.verify(data / "inner")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_of_which_an_extension_makes_an_import_error_still_stops(number):
    """As matplotlib's does while it is imported for the first time."""

    def work():
        try:
            signal.raise_signal(number)
        except BaseException as caught:
            raise ImportError("initialization failed") from caught

    if number == signal.SIGINT:
        assert run_command("x", work) == 130
    else:
        with pytest.raises(SystemExit) as end:
            run_command("x", work)
        assert end.value.code == 75


def test_a_process_that_others_do_not_meet_says_which_it_is(monkeypatch):
    for name, value in (
        ("WORLD_SIZE", "2"),
        ("RANK", "1"),
        ("MASTER_ADDR", "node7"),
        ("MASTER_PORT", "29500"),
    ):
        monkeypatch.setenv(name, value)
    message = r"process 1 of 2, .*node7:29500: .*\(Gloo timed out\)"
    with pytest.raises(ProcessError, match=message), meeting_others():
        raise RuntimeError("Gloo timed out\nat store.cpp")
    with pytest.raises(RuntimeError, match="shapes"), meeting_others():  # of another cause
        raise RuntimeError("shapes do not fit")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RuntimeError, match="timed out"), meeting_others():
        raise RuntimeError("Gloo timed out")


def test_where_a_run_comes_from_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = provenance(steps=3)
    assert found["revision"] == "unknown (not a git checkout)" and found["steps"] == 3
