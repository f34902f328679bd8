"""Runs a script on two ranks under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ON_RANK = Path(__file__).with_name("on_rank.py")


def torchrun(script: Path, *arguments: str, timeout: float = 240) -> str:
    """What a script prints on two ranks."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ON_RANK)]
    done = subprocess.run(
        [*launch, str(script), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
