"""`enable`: settings are honoured or refused; the build has clear errors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from lowtide import simdevice
from lowtide.errors import InvalidValueError
from support import run_python

if TYPE_CHECKING:
    from pathlib import Path


def test_later_calls_change_what_they_name(sim):
    assert simdevice.enable(memory="64MiB", flops=2e12).memory == 64 * 1024**2
    settings = simdevice.enable(h2d=1e9)
    assert (settings.memory, settings.flops, settings.h2d) == (64 * 1024**2, 2e12, 1e9)
    assert settings.on_violation == "record"
    assert torch.accelerator.get_memory_info()[1] == 64 * 1024**2


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"memory": "lots"}, "lots"),
        ({"memory": 0}, "memory"),
        ({"flops": 0}, "flops"),
        ({"h2d": -1e9}, "h2d"),
        ({"d2h": float("nan")}, "d2h"),
        ({"launch": -1}, "launch"),
        ({"on_violation": "ignore"}, "on_violation"),
    ],
)
def test_bad_settings_are_refused_and_change_nothing(sim, bad, named):
    before = simdevice.enable()
    with pytest.raises(InvalidValueError, match=named):
        simdevice.enable(**bad)
    assert simdevice.enable() == before


def test_figures_before_enable_are_an_error_with_the_remedy():
    done = run_python("from lowtide import simdevice; assert not simdevice.is_enabled(); simdevice.stats()")
    assert "SimDeviceError" in done.stderr
    assert "call lowtide.simdevice.enable() first" in done.stderr


def test_stats_are_frozen(sim):
    with pytest.raises(AttributeError):
        simdevice.stats().time = 0


def test_a_missing_compiler_is_one_clear_error(tmp_path: Path):
    done = run_python(
        "from lowtide import simdevice; simdevice.enable()",
        PATH=str(tmp_path),
        CXX="no-such-compiler",
        LOWTIDE_CACHE=str(tmp_path),
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("lowtide.errors.SimBuildError: ")
    assert "'no-such-compiler'" in last
    assert "apt install g++" in last


@pytest.mark.parametrize("answers_version", [True, False])
def test_a_compiler_that_fails_is_one_clear_error(tmp_path: Path, answers_version: bool):
    compiler = tmp_path / "c++"
    version = 'case "$1" in --version|-v|-dumpversion|-dumpfullversion) exec g++ "$@";; esac' if answers_version else ""
    compiler.write_text(f'#!/bin/sh\n{version}\necho "fatal: out of coffee" >&2\nexit 1\n')
    compiler.chmod(0o755)
    done = run_python(
        "from lowtide import simdevice; simdevice.enable()", CXX=str(compiler), LOWTIDE_CACHE=str(tmp_path / "cache")
    )
    assert "SimBuildError" in done.stderr
    assert str(compiler) in done.stderr
    assert not answers_version or "out of coffee" in done.stderr


def test_a_cached_library_needs_no_compiler(sim, tmp_path: Path):
    done = run_python(
        "import torch; from lowtide import simdevice; simdevice.enable(); print(torch.ones(3, device='sim').sum())",
        PATH=str(tmp_path),
        CXX="no-such-compiler",
    )
    assert done.stdout.strip() == "tensor(3., device='sim:0')", done.stderr
    assert "building" not in done.stderr


def test_the_cache_key_holds_torch_python_and_the_sources(sim, monkeypatch, tmp_path: Path):
    here = simdevice.toolchain()
    assert here.built
    assert torch.__version__ in here.cache.name
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert not simdevice.toolchain().built
    assert simdevice.toolchain().cache != here.cache


def test_looking_for_tools_changes_no_environment(monkeypatch):
    monkeypatch.delenv("PATH")
    assert simdevice.toolchain().ninja, "found beside this Python"
    assert "PATH" not in os.environ


def test_no_autograd_thread_outlives_the_interpreter(sim):
    """They aborted one process in four at exit. What is registered first is run last, so this sees what is left."""
    done = run_python(
        "import atexit, torch; from lowtide import simdevice; from lowtide.simdevice import _registration as r\n"
        "atexit.register(lambda: print('left', r._autograd_threads()))\n"
        "simdevice.enable()\n"
        "torch.ones(3, device='sim', requires_grad=True).sum().backward()\n"
        "print('before', r._autograd_threads())"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["before ['pt_autograd_0']", "left []"]


def test_a_half_emptied_cache_is_built_again(sim, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    directory = simdevice.toolchain().cache
    directory.mkdir(parents=True)
    (directory / "complete").touch()
    assert not simdevice.toolchain().built


def test_a_library_that_does_not_load_is_one_clear_error(tmp_path: Path):
    code = (
        "from lowtide import simdevice; d = simdevice.toolchain().cache; d.mkdir(parents=True)\n"
        "(d / 'complete').touch(); (d / '_lowtide_sim.so').write_text('no library')\n"
        "simdevice.enable()"
    )
    done = run_python(code, LOWTIDE_CACHE=str(tmp_path))
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("lowtide.errors.SimBuildError: ")
    assert "delete" in last


def test_another_out_of_tree_device_is_named():
    done = run_python(
        "import torch; torch.utils.rename_privateuse1_backend('npu')\nfrom lowtide import simdevice; simdevice.enable()"
    )
    assert "SimDeviceError" in done.stderr
    assert "'npu' has taken it" in done.stderr
