"""Inside `torch.func`: what torch allows is right, and all else is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import lowtide
from lowtide.errors import TransformError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in forward mode

TILES = "tile(mlp, tokens=4)"


def build(device="cpu") -> nn.Sequential:
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
    return nn.Sequential(*parts).to(device)


def batch(device="cpu") -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 64 * 32).view(4, 64, 32).to(device)


def by_input(model, x):
    return torch.func.grad(lambda x: model(x).square().sum())(x)


def by_weights(model, x):
    def loss(weights):
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    return torch.func.grad(loss)(dict(model.named_parameters()))


def pull_back(model, x):
    return torch.func.vjp(model, x)


def over_the_batch(model, x):
    return torch.vmap(model)(x)


def ensemble(model, x):
    weights = {name: torch.stack([p, p]) for name, p in model.named_parameters()}
    return torch.vmap(lambda weights: torch.func.functional_call(model, weights, (x,)))(weights)


def push_forward(model, x):
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]


def in_forward_mode(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


GRADIENTS = [by_input, by_weights, pull_back]
OTHERS = [over_the_batch, push_forward, in_forward_mode]


@pytest.mark.parametrize("transform", GRADIENTS)
@pytest.mark.parametrize("policy", ["recompute", "offload", "recompute+offload", f"recompute+{TILES}"])
def test_a_gradient_is_refused_by_name(device, policy, transform):
    model = build(device)
    with (
        lowtide.apply(model, policy),
        pytest.raises(TransformError, match=r"region '0' cannot be .* hooks are forbidden.*torch\.autograd\.grad"),
    ):
        transform(model, batch(device))
    transform(model, batch(device))


@pytest.mark.parametrize("run", [lowtide.checkpoint, lambda f, x: lowtide.checkpoint(f, x, offload="host")])
def test_a_checkpoint_is_refused_by_name(device, run):
    def squares(x):
        return x.square().sum()

    with pytest.raises(TransformError, match="squares' cannot be recomputed or offloaded here"):
        torch.func.grad(lambda x: run(squares, x))(batch(device))


def test_an_offload_context_is_refused(device):
    def loss(x):
        with lowtide.offload():
            return x.square().sum()

    with pytest.raises(TransformError, match="hooks are forbidden"):
        torch.func.grad(loss)(batch(device))


def test_hooks_that_somebody_forbids_are_named_as_the_reason():
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(TransformError, match="forbidden"):
        lowtide.checkpoint(torch.sin, batch().requires_grad_())


@pytest.mark.parametrize("transform", OTHERS)
@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_other_transforms_give_what_they_give_without_a_policy(device, policy, transform):
    model, x = build(device), batch(device)
    expected = transform(model, x)
    with lowtide.apply(model, policy):
        assert torch.equal(transform(model, x), expected)


@pytest.mark.parametrize("transform", [over_the_batch, ensemble])
def test_offload_inside_vmap_is_right_in_backward(device, transform):
    model, x = build(device), batch(device)

    def gradients():
        model.zero_grad()
        transform(model, x).square().sum().backward()
        return [p.grad.cpu() for p in model.parameters()]

    expected = gradients()
    with lowtide.apply(model, "offload") as applied:
        assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
        assert sum(region.restored_bytes for region in applied.report().regions) > 0


@pytest.mark.parametrize("transform", [over_the_batch, ensemble, push_forward])
def test_inputs_without_memory_are_not_offloaded(device, transform):
    model = build(device)
    with (
        lowtide.apply(model, "recompute+offload"),
        pytest.raises(TransformError, match=r"region '0' cannot be offloaded inside torch\.func\.vmap"),
    ):
        transform(model, batch(device))
    transform(model, batch(device))


@pytest.mark.parametrize("transform", [over_the_batch, push_forward])
def test_a_backward_after_the_transform_is_refused_by_name(transform):
    model = build()
    lowtide.apply(model, "recompute")
    output = transform(model, batch())
    with pytest.raises(
        TransformError, match=r"region '2' ran inside torch\.func\.vmap or jvp, and backward comes after"
    ):
        output.sum().backward()


def test_gradients_in_batches_are_right():
    """The other way round, vmap is around backward alone: the recompute has real tensors."""
    x = batch().requires_grad_()
    directions = torch.eye(4).reshape(4, 4, 1, 1).expand(4, 4, 64, 32)

    def jacobian(run):
        return torch.autograd.grad(run(torch.sin, x), x, directions, is_grads_batched=True)[0]

    assert torch.equal(jacobian(lowtide.checkpoint), jacobian(lambda function, x: function(x)))


@pytest.mark.parametrize("transform", [*GRADIENTS, *OTHERS])
def test_tiles_are_refused_by_name(transform):
    model = build()
    with lowtide.apply(model, TILES), pytest.raises(TransformError, match=r"^0 cannot run in tiles inside a trans"):
        transform(model, batch())
    tiled = nn.Linear(32, 32)
    tiled.forward = lambda x, forward=tiled.forward: lowtide.tile(forward, x, tokens=4)
    with pytest.raises(TransformError, match=r"^Linear\.forward cannot run in tiles"):
        transform(tiled, batch())


def test_tiles_without_gradients_are_right():
    model = build()
    with torch.no_grad():
        expected = torch.vmap(model[0])(batch())
        assert torch.equal(torch.vmap(lambda x: lowtide.tile(model[0], x, tokens=4))(batch()), expected)


def test_the_tiled_loss_is_refused_by_name():
    weight, labels = torch.randn(16, 32), torch.zeros(4, 64, dtype=torch.int64)
    with pytest.raises(TransformError, match=r"^linear_cross_entropy cannot run in tiles"):
        torch.func.grad(lambda x: lowtide.linear_cross_entropy(x, weight, labels))(batch())
