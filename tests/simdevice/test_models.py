"""Real transformers models, from tiny configs with random weights, train on the device."""

from __future__ import annotations

import pytest
import torch

from lowtide import simdevice
from models.tiny import llama, qwen3_vl
from support.foreign_warnings import ignore_warnings_of

pytestmark = ignore_warnings_of("torch", "transformers")


@pytest.mark.parametrize("build", [llama, qwen3_vl])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_agrees_with_the_cpu(sim, build, checkpointing):
    results = []
    for device in ("cpu", sim):
        torch.manual_seed(0)
        model, batch = build()
        model.to(device).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(**{name: value.to(device) for name, value in batch.items()}, use_cache=False).loss
        loss.backward()
        results.append([loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for ours, cpu in zip(*results, strict=True):
        torch.testing.assert_close(ours, cpu, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [llama, qwen3_vl])
def test_the_loss_falls_and_no_rule_is_broken(sim, build):
    torch.manual_seed(0)
    model, batch = build()
    model.to(sim).train()
    batch = {name: value.to(sim) for name, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        with torch.autocast(sim, dtype=torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert simdevice.violations() == []
