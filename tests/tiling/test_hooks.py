"""Hooks inside a tiled module see one tile at a time: those that mix tokens are refused, and no hook sees the trial."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import NotTokenWiseError

TOKENS, TILES = 96, 10
ignore_old_norms = pytest.mark.filterwarnings("ignore:.*(weight_norm|spectral_norm).*deprecated:FutureWarning")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return x + self.mlp(x)


def stack(change=None):
    torch.manual_seed(0)
    net = nn.Sequential(Layer(), Layer()).double()
    for layer in net:
        if change is not None:
            change(layer.mlp)
    return net


def x():
    torch.manual_seed(1)
    return torch.randn(2, TOKENS // 2, 16, dtype=torch.double)


def tiled(net):
    lowtide.apply(net, "tile(mlp, tokens=10)")
    return net


def step(net):
    """The output and all gradients."""
    net.zero_grad()
    out = net(x())
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in net.parameters())]


def assert_as_untiled(change):
    expected = step(stack(change))
    for ours, other in zip(step(tiled(stack(change))), expected, strict=True):
        assert (ours - other).norm() <= 1e-12 * other.norm()


def centred(y):
    return y - y.mean(-2, keepdim=True)


def centre_in_place(_module, _args, y):
    y.sub_(y.mean(-2, keepdim=True))


def centre_unseen(_module, _args, y):
    y.data.sub_(y.data.mean(-2, keepdim=True))


def centre_weight(module, args):
    module.shift = args[0].mean(-2, keepdim=True)


def use_shift(module, _args, y):
    return y - module.shift


MIXING = {
    "returns": lambda mlp: mlp.act.register_forward_hook(lambda _module, _args, y: centred(y)),
    "before": lambda mlp: mlp.act.register_forward_pre_hook(lambda _module, args: centred(args[0])),
    "with keywords": lambda mlp: mlp.act.register_forward_pre_hook(
        lambda _module, args, kwargs: ((centred(args[0]),), kwargs), with_kwargs=True
    ),
    "in place": lambda mlp: mlp.act.register_forward_hook(centre_in_place),
    "through .data": lambda mlp: mlp.act.register_forward_hook(centre_unseen),
    "by an attribute": lambda mlp: (
        mlp.act.register_forward_pre_hook(centre_weight),
        mlp.act.register_forward_hook(use_shift),
    ),
    "a replaced forward": lambda mlp: setattr(mlp.act, "forward", lambda y: centred(nn.functional.gelu(y))),
}


@pytest.mark.parametrize("kind", MIXING)
def test_a_hook_that_looks_at_other_tokens_is_refused(kind):
    net = tiled(stack(MIXING[kind]))
    with pytest.raises(NotTokenWiseError, match=r"0\.mlp \(Mlp\) cannot be tiled: .*other tokens.*rule"):
        net(x())


def test_the_message_names_the_hook():
    net = tiled(stack(lambda mlp: mlp.act.register_forward_hook(centre_in_place)))
    with pytest.raises(NotTokenWiseError, match=r"with its hooks: centre_in_place on 'act'"):
        net(x())


def halve(_module, _args, y):
    y.mul_(0.5)


TOKEN_WISE = {
    "returns": lambda mlp: mlp.act.register_forward_hook(lambda _module, _args, y: y * 0.5),
    "before": lambda mlp: mlp.act.register_forward_pre_hook(lambda _module, args: args[0] * 0.5),
    "in place": lambda mlp: mlp.act.register_forward_hook(halve),
    "looks": lambda mlp: mlp.act.register_forward_hook(lambda *_: None),
    "a replaced forward": lambda mlp: setattr(
        mlp.up, "forward", functools.partial(lambda up, y: type(up).forward(up, y) * 2, mlp.up)
    ),
}


@pytest.mark.parametrize("kind", TOKEN_WISE)
def test_a_hook_that_does_not_is_as_without_tiles(kind):
    assert_as_untiled(TOKEN_WISE[kind])


class Recorder:
    """A hook with a memory, which also changes the output if it is told to."""

    def __init__(self, factor=None) -> None:
        self.seen, self.count, self.factor = [], 0, factor

    def __call__(self, _module, _args, y):
        self.seen.append(len(y.flatten(0, -2)))
        self.count += 1
        return None if self.factor is None else y * self.factor


def recorder_in(kind, factor):
    """A hook of one kind, and the list that it appends to."""
    recorder = Recorder(factor)
    if kind == "an object":
        return recorder, recorder.seen
    if kind == "a method":
        return recorder.__call__, recorder.seen
    if kind == "a partial":

        def append(seen, _module, _args, y):
            seen.append(len(y.flatten(0, -2)))
            return None if factor is None else y * factor

        return functools.partial(append, recorder.seen), recorder.seen

    def closure(module, args, y):
        return recorder(module, args, y)

    return closure, recorder.seen


@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize("kind", ["an object", "a method", "a partial", "a closure"])
def test_no_hook_records_the_trial(kind, factor):
    net = stack()
    hook, seen = recorder_in(kind, factor)
    net[0].mlp.act.register_forward_hook(hook)
    tiled(net)
    out = net(x())
    assert len(seen) == TILES
    assert sum(seen) == TOKENS
    out.sum().backward()
    assert len(seen) == 2 * TILES, "each tile is run again"


@ignore_old_norms
class TestNorms:
    """Hooks of torch's own that compute a weight before each call."""

    def test_weight_norm(self):
        assert_as_untiled(lambda mlp: nn.utils.weight_norm(mlp.up))

    def test_spectral_norm_in_training_is_refused_for_its_power_iteration(self):
        net = tiled(stack(lambda mlp: nn.utils.spectral_norm(mlp.up)))
        before = [buffer.clone() for buffer in net.buffers()]
        with pytest.raises(NotTokenWiseError, match=r"updates its buffer 'up\.weight_u' in each call"):
            net(x())
        assert all(torch.equal(*pair) for pair in zip(net.buffers(), before, strict=True))

    def test_spectral_norm_in_evaluation(self):
        def change(mlp):
            nn.utils.spectral_norm(mlp.up)(torch.ones(1, 16, dtype=torch.double))
            mlp.eval()

        assert_as_untiled(change)


