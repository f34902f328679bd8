"""`lowtide.tile` gives what the module gives untiled, whatever the module, its inputs and its surroundings."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import InPlaceError, InvalidValueError, NotTokenWiseError
from lowtide.tiling import tiler
from models.mlps import HIDDEN, Dropping, Gated, Lora, Tied, WithArguments, batch, build, routed
from support.devices import DEVICE

TOLERANCE = 1e-12


def tiled(function, tokens=10, **options):
    return lambda x, *args, **kwargs: lowtide.tile(function, x, *args, tokens=tokens, **options, **kwargs)


def in_checkpoint(function):
    return lambda *args, **kwargs: checkpoint(function, *args, use_reentrant=False, **kwargs)


def tensors_in(output):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def results(module, run, x, *args, **kwargs):
    """Outputs and all gradients of one step."""
    leaves = [leaf for leaf in tensors_in((x, args, kwargs)) if leaf.requires_grad]
    for leaf in [*leaves, *module.parameters()]:
        leaf.grad = None
    torch.manual_seed(2)
    outputs = tensors_in(run(x, *args, **kwargs))
    sum((out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view_as(out)).sum() for out in outputs).backward()
    return [*outputs, *(leaf.grad for leaf in [*leaves, *module.parameters()])]


def assert_close(ours, expected, tolerance=TOLERANCE):
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            assert (a - b).norm() <= tolerance * b.norm()


AROUND = {"alone": lambda run: run, "in a checkpoint": in_checkpoint}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("lead", [(37,), (3, 37), (2, 3, 5), (1, 11), (64, 1)], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 10, 1000])
def test_any_shape_and_tile_size(lead, tokens, around):
    mlp, x = build(Gated), batch(*lead)
    assert_close(results(mlp, AROUND[around](tiled(mlp, tokens)), x), results(mlp, mlp, x))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("kind", [Gated, Tied, Lora, routed])
def test_any_module(kind, needs_grad, around):
    mlp, x = build(kind), batch(3, 37, requires_grad=needs_grad)
    assert_close(results(mlp, AROUND[around](tiled(mlp)), x), results(mlp, mlp, x))


@pytest.mark.parametrize("around", AROUND)
def test_biases_and_a_partly_frozen_module(around):
    mlp, x = build(Gated, bias=True), batch(3, 37)
    mlp.gate.requires_grad_(False)
    mlp.down.bias.requires_grad_(False)
    assert_close(results(mlp, AROUND[around](tiled(mlp)), x), results(mlp, mlp, x))


@pytest.mark.parametrize("around", AROUND)
def test_other_arguments_and_nested_outputs(around):
    mlp, x = build(WithArguments), batch(3, 37)
    kwargs = {
        "mask": torch.rand(3, 37, dtype=torch.double) > 0.5,
        "scale": torch.tensor(1.5, dtype=torch.double, requires_grad=True),
        "table": torch.randn(HIDDEN, 5, dtype=torch.double, requires_grad=True),
    }
    residual = batch(3, 37) * 2
    residual = residual.detach().requires_grad_()
    ours = results(mlp, AROUND[around](tiled(mlp)), x, residual, **kwargs)
    assert_close(ours, results(mlp, mlp, x, residual, **kwargs))


def test_a_function_that_is_no_module():
    mlp, x = build(Gated), batch(3, 37)

    def function(x):
        return mlp(x) * 2

    assert_close(results(mlp, tiled(function), x), results(mlp, function, x))


def test_a_view_that_is_not_contiguous():
    mlp, x = build(Gated), batch(5, 9)
    turned = x.detach().transpose(0, 1).requires_grad_()
    assert_close(results(mlp, tiled(mlp, 4), turned), results(mlp, mlp, turned))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_dropout_is_the_same_in_recompute(fresh_device, device, around):
    """Against the tiles run one by one, which draw the same numbers."""
    mlp, x = build(Dropping).to(device), batch(37).detach().to(device).requires_grad_()
    sizes = [10, 9, 9, 9]

    def one_by_one(x):
        return torch.cat([mlp(part) for part in x.split(sizes)])

    def run(function):
        mlp.zero_grad()
        x.grad = None
        torch.manual_seed(2)
        out = function(x)
        out.square().sum().backward()
        return [t.cpu() for t in (out, x.grad, *(p.grad for p in mlp.parameters()))]

    assert_close(run(AROUND[around](tiled(mlp, 10))), run(one_by_one))


def test_the_random_state_goes_on_as_if_nothing_had_been_run_again():
    mlp, x = build(Dropping), batch(37)
    torch.manual_seed(3)
    out = lowtide.tile(mlp, x, tokens=10)
    expected = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("around", AROUND)
def test_autocast(around):
    mlp, x = build(Gated, dtype=torch.float32), batch(3, 37, dtype=torch.float32)

    def cast(run):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return results(mlp, run, x)

    ours, expected = cast(AROUND[around](tiled(mlp))), cast(mlp)
    assert ours[0].dtype is torch.bfloat16
    assert torch.equal(ours[0], expected[0])
    assert_close(ours, expected, 1e-2)


def test_a_backward_under_another_autocast():
    mlp, x = build(Gated, dtype=torch.float32), batch(3, 37, dtype=torch.float32)

    def gradients(run):
        out = run(x).square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autograd.grad(out, [x, *mlp.parameters()])

    assert_close(gradients(tiled(mlp, accumulate="parameter")), gradients(mlp), 1e-2)


def test_without_gradients_nothing_is_saved():
    mlp, x = build(Gated), batch(3, 37)
    calls = []
    mlp.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        out = lowtide.tile(mlp, x, tokens=10)
        expected = mlp(x)
    assert out.grad_fn is None
    assert len(calls) == 12 + 1
    assert_close([out], [expected])


def _bend(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * torch.sigmoid(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_function_that_ends_in_torchscript():
    """Its interpreter makes an error without words of what ends a recompute (ZoeDepth's attention ends so)."""
    linear, bend, x = nn.Linear(8, 8), torch.jit.script(_bend), torch.randn(32, 8, requires_grad=True)
    run = tiled(lambda x: bend(linear(x)), tokens=8)
    expected = results(linear, lambda x: bend(linear(x)), x)
    for one, other in zip(results(linear, run, x), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_graph_that_is_kept_and_run_twice():
    mlp, x = build(Gated), batch(3, 37)
    out = lowtide.tile(mlp, x, tokens=10).square().sum()
    out.backward(retain_graph=True)
    once = [x.grad.clone(), *(p.grad.clone() for p in mlp.parameters())]
    out.backward()
    assert_close([x.grad, *(p.grad for p in mlp.parameters())], [2 * grad for grad in once])


@pytest.mark.parametrize("asked", ["weights", "inputs", "weights of a frozen input"])
def test_the_inputs_are_let_go_whichever_gradients_are_asked_for(asked):
    """Where no gradient of the input is asked for, backward never reaches the node that saved it."""
    gc.collect()
    mlp, x = build(Gated), batch(3, 37, requires_grad=asked != "weights of a frozen input")
    out = lowtide.tile(mlp, x, tokens=10)
    torch.autograd.grad(out.sum(), [x] if asked == "inputs" else list(mlp.parameters()), retain_graph=True)
    unpacked = [held for held in gc.get_objects() if type(held) is tiler._UnpackedInputs]
    assert unpacked
    assert all(held.tiles == [] for held in unpacked)


def test_a_saved_tensor_that_is_looked_at_outside_of_a_backward():
    x = batch(37)
    nodes = [lowtide.tile(torch.exp, x, tokens=10).grad_fn]
    while not any("Exp" in node.name() for node in nodes):
        nodes = [after for node in nodes for after, _ in node.next_functions if after is not None]
    assert torch.equal(nodes[0]._saved_result, x.detach()[:10].exp())


def test_double_backward():
    mlp, x = build(Gated), batch(11)

    def penalty(run):
        (grad,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, *mlp.parameters()])

    assert_close(penalty(tiled(mlp, 3)), penalty(mlp))


def test_a_tile_without_gradient():
    x = batch(37)
    sizes = [10, 9, 9, 9]

    def only_some(x):
        return x.sin() if x.shape[0] == sizes[0] else x.detach()

    lowtide.tile(only_some, x, tokens=10).sum().backward()
    assert torch.equal(x.grad[: sizes[0]], x.detach()[: sizes[0]].cos())
    assert torch.equal(x.grad[sizes[0] :], torch.zeros_like(x.grad[sizes[0] :]))


def test_autograd_grad_leaves_grad_alone():
    mlp, x = build(Gated), batch(3, 37)
    (ours,) = torch.autograd.grad(lowtide.tile(mlp, x, tokens=10).sum(), mlp.up.weight)
    (expected,) = torch.autograd.grad(mlp(x).sum(), mlp.up.weight)
    assert_close([ours], [expected])
    assert all(p.grad is None for p in mlp.parameters())


@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16])
def test_hooks_fire_once_with_the_whole_gradient(dtype):
    mlp, x = build(Gated, dtype=dtype), batch(3, 37, dtype=dtype)
    seen, done = [], []
    mlp.gate.weight.register_hook(lambda grad: seen.append(grad.clone()))
    for parameter in mlp.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: done.append(1))
    lowtide.tile(mlp, x, tokens=10).square().sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], mlp.gate.weight.grad)
    assert len(done) == 3


