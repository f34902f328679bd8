"""Faults that others had, by number, where no other test names them. 1: keyword inputs, 2: in-place changes, 3: leaks,
4: trackers, 5: restored tensors held and 6: aliases are in test_checkpoint.py; 7: streams in test_engine_streams.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.checkpointing import Schedule
from lowtide.stores import HostStore
from models.chains import Twice
from support.devices import DEVICE


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_pitfall_8_the_random_state_is_preserved_unless_told_otherwise(fresh_device, device):
    """OLMo-core#828, accelerate 1.15: with another dropout mask in recompute, gradients are silently wrong."""
    x = torch.ones(64, 64).to(device).requires_grad_()
    schedule = Schedule(HostStore()) if device == DEVICE else None

    def dropped(y):
        return F.dropout(y, 0.5) * y

    for options, agrees in (({}, True), ({"preserve_rng_state": False}, False)):
        x.grad = None
        out = lowtide.checkpoint(dropped, x * 1, offload=schedule, **options)
        mask = out.detach() != 0
        out.sum().backward()
        assert torch.equal(x.grad != 0, mask) is agrees


class Seen:
    """Counts outside of the module: what a forward counts in the module's own attributes is put back."""

    gathered = 0


class Partitioned(nn.Module):
    """Parameters that are only there while their own module runs, as ZeRO-3 does it: gathered and released by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.seen = Seen()
        for linear in self.linears:
            linear.whole = {name: parameter.data for name, parameter in linear.named_parameters()}
            linear.register_forward_pre_hook(self._gather)
            linear.register_forward_hook(self._release)
            linear.register_full_backward_pre_hook(self._gather)
            self._release(linear)

    def _gather(self, linear, *_):
        self.seen.gathered += 1
        for name, parameter in linear.named_parameters():
            parameter.data = linear.whole[name]

    def _release(self, linear, *_):
        for parameter in linear.parameters():
            parameter.data = torch.empty(0)

    def forward(self, x):
        for linear in self.linears:
            x = linear(x).tanh()
        return x


@pytest.mark.parametrize("frozen", [False, True])
def test_pitfall_9_parameters_that_are_released_between_forward_and_recompute(frozen):
    """transformers#47254: a recompute that goes around the hooks sees parameters of shape [0]."""
    torch.manual_seed(0)
    model = nn.ModuleList(Partitioned() for _ in range(2)).train()
    for parameter in model[0].parameters():
        parameter.requires_grad_(not frozen)
    x = torch.randn(4, 32, requires_grad=True)

    def grad():
        y = x
        for block in model:
            y = block(y)
        return torch.autograd.grad(y.square().sum(), x)[0]

    expected = grad()
    gathered = model[0].seen.gathered
    with lowtide.apply(model, "recompute", regions=["*"]):
        assert torch.equal(grad(), expected)
    assert model[0].seen.gathered > 2 * gathered, "the recompute gathered them again"


def test_pitfall_10_a_backward_that_reads_saved_tensors_twice_inside_a_region():
    """mamba#1020. Inside a checkpoint torch hands each recomputed tensor out once, and says so: no silent error."""

    x = torch.randn(8, 8, requires_grad=True)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="already unpacked once"):
        lowtide.checkpoint(Twice.apply, x * 1).sum().backward()


def test_torch_func_grad_works_where_torchs_checkpoint_does():
    weight = torch.randn(8, 8)

    def loss(w, run):
        return run(torch.tanh, torch.ones(4, 8) @ w).sum()

    def plain(function, *args):
        return function(*args)

    torch_checkpoint = torch.utils.checkpoint.checkpoint

    def outcome(run):
        try:
            return torch.func.grad(loss)(weight, run)
        except RuntimeError as error:
            return type(error)

    ours = outcome(lowtide.checkpoint)
    theirs = outcome(lambda function, *args: torch_checkpoint(function, *args, use_reentrant=False))
    assert isinstance(ours, type) == isinstance(theirs, type)
    if not isinstance(ours, type):
        assert torch.equal(ours, outcome(plain))


def attract(x: torch.Tensor) -> torch.Tensor:
    return x.div(1 + 300 * x.pow(2))


def fail(x: torch.Tensor, now: bool) -> torch.Tensor:
    if now:
        raise ValueError("out of luck")
    return x.cos()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_function_as_the_last_step_can_be_recomputed():
    """ZoeDepth's attractors: torch's early stop comes out of TorchScript as a RuntimeError, and backward fails."""
    x = torch.randn(8, requires_grad=True)
    scripted, runs = torch.jit.script(attract), []

    def block(x):
        runs.append(1)
        return scripted(x.sin())

    (plain,) = torch.autograd.grad(block(x).sum(), x)
    (ours,) = torch.autograd.grad(lowtide.checkpoint(block, x).sum(), x)
    torch.testing.assert_close(ours, plain)  # TorchScript rewrites a function after its first run: not bit by bit
    assert len(runs) == 3, "once plainly, once in forward, once in backward"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_function_that_fails_in_backward_says_why():
    x = torch.randn(8, requires_grad=True)
    scripted, runs = torch.jit.script(fail), []

    def block(x):
        runs.append(1)
        return scripted(x.sin(), len(runs) > 1) * x

    out = lowtide.checkpoint(block, x)
    with pytest.raises(torch.jit.Error, match="out of luck"):
        out.sum().backward()
