"""Compiles the device on first use and keeps it per torch version.

The compiled library lies in the user's cache directory under a key made of torch's version, Python's ABI and the
sources, so that a new torch or a changed source never meets an old binary. Processes that start together take turns
with a file lock that the kernel drops when its holder dies; a build that was killed is simply done again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lowtide.errors import SimBuildError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_NAME = "_lowtide_sim"
_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-O1", "-g0", "-std=c++20")


def loaded() -> ModuleType | None:
    """The device's library if this process has loaded it."""
    return sys.modules.get(_NAME)


def load() -> ModuleType:
    """The device's library, built first if need be."""
    directory = cache_directory()
    with _turn(directory):
        complete = directory / "complete"
        if not complete.exists():
            _compile(directory)
            complete.touch()
        return _import(directory / f"{_NAME}.so")


def is_built() -> bool:
    """Whether the cache holds a library for this torch, so that no compiler is needed."""
    return (cache_directory() / "complete").exists()


def cache_directory() -> Path:
    """Where the library for this torch, Python and source lies. `LOWTIDE_CACHE` moves the whole cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide"
    root = Path(os.environ.get("LOWTIDE_CACHE") or default)
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return root / "simdevice" / f"torch-{torch.__version__}-{abi}-{digest.hexdigest()[:12]}"


def compiler() -> str | None:
    """The C++ compiler that a build would use, or nothing."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def ninja() -> str | None:
    """The ninja that a build would use: on the path, or in an environment that is not activated."""
    with _ninja_on_path():
        return shutil.which("ninja")


@contextlib.contextmanager
def _turn(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "turn").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, sysconfig.get_path("scripts")])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _compile(directory: Path) -> None:
    _check_tools()
    from torch.utils import cpp_extension

    print(
        f"lowtide: building the emulated device for torch {torch.__version__} (about a minute, once) in {directory}",
        file=sys.stderr,
    )
    (directory / "lock").unlink(missing_ok=True)  # torch's own, left behind if a build was killed
    try:
        with _ninja_on_path():
            cpp_extension.load(
                _NAME,
                [str(source) for source in sorted(_SOURCES.glob("*.cpp"))],
                extra_cflags=list(_FLAGS),
                build_directory=str(directory),
            )
    except (RuntimeError, ImportError) as error:
        raise SimBuildError(
            f"the compiler {compiler()} could not build the emulated device in {directory}:\n{error}"
        ) from error


def _check_tools() -> None:
    if platform.system() != "Linux":
        raise SimBuildError(f"the emulated device needs Linux (signals and page protection), not {platform.system()}")
    if compiler() is None:
        wanted = os.environ.get("CXX", "c++")
        raise SimBuildError(
            f"the emulated device is C++ and there is no compiler: {wanted!r} and 'g++' were not found. "
            "Install one (Debian: apt install g++), or point CXX at one that understands C++20"
        )
    if ninja() is None:
        raise SimBuildError("the emulated device is built with ninja, which was not found: pip install 'lowtide[sim]'")


def _import(path: Path) -> ModuleType:
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[_NAME] = module
    return module
