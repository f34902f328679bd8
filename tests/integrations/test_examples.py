"""The examples run as their first lines say, and train."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.stores.files import IN_MEMORY, file_system
from support.torchrun import torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"


def python(script: str, *arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def falls(losses: list[str]) -> bool:
    assert len(losses) > 3
    return float(losses[-1]) < float(losses[0])


def test_trainer():
    output = python("trainer.py")
    (losses,) = re.findall(r"^losses (.*)$", output, re.MULTILINE)
    assert falls(re.findall(r"\d+\.\d+", losses))
    assert "recomputes 32 as logged" in output
    assert "model.layers.0-3 x4 [recompute+tile(mlp)] forwards 8, recomputes 8" in output


def test_accelerate_on_two_ranks():
    output = torchrun(EXAMPLES / "accelerate_loop.py")
    assert falls(re.findall(r"loss ([\d.]+)", output))
    assert "forwards 4, recomputes 4" in output


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the deepspeed extra is not installed")
def test_deepspeed_zero_3(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    output = torchrun(EXAMPLES / "deepspeed_zero3.py")
    assert falls(re.findall(r"loss ([\d.]+)", output))
    assert "forwards 6, recomputes 6" in output


def test_tensor_parallel():
    output = torchrun(EXAMPLES / "tensor_parallel.py")
    assert falls(re.findall(r"loss ([\d.]+)", output))
    assert "model.layers.0-3.mlp x4 [tile] calls 6, tiles 24" in output


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the deepspeed extra is not installed")
def test_ulysses():
    output = torchrun(EXAMPLES / "ulysses.py")
    assert falls(re.findall(r"loss ([\d.]+)", output))
    assert "forwards 6, recomputes 6" in output
    assert "lm_head [tile] calls 6, tiles 24" in output


def test_context_parallel():
    output = torchrun(EXAMPLES / "context_parallel.py")
    assert falls(re.findall(r"loss ([\d.]+)", output))
    assert "forwards 6, recomputes 6" in output
    assert "lm_head [tile] calls 6, tiles 24" in output


def test_pipeline():
    output = torchrun(EXAMPLES / "pipeline.py")
    assert falls(re.findall(r"loss ([\d.]+)", output))
    assert "recomputes 25" in output  # four micro-batches in each of six steps, and one when the stage infers shapes


def test_disk_tier(tmp_path):
    if file_system(tmp_path.stat().st_dev) in IN_MEMORY:
        pytest.skip("the directory for temporary files is in memory")
    output = python("disk_tier.py", str(tmp_path))
    assert falls(re.findall(r"loss ([\d.]+)", output))
    boundary = 512 * 128 * 4 // 1024
    assert f"disk {tmp_path}: 0 B now, {7 * boundary / 1024:.2f} MiB at the peak" in output
    assert "checksums compared" in output


def test_patched_framework():
    assert python("patched_framework.py").splitlines() == [
        "4 calls answered, one graph: DDP's hooks fire once",
        "torch's own function is back: True",
    ]
