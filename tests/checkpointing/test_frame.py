"""Plain calls use torch's frame, all others torch's own checkpoint; what a recompute must find is there in both."""

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

import lowtide
from lowtide import _torch


@pytest.fixture
def theirs(monkeypatch):
    """The calls that torch's own checkpoint runs."""
    genuine, calls = _torch._generator, []

    def generator(*args, **kwargs):
        calls.append(args)
        return genuine(*args, **kwargs)

    monkeypatch.setattr(_torch, "_generator", generator)
    return calls


def step(function=torch.sin, **settings):
    x = torch.linspace(0, 1, 64).requires_grad_()
    lowtide.checkpoint(function, x, **settings).square().sum().backward()
    return x.grad


plain_frames = pytest.mark.skipif(
    "respect_saved_tensors_hooks" in _torch.CHECKPOINT_KEYWORDS, reason="from torch 2.14 on, it makes all frames itself"
)


@plain_frames
@pytest.mark.parametrize("settings", [{}, {"preserve_rng_state": False}, {"early_stop": False}], ids=str)
def test_a_plain_call_leaves_out_what_it_does_not_need(theirs, settings):
    step(**settings)
    assert theirs == []


@pytest.mark.parametrize(
    "around", [lambda: torch.device("cpu"), lambda: set_checkpoint_debug_enabled(True)], ids=["device", "debug"]
)
def test_modes_and_switches_are_for_torch(theirs, debugging, around):
    expected = step(torch.cos)
    theirs.clear()
    with around():
        assert step(torch.cos).equal(expected)
    assert len(theirs) == 1


def test_contexts_are_for_torch(theirs):
    assert step(context_fn=lambda: (torch.enable_grad(), torch.enable_grad())).equal(step())
    assert len(theirs) >= 1


def test_tensors_without_a_device_are_for_torch(theirs):
    lowtide.checkpoint(torch.sin, torch.ones(4, device="meta", requires_grad=True)).sum().backward()
    assert len(theirs) == 1


def test_an_unknown_check_is_refused_as_torch_does():
    with pytest.raises(ValueError, match="determinism_check"):
        step(determinism_check="no such check")


@pytest.mark.parametrize("is_outside", [False, True])
def test_random_numbers_are_those_of_forward(is_outside):
    """And the program's own go on as if there were no recompute."""

    def dropped(x):
        return torch.dropout(x, 0.5, train=True) * x

    def run(call):
        torch.manual_seed(0)
        x = torch.ones(64, requires_grad=True)
        y = call(x)
        drawn = torch.rand(8) if is_outside else None
        y.sum().backward()
        return x.grad, drawn, torch.rand(8)

    for ours, plain in zip(run(lambda x: lowtide.checkpoint(dropped, x)), run(dropped), strict=True):
        assert ours is plain or ours.equal(plain)


def test_random_numbers_need_not_be_kept():
    torch.manual_seed(0)
    x = torch.ones(512, requires_grad=True)
    y = lowtide.checkpoint(lambda x: (torch.rand(512) * x).sin(), x, preserve_rng_state=False)
    state = torch.get_rng_state()
    y.sum().backward()
    assert not torch.get_rng_state().equal(state)


@pytest.mark.parametrize("forward", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward", [None, torch.bfloat16])
def test_autocast_is_that_of_forward(forward, backward):
    """Whatever backward finds; and backward's own is left as it is."""

    def run(call):
        torch.manual_seed(0)
        layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
        seen = []

        def region(x):
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return layer(layer(x)).float()

        with torch.autocast("cpu", forward, enabled=forward is not None):
            y = call(region, x)
        with torch.autocast("cpu", backward, enabled=backward is not None):
            y.sum().backward()
            left = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return x.grad, layer.weight.grad, seen, left

    ours, plain = run(lowtide.checkpoint), run(lambda function, x: function(x))
    assert ours[0].equal(plain[0])
    assert ours[1].equal(plain[1])
    assert ours[2] == plain[2] * 2
    assert ours[3] == plain[3]


def test_an_error_of_forward_leaves_no_hooks():
    before = _torch.hooks_module()

    def fails(x):
        raise ValueError(_torch.hooks_module())

    with pytest.raises(ValueError, match=r"torch\.utils\.checkpoint"):
        step(fails)
    assert _torch.hooks_module() == before


def test_the_switch_for_early_stops_is_honoured():
    def ends(x, calls):
        y = x.exp()
        calls.append("end")
        return y

    for is_early, count in ((True, 1), (False, 2)):
        calls = []
        with set_checkpoint_early_stop(is_early):
            y = lowtide.checkpoint(lambda x, calls=calls: ends(x.sin(), calls) * 1, torch.ones(4, requires_grad=True))
        y.sum().backward()
        assert len(calls) == count, is_early