def test_a_router_loss_keeps_its_gradient():
    moe, x = build(routed), batch(3, 37)
    expected = torch.autograd.grad(moe(x)[1].logsumexp(-1).square().sum(), moe.router.weight)
    assert_close(torch.autograd.grad(tiled(moe)(x)[1].logsumexp(-1).square().sum(), moe.router.weight), expected)


@pytest.mark.parametrize("accumulate", ["auto", "parameter"])
@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16])
def test_gradients_come_in_the_same_order_whatever_experts_the_tiles_use(dtype, accumulate):
    """ZeRO-1 and -2 add up the ranks' gradients in the order in which they come, without a look at whose they are."""
    module, x = build(routed).to(dtype), torch.randn(64, 1, HIDDEN, dtype=dtype)
    chosen = module.router(x).squeeze(1).argmax(-1)
    one_by_one = chosen.argsort()  # the tokens of an expert side by side
    assert chosen.unique().numel() == 4

    def order(x):
        names = []
        handles = [
            p.register_post_accumulate_grad_hook(lambda _, name=name: names.append(name))
            for name, p in module.named_parameters()
        ]
        lowtide.tile(module, x, tokens=5, accumulate=accumulate)[0].sum().backward()
        for handle in handles:
            handle.remove()
        return names

    first = order(x[one_by_one])
    assert sorted(first) == sorted(name for name, _ in module.named_parameters())
    assert order(x[one_by_one.flip(0)]) == first


