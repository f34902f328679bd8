"""The directory of a disk store: activations are user data, so it is looked at before anything is written to it.

It is opened once and looked at through that handle, so that what was looked at is what is used.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are in memory: nothing would be freed."""

_ROOT = 0
_REMEDIES = {
    errno.ENOSPC: "free space there, give another directory, or a lower limit (limit=...)",
    errno.EDQUOT: "your quota is used up: give another directory, or a lower limit (limit=...)",
    errno.EMFILE: "the process has too many open files: close some, or raise the limit (ulimit -n)",
    errno.ENFILE: "the machine has too many open files: close some, or raise fs.file-max",
    errno.ENOENT: "create it, with mode 0700, or give another one",
    errno.ENOTDIR: "give a directory",
    errno.EACCES: "give a directory that you may write to",
    errno.EPERM: "give a directory that you may write to",
    errno.EROFS: "give a directory on a disk that is mounted for writing",
    errno.EIO: "the disk fails: give a directory on another one",
}


def remedy(error: OSError) -> str:
    """What to do about a failed call."""
    return _REMEDIES.get(error.errno or 0, "check the disk, or give another directory")


@contextlib.contextmanager
def opened(directory: Path, *, tmpfs: bool) -> Iterator[int]:
    """A handle of a directory that is fit to hold activations, or a `StoreError` that says why it is not."""
    refuse_foreign_links(directory)
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(
            f"disk store: {directory} cannot be used: {error.strerror}. Remedy: {remedy(error)}"
        ) from error
    try:
        refuse_unfit(directory, os.fstat(handle), tmpfs=tmpfs)
        yield handle
    finally:
        os.close(handle)


def refuse_foreign_links(directory: Path) -> None:
    """A symbolic link of another user can be pointed elsewhere at any time."""
    trusted = (_ROOT, os.geteuid())
    absolute = directory.absolute()
    for path in (absolute, *absolute.parents):
        if path.is_symlink() and (owner := path.lstat().st_uid) not in trusted:
            raise StoreError(
                f"disk store: {directory} leads through {path}, a symbolic link of user {owner}, who could point it "
                f"elsewhere. Remedy: name the real directory, {absolute.resolve()}"
            )


def refuse_unfit(directory: Path, status: os.stat_result, *, tmpfs: bool) -> None:
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise StoreError(
            f"disk store: everybody may write to {directory} and it has no sticky bit, so anybody could replace what "
            "is in it. Remedy: chmod o-w, or make a directory of your own with mode 0700"
        )
    kind = file_system(status.st_dev)
    if kind in IN_MEMORY and not tmpfs:
        raise StoreError(
            f"disk store: {directory} is on {kind}, whose files are in memory: nothing would be freed. Remedy: give a "
            "directory on a disk, or tmpfs=True if you mean it"
        )


def file_system(device: int) -> str:
    """The kind of the file system with this device number, or `"unknown"`."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:  # no Linux
        return "unknown"
    for line in lines:
        fields, _, kind = line.partition(" - ")
        if fields.split()[2] == wanted:
            return kind.split()[0]
    return "unknown"


def free_bytes(directory: Path) -> int:
    """What this user may still write there."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
