"""Atomic file writes, JSON lines, manifests of digests, and errors of a full disk."""

import contextlib
import errno
import gzip
import hashlib
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dcar.errors import DataError, StorageError

MANIFEST = "manifest.json"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
REFUSED = FULL | {errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
# Messages of torch and safetensors, which have their own streams, for a failed write.
STREAMS = (
    "No space left",
    "os error 28",
    "Disk quota",
    "iostream error",
    "unexpected pos",
    "file write failed",
    "PytorchStreamWriter failed",
)


def gigabytes(size: float) -> str:
    """Return a number of bytes as readable text."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} bytes"


def is_write_failure(error: BaseException, codes: Set[int] = REFUSED) -> bool:
    """Return whether an error (or its cause) means that a file could not be written; codes: the
    `errno` of such errors."""
    if isinstance(error, OSError) and error.errno in codes:
        return True
    if isinstance(error, (OSError, RuntimeError, SafetensorError)) and any(
        text in str(error) for text in STREAMS
    ):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and cause is not error and is_write_failure(cause, codes)


@contextlib.contextmanager
def writing(what: str | Path, needed: int = 0, codes: Set[int] = REFUSED) -> Iterator[None]:
    """Raise StorageError if a write inside the block fails: what could not be written, how many
    bytes are free and, if known, how many it takes. Other errors pass. codes: as for
    `is_write_failure`."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        if not is_write_failure(error, codes):
            raise
        folder = next((p for p in (Path(what), *Path(what).parents) if p.is_dir()), Path("."))
        room = f"{gigabytes(shutil.disk_usage(folder).free)} are free in {folder}"
        takes = f", about {gigabytes(needed)} are needed" if needed else ""
        raise StorageError(
            f"{what}: could not be written ({str(error).splitlines()[0]}); {room}{takes}. Free "
            "some space and run the same command again"
        ) from error


def sync(path: Path) -> None:
    """Call fsync on a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: str | Path, by_several: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path`. The file written there replaces `path` at the end of
    the block; if the block fails it is removed, and `path` is unchanged. A missing folder is made.

    A killed process leaves the temporary file, which the next run of the command overwrites.
    by_several: processes may write this file at the same time, and each has its own path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = f".{os.getpid()}-{threading.get_ident()}" * by_several
    part = path.with_name(f".{path.name}{writer}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)  # its bytes may be those that are missing


def write_text(path: str | Path, text: str) -> None:
    """Write a text file so that it is either the old one or the whole new one, even after a
    power cut."""
    path = Path(path)
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


def text_lines(file: Path) -> Iterator[tuple[int, str, str | None]]:
    """Iterate over (line number from 1, text, fault) of the lines that are not blank; `.gz` files
    are unpacked.

    Only line feeds end a line: U+2028 and the other separators of Unicode belong to it. A byte
    order mark at the start is not part of the first line. A file that cannot be read further (cut
    off, damaged, no permission) ends with a line whose fault says so.
    """
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix.lower() == ".gz" else file.open("rb") as handle:
            for raw in handle:
                number += 1
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                try:
                    text = raw.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    yield (
                        number,
                        "",
                        f"not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8",
                    )
                    continue
                if text.strip():
                    yield number, text, None
    except (EOFError, zlib.error, OSError) as error:
        cause = "cut off" if isinstance(error, EOFError) else f"damaged or not readable ({error})"
        yield (
            number + 1,
            "",
            (
                f"the file is {cause}: everything after line {number} is lost, and "
                "lines before it may be wrong; copy it again"
            ),
        )


def json_lines(file: Path, what: str, fix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over ("file:line", object) of every line of a file of JSON lines that is not blank.

    Raises DataError for a line that is not an object (`what` it should be, and how to `fix` it),
    and for a file that cannot be read.
    """
    for number, text, fault in text_lines(file):
        row = None
        if fault is None:
            try:
                row = json.loads(text)
            except ValueError as error:
                fault = f"no JSON ({error})"
        if not isinstance(row, dict):
            raise DataError(
                f"{file}:{number}: not {what}: {fault or f'a JSON {type(row).__name__}'}; {fix}"
            )
        yield f"{file}:{number}", row


def append_lines(file: Path, rows: Iterable[Any]) -> None:
    """Append values as JSON lines to a file; a missing file or folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with writing(file), file.open("a", encoding="utf-8") as lines:
        lines.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def finish_last_line(file: Path) -> None:
    """End a file of JSON lines with a line break, without a last line that a killed process began
    and did not complete."""
    content = file.read_bytes() if file.exists() else b""
    start = content.rfind(b"\n") + 1
    if start == len(content):
        return
    try:
        json.loads(content[start:])
    except ValueError:
        os.truncate(file, start)
    else:
        with writing(file), file.open("ab") as lines:
            lines.write(b"\n")


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a value that JSON can represent."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def files_of(folder: Path) -> list[str]:
    """Return all files under a folder except its manifest, relative to it, sorted."""
    return sorted(
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if p.is_file() and p.name != MANIFEST and not p.name.endswith(".part")
    )


def digest(path: Path) -> dict[str, Any]:
    """Return size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        return {
            "size": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def digest_once(path: Path) -> dict[str, Any]:
    """Return the `digest` of a file, computed once per process for each size and time of change."""
    state = path.stat()
    return _digest_at(path.resolve(), state.st_size, state.st_mtime_ns)


@cache
def _digest_at(path: Path, _size: int, _modified: int) -> dict[str, Any]:
    return digest(path)


def step_of(folder: Path) -> int:
    """Return the step of a folder checkpoint-N."""
    return int(folder.name.split("-")[1])


def seal(folder: Path, files: Mapping[str, Any], **facts: Any) -> None:
    """Write the manifest of `files` (name -> `digest`), and `facts` about them, which marks the
    folder as complete."""
    for name in files:
        sync(folder / name)
    for inner in {(folder / name).parent for name in files}:
        sync(inner)
    write_text(
        folder / MANIFEST,
        json.dumps({"complete": True, **facts, "files": dict(files)}, indent=1) + "\n",
    )
    sync(folder.parent)


def unseal(folder: Path) -> None:
    """Mark a folder as incomplete until it is sealed."""
    write_text(folder / MANIFEST, json.dumps({"complete": False}) + "\n")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder; None if there is none. A broken one counts as that of an
    incomplete folder."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {"complete": False}
    return manifest if isinstance(manifest, dict) else {"complete": False}


def faults(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the differences between a folder and its manifest: files that are missing, of
    another size, of another digest."""
    try:
        if not manifest.get("complete") or not manifest["files"]:
            return ["it was cut off while it was written"]
        return file_differences(folder, manifest["files"])
    except (AttributeError, LookupError, TypeError):
        return ["its list of files is damaged"]


def file_differences(
    folder: Path,
    files: Mapping[str, Any],
    digest_of: Callable[[Path], Mapping[str, Any] | None] = digest,
) -> list[str]:
    """Return the differences between a folder and a list of its files (name -> `digest`): a line
    for each file that is missing, of another size or of another digest. If the size agrees,
    `digest_of` computes the digest; None = the size is enough."""
    differences = []
    for name, expected in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected["size"]:
                differences.append(f"{name} has {size} of {expected['size']} bytes")
            elif (read := digest_of(path)) is not None and read["sha256"] != expected["sha256"]:
                differences.append(f"{name} has another digest")
        except FileNotFoundError:
            differences.append(f"{name} is missing")
        except OSError as error:
            differences.append(f"{name} cannot be read ({error.strerror})")
    return differences