def test_an_expert_that_no_token_chose_has_no_gradient():
    moe, x = build(routed), batch(3, 37)
    with torch.no_grad():
        moe.router.weight[2] = -100 * x.detach().mean((0, 1)).sign()
        moe.router.weight[2] -= 100 * (moe.router.weight[2] == 0)
    ours, expected = results(moe, tiled(moe), x), results(moe, moe, x)
    assert_close(ours, expected)


class TestRefused:
    @pytest.mark.parametrize("function", [torch.mean, lambda x: x.sum(1), lambda x: (x, x.sum())])
    def test_an_output_without_tokens(self, function):
        with pytest.raises(NotTokenWiseError, match=r": output \d has the shape .*: no dimension that counts"):
            lowtide.tile(function, batch(3, 37), tokens=10)

    def test_different_outputs(self):
        with pytest.raises(NotTokenWiseError, match="cannot be tiled: its tiles return different numbers"):
            lowtide.tile(lambda x: [x + i for i in range(len(x))], batch(37), tokens=10)

    @pytest.mark.parametrize("tokens", [0, -1, "many"])
    def test_tile_sizes(self, tokens):
        with pytest.raises(InvalidValueError):
            lowtide.tile(build(Gated), batch(3, 37), tokens=tokens)

    def test_sums_of_a_functions_weights(self):
        with pytest.raises(InvalidValueError, match="needs a module"):
            lowtide.tile(torch.tanh, batch(37), tokens=10, accumulate="float32")

    def test_unknown_sums(self):
        with pytest.raises(InvalidValueError, match="accumulate must be"):
            lowtide.tile(build(Gated), batch(37), tokens=10, accumulate="bf16")

    def test_no_tensor(self):
        with pytest.raises(InvalidValueError, match="needs a tensor"):
            lowtide.tile(torch.tanh, [1.0])

    def test_a_weight_changed_between_forward_and_backward(self):
        mlp, x = build(Gated), batch(3, 37)
        out = lowtide.tile(mlp, x, tokens=10).sum()
        with torch.no_grad():
            mlp.down.weight.add_(1)
        with pytest.raises(InPlaceError, match=r"the weight .* was modified by an inplace operation"):
            out.backward()

    def test_a_tensor_changed_inside_after_it_was_saved(self):
        def careless(x):
            y = x.exp()
            z = y * 1
            y.add_(1)
            return z + y.sin()

        with pytest.raises(RuntimeError, match="inplace operation"):
            careless(batch(37)).sum().backward()
        with pytest.raises(InPlaceError, match="inplace operation"):
            lowtide.tile(careless, batch(37), tokens=10).sum().backward()

    def test_an_input_changed_between_forward_and_backward(self):
        mlp, x = build(Gated), batch(3, 37) * 1
        out = lowtide.tile(mlp, x, tokens=10).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            out.backward()

    def test_a_function_that_does_something_else_when_run_again(self):
        calls = []

        def moody(x):
            calls.append(1)
            return x.sin() if len(calls) > 4 else x.sin().exp()

        with pytest.raises(lowtide.LowtideError, match="saved 2 tensors in forward and 1"):
            lowtide.tile(moody, batch(37), tokens=10).sum().backward()


