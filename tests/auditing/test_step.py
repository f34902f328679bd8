"""The surroundings of an audited step: what it must put back, and what it must not touch."""

from __future__ import annotations

import torch
from engines import Block, Engine, Net, loss, net

from lowtide.auditing import audit


def test_random_states_of_devices_that_the_model_is_not_on(sim):
    model, batch = net()
    torch.sim.manual_seed(77)
    before = torch.sim.get_rng_state()
    audit(model, batch, configure=Engine(), loss=loss, checks=["random state"])
    assert torch.equal(torch.sim.get_rng_state(), before)
    audit(model.to(sim), (batch[0].to(sim),), configure=Engine(), loss=loss, checks=["random state"])
    assert torch.equal(torch.sim.get_rng_state(), before)


def test_a_model_on_a_device_draws_the_same_numbers_each_time(sim):
    model, batch = net()
    checks = ["gradient values", "random state"]
    report = audit(model.to(sim), (batch[0].to(sim),), configure=Engine(), loss=loss, checks=checks)
    assert report.ok, report
    assert report["gradient values"].evidence["identical"]


class Rotary(Block):
    """Like a dynamic RoPE: frequencies are replaced for a longer text, which is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 4
        self.register_buffer("frequencies", torch.ones(()))

    def forward(self, x):
        if len(x) > self.longest:
            self.longest = len(x)
            self.register_buffer("frequencies", torch.tensor(1 / len(x)))
        return super().forward(x * self.frequencies)


def test_a_buffer_that_forward_replaces():
    model = Net()
    model.layers = torch.nn.ModuleList(Rotary() for _ in range(3))
    buffers = list(model.buffers())
    Engine()(model)
    report = audit(model, net()[1], loss=loss)
    assert report.ok, report
    assert all(now is before for now, before in zip(model.buffers(), buffers, strict=True))
    assert all(buffer == 1 and layer.longest == 4 for buffer, layer in zip(buffers, model.layers, strict=True))
