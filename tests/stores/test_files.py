"""Activations are user data: files are private and nameless, and unfit directories are refused with a remedy."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.errors import StoreError
from lowtide.stores import DiskStore
from lowtide.stores import files as directory
from lowtide.stores.files import ScratchFile


def test_the_file_is_private_and_has_no_name(tmp_path):
    disk = DiskStore(tmp_path, tmpfs=True)
    status = os.fstat(disk.resources.file._handle)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []


def test_nor_where_files_need_a_name_to_be_made(tmp_path, monkeypatch):
    real, made = os.open, []

    def old_file_system(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        if flags & os.O_CREAT:
            made.append(Path(path))
            assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", old_file_system)
    disk = DiskStore(tmp_path, tmpfs=True)
    assert [path.is_relative_to(tmp_path) for path in made] == [True]
    status = os.fstat(disk.resources.file._handle)
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    assert list(tmp_path.iterdir()) == []


def test_nothing_outlives_a_process_that_is_killed(tmp_path):
    code = f"""
import os, signal, torch
from lowtide.stores import DiskStore
disk = DiskStore({str(tmp_path)!r}, tmpfs=True)
stored = disk.put(torch.ones(1 << 20))
stored.start()
stored.release()
assert disk.bytes_used == 4 << 20
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm")  # noqa: S108  (that is the point)
def test_memory_is_no_disk_unless_asked_for():
    with pytest.raises(StoreError, match=r"is on tmpfs.*nothing would be freed.*tmpfs=True"):
        DiskStore("/dev/shm")  # noqa: S108
    assert DiskStore("/dev/shm", tmpfs=True, limit=4096).bytes_used == 0  # noqa: S108


def test_a_directory_that_everybody_may_write_to(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(StoreError, match=r"everybody may write to .*no sticky bit.*chmod o-w"):
        DiskStore(tmp_path, tmpfs=True)
    tmp_path.chmod(0o1777)
    DiskStore(tmp_path, tmpfs=True)


def test_a_link_of_somebody_else(tmp_path, monkeypatch):
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "inside").mkdir(parents=True)
    link.symlink_to(real)
    DiskStore(link / "inside", tmpfs=True)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(directory, "_ROOT", 54321)
    for path in (link, link / "inside"):
        with pytest.raises(StoreError, match=f"{link}, a symbolic link of user .*name the real directory, {real}"):
            DiskStore(path, tmpfs=True)
    DiskStore(real, tmpfs=True)


@pytest.mark.parametrize(
    ("path", "says"),
    [("missing", r"No such file or directory\. Remedy: create it"), ("file", r"Not a directory\. Remedy: name a dir")],
)
def test_what_is_no_directory(tmp_path, path, says):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=f"{tmp_path}/{path} cannot be used: {says}"):
        DiskStore(tmp_path / path)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (13, "a directory that you may write to"),
        (24, "ulimit -n"),
        (28, "free some space there"),
        (30, "mounted for writing"),
    ],
)
def test_no_file_can_be_made(tmp_path, monkeypatch, error, says):
    real = os.open
    before = len(list(Path("/proc/self/fd").iterdir()))

    def fail(path, flags, *args, **kwargs):
        if flags & os.O_RDWR:
            raise OSError(error, os.strerror(error))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(StoreError, match=f"no file can be made in {tmp_path}.*{says}"):
        ScratchFile(tmp_path, 4096, tmpfs=True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
