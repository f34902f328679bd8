"""What a program changes between forward and backward beside weights: a recompute finds what forward found.

The other half of `test_forward_state`: parts, masks, tensors and containers in attributes, hooks, closures, arguments.
Each case runs through `lowtide.apply`, `lowtide.checkpoint` and tiles.
"""

from __future__ import annotations

import functools
import gc
import random
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import lowtide
from lowtide.buffers import PACKED_BYTES, SMALL_BYTES
from lowtide.errors import InPlaceError

WIDTH, TOKENS = 8, 10


class Mlp(nn.Module):
    """An MLP that a policy finds and may cut into tiles; `use` says what else it computes with."""

    def __init__(self, use: str = "") -> None:
        super().__init__()
        self.use = use
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((2 * WIDTH,), 1.5))
        self.register_buffer("mask", torch.arange(2 * WIDTH * SMALL_BYTES).view(-1, 2 * WIDTH).remainder(3) == 0)
        self.register_buffer("table", torch.arange(PACKED_BYTES // 8).remainder(5))
        self.factors = [2.0]
        self.options = {"factor": torch.full((2 * WIDTH,), 2.0), "tables": [torch.full((SMALL_BYTES,), 2.0)]}
        self.bias = torch.full((2 * WIDTH,), 0.5)
        self.large = torch.full((SMALL_BYTES, 2 * WIDTH), 0.5)
        self.function = torch.tanh
        self.extra = [nn.Linear(2 * WIDTH, 2 * WIDTH)]

    def forward(self, x):
        h = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        match self.use:
            case "scale":
                h = h * self.scale
            case "mask":
                h = h.masked_fill(self.mask[0], 0.0)
            case "table":
                h = h * self.table[: 2 * WIDTH]
            case "factors":
                h = h * sum(self.factors)
            case "options":
                h = h * self.options["factor"] * self.options["tables"][0][: 2 * WIDTH]
            case "bias":
                h = (h + self.bias).sin()
            case "large":
                h = (h + self.large[0]).sin()
            case "function":
                h = self.function(h)
            case "extra":
                h = self.extra[0](h).tanh()
        return self.down_proj(h)


class Layer(nn.Module):
    def __init__(self, use: str = "") -> None:
        super().__init__()
        self.mlp = Mlp(use)

    def forward(self, x):
        return x + self.mlp(x).sin()


class Net(nn.Module):
    def __init__(self, use: str = "", call=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(use) for _ in range(2))
        self.call = call

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.call is None else self.call(layer, x)
        return x


WAYS = {
    "plain": (None, None),
    "recompute": ("recompute", None),
    "tile(mlp)": ("tile(mlp, tokens=4)", None),
    "both": ("recompute+tile(mlp, tokens=4)", None),
    "checkpoint": (None, lowtide.checkpoint),
    "tile": (None, lambda layer, x: lowtide.tile(layer, x, tokens=4)),
}
every_way = pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])


def gradients(way: str, use: str, change) -> list[torch.Tensor]:
    """Return the gradients of a second step, in which `change(mlp)` happens to all MLPs before backward."""
    policy, call = WAYS[way]
    net = Net(use, call).double().train()
    for layer in net.layers:  # tensors that `double` does not know
        for name in ("bias", "large"):
            setattr(layer.mlp, name, getattr(layer.mlp, name).double())
    net.layers[0].mlp.extra[0].double()
    net.layers[1].mlp.extra[0].double()
    weights = [*net.parameters(), *(p for layer in net.layers for p in layer.mlp.extra[0].parameters())]
    if policy is not None:
        lowtide.apply(net, policy)
    x = torch.linspace(-1, 1, TOKENS * WIDTH, dtype=torch.double).view(1, TOKENS, WIDTH)
    net(x).square().sum().backward()
    loss = net(x).square().sum()
    with torch.no_grad():
        for layer in net.layers:
            change(layer.mlp)
    loss.backward()
    return [weight.grad for weight in weights]


def assert_as_in_forward(way: str, use: str, change) -> None:
    expected, ours = gradients("plain", use, lambda _mlp: None), gradients(way, use, change)
    for one, two in zip(ours, expected, strict=True):
        assert (one is None) is (two is None)
        assert one is None or (one - two).abs().max() < 1e-10


