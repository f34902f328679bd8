"""Compiles the device on first use, and caches it per torch version.

The compiled library lies in the user's cache directory under a key made of torch's version, Python's ABI and the
sources, so that a new torch or a changed source never uses an old binary. Processes that start together take turns
with a file lock that the kernel drops when its holder dies; a build that was killed is simply done again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lowtide.errors import SimBuildError, SimDeviceError
from lowtide.user_cache import user_cache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_NAME = "_lowtide_sim"
_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-O1", "-g0", "-std=c++20")


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """The tools that a build of the device would find here."""

    compiler: str | None
    ninja: str | None
    built: bool
    """Whether the cache holds a library for this torch, so that neither is needed."""
    cache: Path


def toolchain() -> Toolchain:
    """Look for compiler, ninja and a cached library. Nothing is compiled."""
    directory = cache_directory()
    return Toolchain(compiler=_compiler(), ninja=_ninja(), built=_is_complete(directory), cache=directory)


def loaded() -> ModuleType | None:
    """Return the device's library if this process has loaded it and registered the device, else None."""
    library = sys.modules.get(_NAME)
    return library if library is not None and library.is_registered() else None


def library() -> ModuleType:
    """Return the device's library; raise if it is not loaded."""
    found = loaded()
    if found is None:
        raise SimDeviceError("the sim device is not enabled yet: call lowtide.simdevice.enable() first")
    return found


def load() -> ModuleType:
    """Load the device's library, and build it first if the cache does not hold it."""
    directory = cache_directory()
    library = directory / f"{_NAME}.so"
    if not _is_complete(directory):
        with _build_lock(directory):
            if not _is_complete(directory):  # nobody was faster
                _compile(directory)
                (directory / "complete").touch()
    try:
        return _import(library)
    except ImportError as error:
        raise SimBuildError(
            f"{library} cannot be loaded ({error}): delete {directory}, and it will be built again"
        ) from error


def _is_complete(directory: Path) -> bool:
    return (directory / "complete").exists() and (directory / f"{_NAME}.so").exists()


def cache_directory() -> Path:
    """Return the directory that caches the library for this torch, Python and source."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return user_cache() / "simdevice" / f"torch-{torch.__version__}-{abi}-{digest.hexdigest()[:12]}"


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def _ninja() -> str | None:
    return shutil.which("ninja", path=_search_path())


def _search_path() -> str:
    """Return PATH with the environment's scripts, where ninja is even if the environment is not activated."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


@contextlib.contextmanager
def _build_lock(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "turn").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Let torch find ninja, which it looks for on the PATH of the process."""
    before = os.environ.get("PATH")
    os.environ["PATH"] = _search_path()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


def _compile(directory: Path) -> None:
    _check_tools()
    from torch.utils import cpp_extension

    # Once per torch version, and long enough that silence would look like a hang.
    sys.stderr.write(
        f"lowtide: building the emulated device for torch {torch.__version__} (once, takes about a minute)\n"
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
    except (RuntimeError, ImportError, OSError, subprocess.CalledProcessError) as error:
        raise SimBuildError(
            f"the compiler {_compiler()} could not build the emulated device in {directory}:\n{error}"
        ) from error


def _check_tools() -> None:
    if platform.system() != "Linux":
        raise SimBuildError(f"the emulated device needs Linux (signals and page protection), not {platform.system()}")
    if _compiler() is None:
        wanted = os.environ.get("CXX", "c++")
        raise SimBuildError(
            f"the emulated device has to be compiled, and no C++ compiler was found: neither {wanted!r} nor 'g++'. "
            "Install one (Debian: apt install g++), or point CXX at one that understands C++20"
        )
    if _ninja() is None:
        raise SimBuildError("the emulated device is built with ninja, which was not found: pip install 'lowtide[sim]'")


def _import(path: Path) -> ModuleType:
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.machinery.ModuleSpec(_NAME, loader, origin=str(path))
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[_NAME] = module
    return module
