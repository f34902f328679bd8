"""The surroundings of an audited step: what it must put back, and what it must not touch."""

from __future__ import annotations

import torch

from lowtide.auditing import Verdict, audit
from models.engines import WIDTH, Bare, Block, Engine, Net, Reentrant, loss, net
from support.foreign_warnings import ignoring_warnings_of


def test_random_states_of_devices_that_the_model_is_not_on(sim):
    model, batch = net()
    torch.sim.manual_seed(77)
    before = torch.sim.get_rng_state()
    audit(model, batch, configure=Engine(), loss=loss, checks=["random state"])
    assert torch.equal(torch.sim.get_rng_state(), before)
    audit(model.to(sim), (batch[0].to(sim),), configure=Engine(), loss=loss, checks=["random state"])
    assert torch.equal(torch.sim.get_rng_state(), before)


def test_a_model_on_a_device_draws_the_same_numbers_each_time(device):
    model, batch = net()
    checks = ["gradient values", "random state"]
    report = audit(model.to(device), (batch[0].to(device),), configure=Engine(), loss=loss, checks=checks)
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


class FillsATable(Block):
    """Makes a buffer as it first runs, and remembers that it did."""

    def forward(self, x):
        if not hasattr(self, "is_filled"):
            self.register_buffer("table", torch.ones(()), persistent=False)
            self.is_filled = True
        return super().forward(x * self.table)


def test_a_buffer_that_forward_adds_goes_again():
    model, batch = net()
    model.layers = torch.nn.ModuleList(FillsATable() for _ in range(3))
    Engine()(model)
    names = [set(vars(layer)) for layer in model.layers]
    report = audit(model, batch, loss=loss)
    assert report.ok, report
    assert not list(model.buffers())
    assert [set(vars(layer)) for layer in model.layers] == names
    assert not any(layer._non_persistent_buffers_set for layer in model.layers)
    model(*batch)
    assert len(list(model.buffers())) == 3, "and it works as before"


def test_inputs_that_need_a_gradient():
    """Without it, a reentrant checkpoint at the beginning would have none to pass on."""
    for needs in (True, False):
        x = torch.randn(4, WIDTH, requires_grad=needs)
        report = audit(Bare(), (x,), configure=Reentrant(), checks=["gradients present"])
        assert report.ok is needs, report
        assert x.grad is None


class Scripted(Block):
    """TorchScript takes no hooks, and cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.jit.trace(torch.nn.BatchNorm1d(WIDTH), torch.ones(3, WIDTH))

    def forward(self, x):
        return super().forward(self.scale(x))


def test_a_model_that_holds_torchscript():
    model, batch = net()
    with ignoring_warnings_of("torch"):  # TorchScript is deprecated
        model.layers = torch.nn.ModuleList(Scripted() for _ in range(3))
    checks = ["recomputed", "gradients present", "gradient values", "copy and pickle"]
    report = audit(model, batch, configure=Engine(), loss=loss, checks=checks)
    assert report.ok, report
    assert report["recomputed"].evidence["stacks"][0]["recomputed"] == 3
    assert report["gradients present"].evidence["count"] == sum(1 for _ in model.parameters()), "its own, too"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert report["copy and pickle"].verdict is Verdict.NOT_APPLICABLE
