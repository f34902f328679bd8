"""What several test modules share."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from lowtide import simdevice


def expect_violation(kind: str) -> simdevice.Violation:
    """The first violation, which must be of this kind; clears the record."""
    torch.accelerator.synchronize()
    found = simdevice.violations()
    simdevice.reset()
    assert found, f"no violation reported, expected a {kind}"
    assert found[0].kind == kind, str(found[0])
    return found[0]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False
    )
