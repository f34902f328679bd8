"""Plans with 4-bit weights, beside the bytes of layers that bitsandbytes quantized."""

from __future__ import annotations

import pytest
import torch
import transformers

from lowtide.hardware.accelerators import find_accelerator
from lowtide.simulation.simulator import Simulator
from lowtide.targets.job import Job
from lowtide.targets.target import find_target
from models import quantized
from support import needs_transformers_5

pytestmark = needs_transformers_5

SIZES = quantized.SIZES | {"hidden_size": 512, "intermediate_size": 1024}
RANK = 4


def planned(**job):
    target = find_target(transformers.LlamaConfig(**SIZES))
    job = Job(tokens=256, lora=RANK, **job)
    return Simulator(target, job, find_accelerator("L40S")).estimate("recompute", exact=True).owners


def linear_weights():
    return sum(
        part.weight.numel()
        for name, part in quantized.plain(**SIZES).named_modules()
        if isinstance(part, torch.nn.Linear) and name != "lm_head"
    )


@pytest.mark.parametrize("double", [False, True], ids=["", "double"])
def test_planned_bytes_are_those_of_bitsandbytes(double):
    """Double quantization makes the scales smaller than planned: by 9 % of a quantized weight."""
    model = quantized.adapted(quantized.nf4(torch.bfloat16, double=double, **SIZES))
    states = [part.weight.quant_state for part in model.modules() if hasattr(part, "support_avx512bf16_for_cpu")]
    assert len(states) == 14
    scales = [[state.absmax, *([state.state2.absmax] if state.nested else [])] for state in states]
    real = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    real += sum(tensor.nbytes for tensors in scales for tensor in tensors)
    saved = linear_weights() * (4 / 64 - 1 / 64 - 4 / (64 * 256)) if double else 0
    assert planned(base="4bit")["weights"] == pytest.approx(real + saved, rel=0.005)


def test_ranks_share_packed_weights_but_not_their_scales():
    """As FSDP2 does with bitsandbytes' `quant_storage`: a scale is no parameter."""
    quantized_weights = linear_weights()
    one = planned(base="4bit")
    four = planned(base="4bit", engine="fsdp2", ranks=4)
    others = one["weights"] - quantized_weights * (0.5 + 4 / 64)
    assert four["weights"] == pytest.approx(quantized_weights * (0.5 / 4 + 4 / 64) + others / 4, rel=0.01)


def test_packed_weights_are_gathered():
    plain, packed = (planned(base=base, engine="fsdp2", ranks=4)["communication"] for base in ("plain", "4bit"))
    per_layer = linear_weights() / SIZES["num_hidden_layers"]
    assert plain - packed == pytest.approx(2 * per_layer * 1.5, rel=0.01), "of the layer that runs and of the next one"
