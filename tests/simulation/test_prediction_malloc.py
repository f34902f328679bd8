"""The simulator against the C library itself: an interposer under malloc knows nothing of torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowtide.hardware.accelerators import Rates
from lowtide.policy import Policy
from lowtide.recording import read_peak
from lowtide.simulation.attention import Attention
from lowtide.simulation.clock import DEVICE, Clock
from lowtide.simulation.device import simulated_device
from lowtide.simulation.ledger import Ledger
from lowtide.simulation.step import record
from lowtide.targets.job import Job
from models.planned import TOKENS, batch_maker, make_model
from support import needs_transformers_5

pytestmark = [needs_transformers_5, pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is installed")]
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def interposer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("interposer") / "count_malloc.so"
    subprocess.run(
        [shutil.which("cc"), "-O2", "-shared", "-fPIC", str(SUPPORT / "count_malloc.c"), "-o", str(library), "-ldl"],
        check=True,
    )
    return library


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("llama", "none"),
        ("llama", "recompute+tile(loss, loss_tokens=64)"),
        pytest.param("qwen3", "recompute", marks=pytest.mark.slow),
        pytest.param("t5", "none", marks=pytest.mark.slow),
        pytest.param("mixtral", "recompute", marks=pytest.mark.slow),
    ],
)
def test_a_step_adds_what_malloc_counts(interposer: Path, family: str, policy: str):
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "step_under_malloc.py"), family, policy],
        env=os.environ | {"LD_PRELOAD": str(interposer), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=True,
    )
    counted = int(done.stdout.split()[-1])
    model = make_model(family, torch.float32, lora=False, device="meta")
    clock, attention = Clock(), Attention("cpu")
    ledger = Ledger(clock, Rates(flops=1e12, single_flops=1e12, bandwidth=1e11), DEVICE, rounding=1)
    job = Job(tokens=TOKENS, optimizer="adamw_foreach")
    with simulated_device(clock, attention):
        recording = record(model, batch_maker(family, torch.float32), job, Policy.parse(policy), ledger, attention)
    standing = sum(event.change for event in recording.events[: recording.start] if event.place == "device")
    peak = read_peak(recording).nbytes
    assert peak == pytest.approx(standing + counted, rel=0.005)