def replace(name: str):
    """Put another tensor in an attribute or a buffer."""
    return lambda mlp: setattr(mlp, name, getattr(mlp, name).roll(1) if name == "table" else ~mlp.mask)


PUT_BACK = {
    "small buffer in place": ("scale", lambda mlp: mlp.scale.mul_(3)),
    "small buffer through .data": ("scale", lambda mlp: mlp.scale.data.mul_(3)),
    "small buffer replaced": ("scale", lambda mlp: setattr(mlp, "scale", mlp.scale * 3)),
    "large mask replaced": ("mask", replace("mask")),
    "packed integers replaced": ("table", replace("table")),
    "list replaced": ("factors", lambda mlp: setattr(mlp, "factors", [3.0])),
    "list changed": ("factors", lambda mlp: mlp.factors.append(3.0)),
    "tensor in a dictionary": ("options", lambda mlp: mlp.options.update(factor=torch.ones(2 * WIDTH))),
    "tensor in a dictionary in place": ("options", lambda mlp: mlp.options["factor"].mul_(3)),
    "list in a dictionary": ("options", lambda mlp: mlp.options["tables"].insert(0, torch.ones(SMALL_BYTES))),
    "tensor replaced": ("bias", lambda mlp: setattr(mlp, "bias", mlp.bias * 3)),
    "tensor in place": ("bias", lambda mlp: mlp.bias.mul_(3)),
    "tensor deleted": ("bias", lambda mlp: delattr(mlp, "bias")),
    "large tensor replaced": ("large", lambda mlp: setattr(mlp, "large", mlp.large * 3)),
    "function replaced": ("function", lambda mlp: setattr(mlp, "function", torch.cos)),
    "part replaced": ("", lambda mlp: setattr(mlp, "up_proj", nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.double))),
    "part removed": ("", lambda mlp: delattr(mlp, "up_proj")),
    "parts swapped": ("", lambda mlp: mlp._modules.update(up_proj=mlp.gate_proj, gate_proj=mlp.up_proj)),
    "part's forward": ("", lambda mlp: setattr(mlp.up_proj, "forward", torch.zeros_like)),
    "hidden part replaced": ("extra", lambda mlp: mlp.extra.insert(0, nn.Identity())),
}


@every_way
@pytest.mark.parametrize("case", PUT_BACK)
def test_what_is_replaced_is_found_as_it_was(way, case):
    assert_as_in_forward(way, *PUT_BACK[case])


def assert_refused(way: str, use: str, change, match: str) -> None:
    with pytest.raises(InPlaceError, match=match):
        gradients(way, use, change)


REFUSED = {
    "large mask": ("mask", lambda mlp: mlp.mask.logical_not_(), "the buffer 'mask' of shape .* inplace operation"),
    "packed integers": ("table", lambda mlp: mlp.table.add_(1), "the buffer 'table' of shape .* inplace operation"),
    "large tensor": ("large", lambda mlp: mlp.large.mul_(3), "the tensor 'large' of shape .* inplace operation"),
    "large tensor in a list": (
        "options",
        lambda mlp: mlp.options["tables"][0].mul_(3),
        "the tensor 'options' of shape .* inplace operation",
    ),
    "weight of a hidden part": ("extra", lambda mlp: mlp.extra[0].weight.mul_(3), "the weight 'weight' of shape"),
}


@every_way
@pytest.mark.parametrize("case", REFUSED)
def test_large_contents_that_change_are_refused(way, case):
    assert_refused(way, *REFUSED[case])


@every_way
@pytest.mark.parametrize("name", ["mask", "table", "large"])
def test_large_contents_may_change_if_nobody_uses_them(way, name, monkeypatch):
    monkeypatch.setattr("torch._dynamo.convert_frame.FRAME_COUNTER", 0)  # as if no test before had compiled anything
    assert_as_in_forward(way, "scale", lambda mlp: getattr(mlp, name).fill_(0))


