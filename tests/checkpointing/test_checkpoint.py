"""`lowtide.checkpoint` gives the plain model's gradients, bit for bit, whatever its inputs look like."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide import simdevice
from lowtide.checkpointing import Schedule
from lowtide.errors import InvalidValueError, OffloadError
from lowtide.stores import HostStore
from models.chains import BOUNDARY, TOKENS, WIDTH, Counted

LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Inputs:
    hidden: torch.Tensor
    note: str = "kept"


class Pair(NamedTuple):
    hidden: torch.Tensor
    scale: float


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.down(F.gelu(self.up(hidden))))


def positional(block, hidden, run):
    return run(block, hidden)


def keyword(block, hidden, run):
    return run(block, hidden=hidden)


def nested(block, hidden, run):
    return run(lambda inputs: block(inputs["states"][0]) * inputs["scale"], {"states": [hidden], "scale": 0.5})


def in_dataclass(block, hidden, run):
    return run(lambda inputs: block(inputs.hidden), Inputs(hidden))


def in_named_tuple(block, hidden, run):
    return run(lambda pair: block(pair.hidden) * pair.scale, Pair(hidden, 0.5))


def bound(block, hidden, run):
    return run(functools.partial(block, hidden=hidden))


def transposed(block, hidden, run):
    return run(lambda h: block(h.t()), hidden.t())


def expanded(block, hidden, run):
    row = hidden.mean(0, keepdim=True).expand(TOKENS, WIDTH)
    return run(lambda h, r: block(h) + r, hidden, row)


def sliced(block, hidden, run):
    return run(lambda h: block(h[:, :WIDTH]), torch.cat([hidden, hidden], -1)[:, :WIDTH])


FORMS = [positional, keyword, nested, in_dataclass, in_named_tuple, bound, transposed, expanded, sliced]


def step(device, form, run, *, dtype=None, frozen=False):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(LAYERS)).to(device)
    hidden = torch.randn(TOKENS, WIDTH).to(device).requires_grad_(not frozen)
    torch.manual_seed(1)
    with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        x = hidden if frozen else hidden * 1
        for block in blocks:
            x = form(block, x, run)
        loss = x.float().square().mean()
    loss.backward()
    return [loss.detach().cpu(), *(t.grad.cpu() for t in [hidden, *blocks.parameters()] if t.grad is not None)]


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def assert_same(ours, expected):
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_recompute_is_bit_identical(sim, device, form):
    assert_same(step(device, form, lowtide.checkpoint), step(device, form, plain))


@pytest.mark.parametrize("form", FORMS)
def test_offload_is_bit_identical_and_really_moves_the_inputs(sim, form):
    """Keyword, nested and bound inputs are a silent no-op elsewhere (DeepSpeed#522, composer#2724)."""
    run = functools.partial(lowtide.checkpoint, offload=Schedule(HostStore()))
    expected = step(sim, form, plain)
    simdevice.reset()
    assert_same(step(sim, form, run), expected)
    stats = simdevice.stats()
    assert stats.d2h_bytes >= (LAYERS - 1) * BOUNDARY
    assert stats.h2d_bytes >= (LAYERS - 1) * BOUNDARY
    assert simdevice.stats().pinned_bytes == 0


@pytest.mark.parametrize("offload", [None, "host"])
@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"frozen": True}], ids=["autocast", "frozen-input"])
def test_autocast_and_inputs_without_gradient(sim, offload, options):
    run = functools.partial(lowtide.checkpoint, offload=Schedule(HostStore()) if offload else None)
    assert_same(step(sim, keyword, run, **options), step(sim, keyword, plain, **options))


def test_use_reentrant_is_answered_with_one_graph():
    """Hooks fire once per parameter, which is what DDP counts; the reentrant engine would also lose a frozen input."""
    block, fired = Block(), []
    for parameter in block.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    x = torch.randn(TOKENS, WIDTH)
    y = lowtide.checkpoint(block, x, use_reentrant=True)
    lowtide.checkpoint(block, y, use_reentrant=True).sum().backward()
    assert len(fired) == len(list(block.parameters()))


class TestWrongUse:
    def test_host_offload_on_the_cpu_is_refused_and_names_the_disk(self, sim):
        x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        with pytest.raises(OffloadError, match="disk tier"):
            lowtide.checkpoint(torch.tanh, x, offload="host")

    @pytest.mark.parametrize("word", ["hosst", "gpu", 3])
    def test_an_unknown_store(self, word):
        with pytest.raises(InvalidValueError, match="offload must be"):
            lowtide.checkpoint(torch.tanh, torch.ones(3, requires_grad=True), offload=word)

    def test_a_negative_limit(self):
        with pytest.raises(InvalidValueError, match="negative"):
            HostStore(limit=-1)

    def test_a_store_cannot_be_pickled(self):
        import pickle

        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(HostStore())

    def test_torchs_own_checks_stay(self):
        with pytest.raises(ValueError, match="determinism_check"):
            lowtide.checkpoint(torch.tanh, torch.ones(3, requires_grad=True), determinism_check="wrong")


class TestTorchsKeywords:
    def test_early_stop(self):
        layers = nn.Sequential(Counted(), Counted())

        def run(x):
            return layers(x) + x.detach()  # nothing after the last product is needed for backward

        lowtide.checkpoint(run, torch.randn(4, WIDTH, requires_grad=True), early_stop=False).sum().backward()
        assert [layer.calls for layer in layers] == [2, 2]

    def test_debug_names_the_operators_of_a_mismatch(self):
        calls = []

        def different(x):
            calls.append(1)
            return x.sin() if len(calls) == 1 else x.sin().cos()

        with pytest.raises(torch.utils.checkpoint.CheckpointError, match="aten"):
            lowtide.checkpoint(
                different, torch.randn(4, 4, requires_grad=True), debug=True, early_stop=False
            ).sum().backward()

    def test_the_determinism_check_sees_another_shape(self):
        calls = []

        def different(x):
            calls.append(1)
            return (x[:2] if len(calls) > 1 else x).exp()

        with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
            lowtide.checkpoint(different, torch.randn(4, 4, requires_grad=True)).sum().backward()
