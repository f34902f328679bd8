"""The examples run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_vision_language_lora_under_torchrun():
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(EXAMPLES / "vlm_lora_ddp.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]
    assert done.stdout.count("recomputes 8") == 4
    assert len(re.findall(r"rank [01]: peak memory", done.stdout)) == 2
