"""How the C code is compiled, kept and loaded."""

import os

import pytest
import torch

from dcar.decoding.backend import Backend
from dcar.decoding.cpu import native as module
from dcar.decoding.cpu.backend import cpu_backend
from dcar.decoding.cpu.native import NativeError, kernels, load


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, and a small source: these tests are of the cache, not of what is in it."""
    (tmp_path / "kernels.c").write_text("int one(void) { return 1; }")
    monkeypatch.setattr(module, "SOURCES", (tmp_path / "kernels.c",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.cache_clear()
    yield tmp_path
    kernels.cache_clear()


def test_without_a_compiler_pytorch_computes_and_the_log_says_so(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert kernels() is None
    assert "C compiler" in caplog.text
    assert type(cpu_backend(torch.float32)) is Backend


def test_a_compiler_that_fails_is_quoted(fresh, monkeypatch):
    with pytest.raises(NativeError, match="kernels.c: .*no-such-flag"):
        load(("-fno-such-flag",))
    monkeypatch.setenv("DCAR_NATIVE", "off")
    assert kernels() is None


def test_a_cache_that_cannot_be_written_is_named(fresh, monkeypatch):
    (fresh / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    with pytest.raises(NativeError, match="file/dcar: .*XDG_CACHE_HOME"):
        load()


@pytest.mark.parametrize("harm", ["content", "mode", "link"])
def test_a_library_that_is_not_as_it_was_built_is_never_loaded(fresh, harm, caplog):
    """Whoever can write into the cache could otherwise run code of his own here."""
    library = module._compiled(module.FLAGS)
    assert module._compiled(module.FLAGS) == library and library.stat().st_mode & 0o777 == 0o700
    if harm == "content":
        library.write_bytes(b"no library")
    elif harm == "mode":
        library.chmod(0o777)
    else:
        library.rename(fresh / "elsewhere.so")
        library.symlink_to(fresh / "elsewhere.so")
    again = module._compiled(module.FLAGS)
    assert (
        again.read_bytes()[:4] == b"\x7fELF"
        and not again.is_symlink()
        and again.stat().st_mode & 0o22 == 0
    )
    assert str(library) in caplog.text


def test_the_folder_of_kernels_is_this_user_s_alone(fresh, monkeypatch):
    (fresh / "dcar").mkdir(mode=0o777)
    (fresh / "dcar").chmod(0o777)
    module._compiled(module.FLAGS)
    assert (fresh / "dcar").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(NativeError, match=f"{fresh}/dcar.*XDG_CACHE_HOME"):
        module._compiled(module.FLAGS)