def test_a_hook_that_comes_later_is_tried_out():
    net = tiled(stack())
    net(x())
    handle = net[0].mlp.act.register_forward_hook(lambda _module, _args, y: centred(y))
    with pytest.raises(NotTokenWiseError):
        net(x())
    handle.remove()
    net(x())


def test_hooks_that_are_made_for_each_call_are_tried_out_once(monkeypatch):
    net, runs = tiled(stack()), []
    original = lowtide.tiling.probe.Trial.run
    monkeypatch.setattr(lowtide.tiling.probe.Trial, "run", lambda *given: runs.append(1) or original(*given))
    for _ in range(3):
        handle = net[0].mlp.act.register_forward_hook(lambda _module, _args, y: y * 2)
        net(x())
        handle.remove()
    assert len(runs) == 2, "one for each layer"


def test_a_hook_that_takes_itself_away_stays_away():
    net, calls = stack(), []

    def once(_module, _args, _y):
        calls.append(1)
        handle.remove()

    handle = net[0].mlp.act.register_forward_hook(once)
    tiled(net)(x())
    assert calls == [1]
    assert not net[0].mlp.act._forward_hooks


def count(mlp):
    mlp.calls.add_(1)


def test_a_buffer_is_as_it_was_if_the_module_is_refused_after_its_call():
    def change(mlp):
        mlp.register_buffer("calls", torch.zeros(()))
        mlp.up.register_forward_hook(lambda *_: count(mlp))
        mlp.act.register_forward_hook(lambda _module, _args, y: centred(y))

    net = tiled(stack(change))
    with pytest.raises(NotTokenWiseError):
        net(x())
    assert net[0].mlp.calls == 0


def test_a_hook_does_not_hide_a_buffer_that_only_the_first_call_changes():
    """The trial comes after the call in which the hook is watched, and must begin where that call began."""

    def change(mlp):
        mlp.register_buffer("seen", torch.zeros(1, dtype=torch.bool))
        mlp.up.register_forward_pre_hook(lambda _module, args: mlp.seen.logical_or_(args[0].mean() > 0))
        mlp.act.register_forward_hook(lambda _module, _args, y: 2 * y * torch.where(mlp.seen, 1.0, 0.5))

    net = tiled(stack(change))
    with pytest.raises(NotTokenWiseError):
        net(x())
    assert not net[0].mlp.seen.any()
