"""accelerate: `prepare` after `apply`, and a plugin that would recompute twice is refused."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin

import lowtide
from lowtide.errors import InvalidValueError
from lowtide.integrations.accelerate import check_fsdp, prepare
from models.tiny import llama
from support import ignore_dropped_caches
from support.foreign_warnings import ignore_warnings_of

pytestmark = ignore_warnings_of("accelerate", "torch", "transformers")


def step(run):
    torch.manual_seed(0)
    model, batch = llama()
    accelerator = Accelerator(cpu=True)
    model, optimizer, applied = run(accelerator, model.train())
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()], applied


def plain(accelerator, model):
    return *accelerator.prepare(model, torch.optim.AdamW(model.parameters())), None


def applied_first(accelerator, model):
    applied = lowtide.apply(model, "recompute")
    return *accelerator.prepare(model, torch.optim.AdamW(model.parameters())), applied


def prepared(accelerator, model):
    return *prepare(accelerator, "recompute", model, torch.optim.AdamW(model.parameters())), lowtide.apply(
        model, "recompute"
    )


@pytest.mark.parametrize("run", [applied_first, prepared])
@ignore_dropped_caches
def test_a_step_is_that_of_the_plain_model(run):
    expected, _ = step(plain)
    ours, applied = step(run)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert [region.recomputes for region in applied.report().regions] == [1, 1]


@pytest.mark.parametrize("setting", ["activation_checkpointing", "activation_checkpointing_offload"])
def test_a_plugin_that_checkpoints_itself_is_refused(setting):
    settings = {"activation_checkpointing": True} | {setting: True}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **settings)
    with pytest.raises(InvalidValueError, match=r"recomputed twice.*fsdp_activation_checkpointing"):
        check_fsdp(plugin)
    check_fsdp(FullyShardedDataParallelPlugin(fsdp_version=2))
    check_fsdp(None)