def test_what_was_changed_stays_changed():
    net = Net("bias", lowtide.checkpoint)
    loss, mlp = net(torch.ones(1, TOKENS, WIDTH)).sum(), net.layers[0].mlp
    other, bias, function = nn.Linear(WIDTH, 2 * WIDTH), torch.zeros(2 * WIDTH), torch.zeros_like
    mlp.up_proj, mlp.bias, mlp.added = other, bias, [1]
    mlp.gate_proj.forward = function
    mlp.factors.append(3.0)
    mlp.scale.mul_(2)
    loss.backward()
    assert mlp.scale.eq(3).all()
    assert mlp.up_proj is other
    assert mlp.bias is bias
    assert mlp.gate_proj.forward is function
    assert (mlp.factors, mlp.added) == ([2.0, 3.0], [1])


@every_way
@pytest.mark.parametrize("change", [None, torch.zeros_like])
def test_a_forward_that_a_part_had_during_forward_only(way, change):
    def run(way, change):
        policy, call = WAYS[way]
        net = Net(call=call)
        if policy is not None:
            lowtide.apply(net, policy)
        parts = [layer.mlp.up_proj for layer in net.layers]
        for part in parts:
            part.forward = lambda t, part=part: nn.functional.linear(t, part.weight) * 2
        loss = net(torch.linspace(-1, 1, TOKENS * WIDTH).view(1, TOKENS, WIDTH)).square().sum()
        for part in parts:
            if change is None:
                del part.forward
            else:
                part.forward = change
        gc.collect()
        loss.backward()
        assert all(vars(part).get("forward") is change for part in parts)
        return [weight.grad for weight in net.parameters() if weight.grad is not None]

    expected = run("plain", change)
    assert all(
        torch.allclose(one, two, rtol=1e-4, atol=1e-6) for one, two in zip(run(way, change), expected, strict=True)
    )


@every_way
def test_a_mask_for_each_micro_batch(way):
    """Set from outside before each forward; backward comes for all of them at once."""
    policy, call = WAYS[way]

    def run(policy, call):
        net = Net("bias", call)
        if policy is not None:
            lowtide.apply(net, policy)
        base = nn.Parameter(torch.ones(2 * WIDTH))
        losses = []
        for factor in (1.0, 2.0):
            for layer in net.layers:
                layer.mlp.bias = base * factor  # with a graph, as a hypernetwork makes them
            losses.append(net(torch.ones(1, TOKENS, WIDTH)).square().sum())
        sum(losses).backward()
        return [base.grad, *(weight.grad for weight in net.parameters())]

    for one, two in zip(run(policy, call), run(None, None), strict=True):
        assert torch.allclose(one, two, atol=1e-6)


def test_generators_in_attributes_go_on_from_where_they_were():
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.numpy, self.python = np.random.default_rng(0), random.Random(0)  # noqa: S311
            self.torch = [torch.Generator().manual_seed(0)]

        def forward(self, x):
            drawn = self.numpy.random() + self.python.random() + float(torch.rand((), generator=self.torch[0]))
            return (self.linear(x) * drawn).sin()

    def run(call):
        torch.manual_seed(0)
        module = Draws()
        for _ in range(3):
            call(module, torch.ones(TOKENS, WIDTH)).sum().backward()
        return [module.linear.weight.grad, torch.tensor([module.numpy.random(), module.python.random()])]

    for call in (lowtide.checkpoint, lambda module, x: lowtide.tile(module, x, tokens=TOKENS - 1)):
        ours = run(call)
        assert ours[0].isfinite().all()
        if call is lowtide.checkpoint:
            assert all(torch.equal(one, two) for one, two in zip(ours, run(lambda m, x: m(x)), strict=True))


# --- Hooks ----------------------------------------------------------------------------------------------------------


def closure(factor):
    return lambda _module, _args, out: out * factor[0]


def scaled(_module, _args, out, factor):
    return out * factor


class Scaling:
    def __call__(self, _module, _args, out):
        return out * 2


HOOKS = {"closure": lambda: closure([2.0]), "partial": lambda: functools.partial(scaled, factor=2.0)}


def hooked(way: str, make_hook, *, removes: bool) -> list[torch.Tensor]:
    policy, call = WAYS[way]
    net = Net(call=call)
    if policy is not None:
        lowtide.apply(net, policy)
    handles = [layer.mlp.up_proj.register_forward_hook(make_hook()) for layer in net.layers]
    loss = net(torch.linspace(-1, 1, TOKENS * WIDTH).view(1, TOKENS, WIDTH)).square().sum()
    if removes:
        for handle in handles:
            handle.remove()
    gc.collect()
    loss.backward()
    return [weight.grad for weight in net.parameters()]