def test_an_error_in_a_tile_comes_through_and_leaves_the_module_as_it_was():
    mlp, x = build(Gated, dtype=torch.bfloat16), batch(3, 37, dtype=torch.bfloat16)
    before = dict(mlp.gate._parameters)
    mlp.down.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lowtide.tile(mlp, x, tokens=10)
    assert mlp.gate._parameters["weight"] is before["weight"]
    assert isinstance(mlp.gate.weight, nn.Parameter)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's own look at tensors
def test_inside_torch_compile():
    mlp, x = build(Gated), batch(3, 37)

    @torch.compile(backend="aot_eager")
    def step(x):
        return lowtide.tile(mlp, F.relu(x), tokens=10)

    torch._dynamo.reset()
    assert_close(results(mlp, step, x), results(mlp, lambda x: mlp(F.relu(x)), x))


@pytest.mark.parametrize("policy", ["alone", "in a checkpoint", "in a checkpoint, and more after it"])
def test_a_tile_may_take_a_gradient_of_its_own(policy):
    """Forces, energies: it asks for saved tensors while it still runs, and saves more afterwards."""
    linear = nn.Linear(8, 8, dtype=torch.double)

    def with_force(x):
        y = linear(x).tanh()
        (force,) = torch.autograd.grad(y.sin().sum(), y, create_graph=True)
        return (y + force).square()

    def tiled(x):
        y = lowtide.tile(with_force, x.sin(), tokens=7)
        return y.exp().sin() if policy.endswith("more after it") else y

    def plain(x):
        y = with_force(x.sin())
        return y.exp().sin() if policy.endswith("more after it") else y

    def gradients(run):
        linear.zero_grad()
        x = torch.randn(3, 10, 8, dtype=torch.double, generator=torch.Generator().manual_seed(0)).requires_grad_()
        run(x).sum().backward()
        return [x.grad, linear.weight.grad]

    ours = gradients(tiled if policy == "alone" else lambda x: lowtide.checkpoint(tiled, x))
    for one, other in zip(ours, gradients(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_tiles_of_different_types_are_refused():
    """Otherwise a part of the output would be rounded to the type of the first tile."""
    types = iter([torch.float32, torch.float32, torch.float64])
    with pytest.raises(NotTokenWiseError, match=r"is torch.float64 for tile 2 and torch.float32 for the first one"):
        lowtide.tile(lambda x: x.to(next(types)), torch.randn(9, 8), tokens=3)


def test_a_tile_that_takes_a_gradient_and_changes_its_input_is_refused():
    """It would have to run again on what it has changed, in a checkpoint without anybody's notice."""
    weight = torch.ones(8, requires_grad=True)

    def with_force(x):
        y = (x.mul_(0.5) * weight).tanh()
        (force,) = torch.autograd.grad(y.sum(), weight, create_graph=True)
        return y + force

    with pytest.raises(InPlaceError, match="takes a gradient inside its forward"):
        lowtide.checkpoint(lambda x: lowtide.tile(with_force, x * 1, tokens=7), torch.randn(3, 10, 8))
