"""Devices, threads and work ahead of the models."""

import errno

import pytest
import torch

from dcar.errors import ConfigError, StorageError
from dcar.process import claimed, cores, own_device, worker_pool, workers


def test_each_process_of_a_machine_has_its_own_gpu(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert own_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device("auto") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert own_device("auto") == own_device("cuda") == "cuda:0"
    assert own_device("cuda:2") == "cuda:2"
    for local_rank, device in (("3", "cuda:3"), ("5", "cuda:1")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert own_device("auto") == device
    assert own_device("cpu") == "cpu"


def test_a_device_that_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:0", "warp"):
        with pytest.raises(ConfigError, match=f"'{device}'.*0 GPUs.*cpu"):
            own_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError, match="'cuda:4'.*4 GPUs"):
        own_device("cuda:4")


def test_processes_share_the_cores(monkeypatch):
    monkeypatch.setattr("dcar.process.cores", lambda: 16)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (workers(3), workers(0)) == (3, 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert workers(0) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "99")
    assert workers(0) == 1 and cores() >= 1


def test_workers_compute_with_one_thread_and_leave_the_others_theirs():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with worker_pool(2) as pool:
            assert set(pool.map(lambda _: torch.get_num_threads(), range(8))) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_full_disk_is_said_by_every_command_that_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match=r"out: .*No space left.* are free"), claimed("out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), claimed(tmp_path / "out"):  # not of a file to be read
        raise PermissionError(errno.EACCES, "Permission denied", "secret.wav")
