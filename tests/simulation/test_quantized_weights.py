"""Plans with 4-bit weights, beside the bytes of layers that bitsandbytes quantized."""

from __future__ import annotations

import pytest
import torch
import transformers

import lowtide
from lowtide.errors import InvalidValueError
from lowtide.hardware.accelerators import Rates, find_accelerator
from lowtide.policy import Policy
from lowtide.recording import read_peak
from lowtide.simulation.attention import Attention
from lowtide.simulation.clock import DEVICE, Clock
from lowtide.simulation.device import simulated_device
from lowtide.simulation.ledger import Ledger
from lowtide.simulation.simulator import Simulator
from lowtide.simulation.step import record
from lowtide.stores.host_memory import pinned_for
from lowtide.targets.batches import make_batch
from lowtide.targets.job import Job
from lowtide.targets.models import build
from lowtide.targets.target import find_target
from models import quantized
from support import needs_transformers_5
from support.real_steps import real_peak

pytestmark = needs_transformers_5

SIZES = quantized.SIZES | {"hidden_size": 512, "intermediate_size": 1024}
RANK = 4


def estimate(policy="recompute", **job):
    target = find_target(transformers.LlamaConfig(**SIZES))
    job = Job(tokens=256, lora=RANK, **job)
    return Simulator(target, job, find_accelerator("L40S")).estimate(policy, exact=True)


def planned(**job):
    return estimate(**job).owners


def linear_weights():
    return sum(
        part.weight.numel()
        for name, part in quantized.plain(**SIZES).named_modules()
        if isinstance(part, torch.nn.Linear) and name != "lm_head"
    )


def real_model(*, double, prepared):
    return quantized.adapted(quantized.nf4(torch.bfloat16, double=double, **SIZES), prepared=prepared)


def scales_of(model):
    states = [part.weight.quant_state for part in model.modules() if hasattr(part, "support_avx512bf16_for_cpu")]
    assert len(states) == 14
    scales = [[state.absmax, *([state.state2.absmax] if state.nested else [])] for state in states]
    return sum(tensor.nbytes for tensors in scales for tensor in tensors)


@pytest.mark.parametrize("prepared", [False, True], ids=["", "prepared"])
@pytest.mark.parametrize("double", [False, True], ids=["", "double"])
def test_planned_bytes_are_those_of_bitsandbytes(double, prepared):
    model = real_model(double=double, prepared=prepared)
    real = scales_of(model) + sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    owners = planned(base="4bit", double_quant=double, kbit=prepared)
    assert owners["weights"] == pytest.approx(real, rel=0.005), "an allocator rounds each of them up"


@pytest.mark.parametrize(
    ("prepared", "autocast"), [(False, False), (True, False), (True, True)], ids=["", "prepared", "prepared, autocast"]
)
def test_planned_inputs_of_regions_are_those_of_a_real_step(prepared, autocast, tmp_path):
    """Of a prepared base they are float32: the embeddings are, and a layer gives its output the type of its input."""
    model, ids = real_model(double=True, prepared=prepared), quantized.tokens(1, 256)
    with lowtide.apply(model, f"recompute+offload(disk={tmp_path}, tmpfs)") as applied:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        real = sum(region.packed_bytes for region in applied.report().regions)
    assert real == 256 * SIZES["hidden_size"] * (4 if prepared else 2), "the last one's stays on the device"
    assert estimate("recompute+offload", base="4bit", kbit=prepared).host_bytes == pinned_for(real)


def predicted_peak(policy, **settings):
    """What the simulator says of a CPU's step with torch's default optimizer, as in `test_prediction.py`."""
    job = Job(tokens=256, lora=RANK, base="4bit", optimizer="adamw_foreach", **settings)
    model = build(find_target(transformers.LlamaConfig(**SIZES)), job)
    clock, attention = Clock(), Attention("cpu")
    ledger = Ledger(clock, Rates(flops=1e12, single_flops=1e12, bandwidth=1e11), DEVICE, rounding=1)
    with simulated_device(clock, attention):
        model.to(DEVICE)
        step = record(model, lambda m, on: make_batch(m, job, on), job, Policy.parse(policy), ledger, attention)
    return read_peak(step).nbytes


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize(
    ("policy", "within"),
    [("recompute", 0.02), pytest.param("none", 0.03, marks=pytest.mark.slow)],
)
def test_the_peak_of_a_prepared_step_is_that_of_the_profiler(policy, within):
    model, ids = real_model(double=True, prepared=True), quantized.tokens(1, 256)
    real = scales_of(model) + real_peak(model, {"input_ids": ids, "labels": ids, "use_cache": False}, policy)
    assert predicted_peak(policy, kbit=True, double_quant=True) == pytest.approx(real, rel=within)
    assert predicted_peak(policy, double_quant=True) < (1 - 2 * within) * real, "unprepared, it would be another step"


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


@pytest.mark.parametrize("setting", ["double_quant", "kbit"])
def test_settings_of_a_4_bit_base_are_refused_without_one(setting):
    with pytest.raises(InvalidValueError, match=f"{setting} is about a 4-bit base: give base='4bit' too"):
        Job(tokens=256, lora=RANK, **{setting: True})
