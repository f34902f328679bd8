"""Streams: the engine follows the compute stream wherever it is, and the device sees no broken rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide import simdevice
from lowtide.checkpointing import Schedule
from lowtide.stores import HostStore
from support.devices import DEVICE


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5)).to(DEVICE)


def step(stack, schedule, stream):
    """Forward and backward on `stream`, correctly ordered after the default stream."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)  # whatever other threads draw
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        y = x
        for layer in stack:
            y = lowtide.checkpoint(layer, hidden_input(y), offload=schedule) if schedule else layer(hidden_input(y))
        y.square().sum().backward()
    torch.accelerator.synchronize()
    return [p.grad.cpu() for p in stack.parameters()]


def hidden_input(y):
    return y


def test_a_store_made_on_one_stream_works_on_another(sim):
    """A compute stream remembered from construction is a race (DeepSpeed#8181, torchtune#1867, torchtitan#2581)."""
    schedule = Schedule(HostStore())
    stack = layers()
    expected = step(stack, None, torch.accelerator.current_stream())
    for stream in (torch.accelerator.current_stream(), torch.Stream(device=sim), torch.Stream(device=sim)):
        stack.zero_grad()
        simdevice.reset()
        ours = step(stack, schedule, stream)
        assert simdevice.violations() == []
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("link", [1e6, 1e9, 1e12])
def test_slow_and_fast_links_are_equally_right(sim, link):
    """How copies and compute fall in time depends on the link; what is waited for does not."""
    simdevice.enable(h2d=link, d2h=link, on_violation="raise")
    stack = layers()
    expected = step(stack, None, torch.accelerator.current_stream())
    stack.zero_grad()
    ours = step(stack, Schedule(HostStore()), torch.accelerator.current_stream())
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_two_threads_train_two_models_with_one_store(sim):
    import threading

    schedule, results, errors = Schedule(HostStore()), {}, []
    stacks = {name: layers() for name in ("one", "two")}
    expected = step(layers(), None, torch.accelerator.current_stream())

    def work(name):
        try:
            results[name] = step(stacks[name], schedule, torch.Stream(device=sim))
        except Exception as error:  # noqa: BLE001  shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in stacks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for grads in results.values():
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    simdevice.reset()
