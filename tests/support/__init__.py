"""What several test modules share."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch
from packaging.version import Version

from lowtide import simdevice
from lowtide.compat import installed_version

if TYPE_CHECKING:
    from collections.abc import Callable

needs_trl_on_any_device = pytest.mark.skipif(
    (installed_version("trl") or Version("0")) < Version("1"),
    reason="needs TRL 1 with an offload for any device: that of 0.26 asks for streams of CUDA, XPU or NPU",
)

needs_transformers_5 = pytest.mark.skipif(
    (installed_version("transformers") or Version("0")) < Version("5"),
    reason="plans of transformers models are refused with transformers 4",
)

needs_zoo = pytest.mark.skipif(
    (installed_version("transformers") or Version("0")) < Version("5"),
    reason="the zoo reads the fields of configurations, which are dataclasses from transformers 5 on",
)

ignore_dropped_caches = pytest.mark.filterwarnings("ignore:lowtide. key-value caches are dropped")
"""For models that are asked for a cache though they train: that Lowtide drops it, and says so, is tested elsewhere."""


def expect_violation(kind: str) -> simdevice.Violation:
    """The first violation, which must be of this kind; clears the record."""
    torch.accelerator.synchronize()
    found = simdevice.violations()
    simdevice.reset()
    assert found, f"no violation reported, expected a {kind}"
    assert found[0].kind == kind, str(found[0])
    return found[0]


def eventually(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether it comes true soon: after an error, autograd's own thread lets go of the graph a little later."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.001)
    return True


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False
    )