@every_way
@pytest.mark.parametrize("kind", HOOKS)
def test_a_removed_hook_acts_as_in_forward(way, kind):
    expected = hooked("plain", HOOKS[kind], removes=True)
    ours = hooked(way, HOOKS[kind], removes=True)
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(ours, expected, strict=True))


@every_way
def test_a_removed_hook_whose_object_is_gone_is_refused(way):
    with pytest.raises(InPlaceError, match="a forward hook of one of its parts was removed between forward and back"):
        hooked(way, Scaling, removes=True)


@every_way
def test_a_removed_hook_of_all_modules_acts_as_in_forward(way):
    def run(way):
        policy, call = WAYS[way]
        net = Net(call=call)
        if policy is not None:
            lowtide.apply(net, policy)
        double = lambda module, _args, out: out * 2 if isinstance(module, nn.Linear) else None  # noqa: E731
        handle = nn.modules.module.register_module_forward_hook(double)
        loss = net(torch.linspace(-1, 1, TOKENS * WIDTH).view(1, TOKENS, WIDTH)).square().sum()
        handle.remove()
        loss.backward()
        return [weight.grad for weight in net.parameters()]

    ours, expected = run(way), run("plain")
    assert all(torch.allclose(one, two, rtol=1e-4, atol=1e-6) for one, two in zip(ours, expected, strict=True))


def test_a_removed_hook_that_keeps_outputs_keeps_no_graph_alive():
    features = []
    layer = Layer()
    handle = layer.mlp.up_proj.register_forward_hook(lambda _module, _args, out: features.append(out))
    out = lowtide.checkpoint(layer, torch.ones(1, TOKENS, WIDTH))
    handle.remove()
    node = weakref.ref(features[0])
    del out, handle
    features.clear()
    gc.collect()
    assert node() is None


# --- Functions ------------------------------------------------------------------------------------------------------


class Bag:
    """A plain object with a module, a tensor and a number."""

    def __init__(self, module, scale) -> None:
        self.module, self.scale = module, scale

    def run(self, x):
        return self.module(x).sin() * self.scale


def with_default(module, scale):
    def run(x, *, module=module, scale=scale):
        return module(x).sin() * scale

    return run


def in_closure(module, scale):
    def inner(x):
        return module(x).sin() * scale

    return lambda x: inner(x) + 0


FUNCTIONS = {
    "closure": in_closure,
    "default": with_default,
    "bound method": lambda module, scale: Bag(module, scale).run,
    "partial": lambda module, scale: functools.partial(lambda m, s, x: m(x).sin() * s, module, scale),
    "list in a closure": lambda module, scale: lambda x, parts=[module]: parts[0](x).sin() * scale,
}
CALLS = {"checkpoint": lowtide.checkpoint, "tile": lambda function, x: lowtide.tile(function, x, tokens=4)}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def sample() -> torch.Tensor:
    return torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH).requires_grad_()


@every_call
@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("changed", ["weight", "tensor"])
def test_a_tensor_that_a_function_reaches_and_that_changes_is_refused(call, kind, changed):
    module, scale = linear(), torch.ones(WIDTH, requires_grad=True)
    loss = call(FUNCTIONS[kind](module, scale), sample()).sum()
    with torch.no_grad():
        (module.weight if changed == "weight" else scale).mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_call
def test_a_closure_in_a_loop_finds_the_layer_of_its_turn(call):
    def run(call):
        torch.manual_seed(0)
        layers, x = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), sample()
        for number, layer in enumerate(layers):
            x = call(lambda t: (layer(t) * (number + 1)).sin(), x)  # noqa: B023
        x.square().sum().backward()
        return [weight.grad for weight in layers.parameters()]

    expected = run(lambda function, x: function(x))
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(run(call), expected, strict=True))


@every_call
def test_functional_call_through_a_closure(call):
    def run(call):
        module = linear()

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.module = module

            def forward(self, x):
                return call(lambda t: self.module(t).sin(), x)

        outer = Outer()
        given = {name: (weight.detach() * 2).requires_grad_() for name, weight in outer.named_parameters()}
        functional_call(outer, given, (sample(),)).sum().backward()
        return [weight.grad for weight in given.values()]

    expected = run(lambda function, x: function(x))
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(run(call), expected, strict=True))


