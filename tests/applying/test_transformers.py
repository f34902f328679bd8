"""`lowtide.apply` on real transformers models, tiny and with random weights: exact, active, with and without LoRA."""

from __future__ import annotations

import pytest
import torch

import lowtide
from lowtide import simdevice
from models.architectures import (
    clvp,
    gemma3,
    gpt_bigcode,
    llama,
    llama4_vision,
    make,
    mixtral,
    qwen3,
    swiftformer,
    swin,
    t5,
    train_step,
    vit,
    whisper,
    xlstm,
    zamba2,
)
from models.tiny import IS_4, qwen3_vl
from support import ignore_dropped_caches
from support.foreign_warnings import ignore_warnings_of

pytestmark = [ignore_warnings_of("peft", "torch", "transformers"), ignore_dropped_caches]


MODELS = [
    llama,
    qwen3,
    gemma3,
    mixtral,
    gpt_bigcode,
    zamba2,
    pytest.param(xlstm, marks=pytest.mark.skipif(IS_4, reason="xLSTM of transformers 4.57 raises in any forward")),
    t5,
    whisper,
    vit,
    swin,
    swiftformer,
    llama4_vision,
    clvp,
    qwen3_vl,
]

REGIONS = {
    "swin": "swin.encoder.layers.",
    "swiftformer": "swiftformer.encoder.network.",
    "t5": "encoder.block.",
    "whisper": "model.encoder.layers.",
    "qwen3_vl": "model.visual.blocks.",
}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("policy", ["recompute", "recompute+offload"])
@pytest.mark.parametrize("build", MODELS)
def test_gradients_are_bit_identical_and_every_region_is_recomputed(sim, build, policy, lora):
    model, batch = make(build, sim, lora=lora)
    expected = train_step(model, batch)
    with lowtide.apply(model, policy) as applied:
        ours = train_step(model, batch)
        report = applied.report()
    assert ours.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(ours[name], expected[name])]
    assert not different
    assert len(report.regions) >= 2
    trained = [region for region in report.regions if any(name.startswith(f"{region.name}.") for name in expected)]
    assert len(trained) >= 2
    assert all(region.recomputes == region.forwards > 0 for region in trained)
    if policy == "recompute+offload":
        assert sum(region.packed_bytes for region in trained) > 0
    assert simdevice.violations() == []


@pytest.mark.parametrize(("build", "prefix"), [(globals()[name], prefix) for name, prefix in REGIONS.items()])
def test_regions_are_where_one_expects_them(build, prefix):
    model, _ = build()
    names = [region.name for region in lowtide.regions.find_regions(model)]
    assert any(name.startswith(prefix) for name in names), names
