"""Whole runs under torchrun: the example as its first lines say, and a Trainer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from models.tiny import IS_4
from support.torchrun import torchrun

ROOT = Path(__file__).parents[2]


def test_vision_language_lora():
    output = torchrun(ROOT / "examples" / "vlm_lora_ddp.py")
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
    output = torchrun(ROOT / "tests" / "support" / "trainer_on_ranks.py", *setup.split())
    assert sorted(re.findall(r"rank ([01]): recomputes \[3, 3\]", output)) == ["0", "1"]