def test_a_batch_norm_in_a_closure_is_updated_once():
    norm = nn.BatchNorm1d(WIDTH)
    lowtide.checkpoint(lambda x: norm(x) + 0, sample()).sum().backward()
    assert norm.num_batches_tracked == 1


GLOBAL = {"factor": 2.0}


@every_call
def test_globals_that_a_function_reads_itself(call, monkeypatch):
    def function(x):
        return (x * GLOBAL["factor"]).sin()

    def run(call, factor):
        x = sample()
        loss = call(function, x).sum()
        monkeypatch.setitem(GLOBAL, "factor", factor)
        loss.backward()
        assert GLOBAL["factor"] == factor
        monkeypatch.setitem(GLOBAL, "factor", 2.0)
        return x.grad

    assert torch.allclose(run(call, 5.0), run(lambda function, x: function(x), 2.0), atol=1e-6)


def test_what_a_function_changes_in_its_closure_is_left_to_it():
    """Tests and logs count a function's runs there."""
    seen, x = [], sample()
    lowtide.checkpoint(lambda t: (seen.append(len(t)), t.sin())[1], x).sum().backward()
    assert seen == [TOKENS, TOKENS]


def test_torch_functions_that_call_checkpoint():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    with lowtide.patch_torch():
        loss = checkpoint_sequential(net, 2, sample(), use_reentrant=False).sum()
    with torch.no_grad():
        net[0][0].weight.mul_(2)
    with pytest.raises(InPlaceError, match="the weight 'weight'"):
        loss.backward()


def test_custom_forward_as_many_models_write_it():
    module = linear()

    def create_custom_forward(part):
        def custom_forward(*inputs):
            return part(*inputs).sin()

        return custom_forward

    with lowtide.patch_torch():
        loss = checkpoint(create_custom_forward(module), sample(), use_reentrant=False).sum()
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(InPlaceError, match="the weight 'weight'"):
        loss.backward()


# --- Arguments ------------------------------------------------------------------------------------------------------


def draw(x, generator):
    return (x * torch.rand(x.shape[-1:], generator=generator)).sin()


def multiply(x, factors):
    return (x * sum(factors.values() if isinstance(factors, dict) else factors)).sin()


def multiply_by_attribute(x, holder):
    return (x * holder.factor).sin()


ARGUMENTS = {
    "generator": (draw, lambda: torch.Generator().manual_seed(0), lambda generator: generator.manual_seed(5)),
    "list": (multiply, lambda: [2.0], lambda factors: factors.append(3.0)),
    "dictionary": (multiply, lambda: {"a": 2.0}, lambda factors: factors.update(a=3.0)),
    "list in a tuple": (
        lambda x, pair: multiply(x, pair[1]),
        lambda: (1, [2.0]),
        lambda pair: pair[1].append(3.0),
    ),
    "array": (lambda x, a: (x * torch.tensor(a)).sin(), lambda: np.ones(WIDTH, "f"), lambda a: a.fill(3)),
    "object": (
        multiply_by_attribute,
        lambda: types.SimpleNamespace(factor=2.0),
        lambda holder: setattr(holder, "factor", 3.0),
    ),
}
KNOWN_ARGUMENTS = [name for name in ARGUMENTS if name != "object"]


@pytest.mark.parametrize("name", KNOWN_ARGUMENTS)
def test_an_argument_that_changes_is_found_as_it_was(name):
    function, make, change = ARGUMENTS[name]

    def run(call):
        x, argument = sample(), make()
        loss = call(function, x, argument).sum()
        change(argument)
        after = repr(argument)
        loss.backward()
        assert repr(argument) == after
        return x.grad

    assert torch.equal(run(lowtide.checkpoint), run(lambda function, *args: function(*args)))


def test_a_list_that_a_function_fills_is_filled_once():
    found, x = [], sample()

    def collect(x, found):
        found.append(float(x.detach().sum()))
        return x.sin() * len(found)

    lowtide.checkpoint(collect, x, found).sum().backward()
    assert len(found) == 1
    assert torch.equal(x.grad, x.detach().cos())
