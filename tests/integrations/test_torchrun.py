"""Whole runs under torchrun: the example as its first lines say, and a Trainer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import IS_4

HERE = Path(__file__).parent
ON_RANK = HERE / "on_rank.py"


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


def test_vision_language_lora():
    output = torchrun(HERE.parents[1] / "examples" / "vlm_lora_ddp.py")
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0]
    assert output.count("recomputes 8") == 4
    assert len(re.findall(r"rank [01]: peak memory", output)) == 2
    assert len(re.findall(r"offload\(disk=.*packed 0 B to [1-9]", output)) >= 2, (
        "all but the last region's inputs were away"
    )


@pytest.mark.parametrize("setup", ["ddp", "zero2", "zero3", "zero3 lora"])
def test_trainer_on_two_ranks_learns_what_the_plain_model_learns(setup: str):
    if setup.startswith("zero"):
        pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install 'lowtide[deepspeed]'")
    if IS_4 and setup == "zero3 lora":
        pytest.skip(
            "transformers 4's Trainer cannot train adapters under ZeRO-3 with this DeepSpeed, with or without a policy"
        )
    output = torchrun(HERE / "trainer_on_ranks.py", *setup.split())
    assert sorted(re.findall(r"rank ([01]): recomputes \[3, 3\]", output)) == ["0", "1"]
