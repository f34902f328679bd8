"""Random graphs (operators, views, in-place, sharing, nesting) give plain autograd's gradients, or its refusal."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lowtide
from lowtide import simdevice
from lowtide.checkpointing import Schedule
from lowtide.stores import HostStore
from support import eventually
from support.devices import DEVICE

SIZE = 40  # 6400 bytes: worth moving

UNARY = {
    "tanh": torch.tanh,
    "transpose": lambda x: x.t(),
    "exp of sine": lambda x: x.sin().exp(),
    "square": lambda x: x * x,
    "flip": lambda x: x.flip(0),
    "row view": lambda x: x[:1].expand(SIZE, SIZE),
    "in-place inside": lambda x: (x * 1).mul_(0.5),
    "normalise": lambda x: torch.nn.functional.layer_norm(x, (SIZE,)),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.2),
}
BINARY = {"add": lambda a, b: a + b, "product": lambda a, b: a @ b / SIZE, "mix": lambda a, b: a * b.sigmoid()}

places = st.integers(0, 100)
steps = st.one_of(
    st.tuples(st.just("unary"), st.sampled_from(sorted(UNARY)), places, places),
    st.tuples(st.just("binary"), st.sampled_from(sorted(BINARY)), places, places),
    st.tuples(st.just("nested"), st.sampled_from(sorted(UNARY)), places, places),
    st.tuples(st.just("in-place outside"), st.just(""), places, places),
)


def region(run, kind, name, values, first, second):
    a, b = values[first % len(values)], values[second % len(values)]
    if kind == "unary":
        return run(lambda *, inputs: UNARY[name](inputs["x"]), inputs={"x": a})
    if kind == "binary":
        return run(BINARY[name], a, b=b)
    return run(lambda x: run(UNARY[name], run(torch.tanh, x)) + x, a)


def program(run, operations):
    """The gradient, or the words of autograd's refusal."""
    torch.manual_seed(0)
    x = torch.randn(SIZE, SIZE).to(DEVICE).requires_grad_()
    torch.manual_seed(1)
    values = [x * 1]
    try:
        for kind, name, first, second in operations:
            if kind == "in-place outside":
                values[first % len(values)].mul_(0.5)
            else:
                values.append(region(run, kind, name, values, first, second))
        values[-1].sum().backward()
    except RuntimeError as error:
        if not any(words in str(error) for words in ("inplace", "in-place", "single memory location")):
            raise
        return "refused"
    return x.grad.cpu()


def checkpointed(offload):
    return lambda function, *args, **kwargs: lowtide.checkpoint(function, *args, offload=offload, **kwargs)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(steps, min_size=1, max_size=7))
def test_any_graph(sim, operations):
    store = HostStore()
    plain = program(lambda function, *args, **kwargs: function(*args, **kwargs), operations)
    recomputed = program(checkpointed(None), operations)
    offloaded = program(checkpointed(Schedule(store)), operations)

    # Which in-place changes are refused depends on what is saved: a checkpoint saves its inputs and not its results.
    if not isinstance(plain, str) and not isinstance(recomputed, str):
        assert torch.equal(recomputed, plain)
    # With the inputs in a store, nothing may be let through that autograd's own check refuses.
    assert isinstance(offloaded, str) == isinstance(recomputed, str)
    if not isinstance(offloaded, str):
        assert torch.equal(offloaded, recomputed)
    assert eventually(lambda: store.bytes_used == 0)
    assert simdevice.violations() == []


WITHIN = {
    **UNARY,
    "product, in place": lambda x: (x @ x / SIZE).mul_(0.5),
    "batched product, in place": lambda x: torch.matmul(x[None], x / SIZE).mul_(0.5)[0],
    "linear, in place": lambda x: torch.nn.functional.linear(x[None], x / SIZE).add_(x)[0],
    "linear with bias, in place": lambda x: torch.nn.functional.linear(x[None], x / SIZE, x[0]).add_(x)[0],
    "add in place": lambda x: (x * 2).add_(x),
}
KEPT = ["matmul", "aten.tanh", "aten.native_layer_norm", "aten.exp", "aten.mul.Tensor", "aten.native_dropout"]

inner_steps = st.one_of(
    st.tuples(st.just("unary"), st.sampled_from(sorted(WITHIN)), places, places),
    st.tuples(st.just("binary"), st.sampled_from(sorted(BINARY)), places, places),
    st.tuples(st.just("without gradients"), st.sampled_from(sorted(UNARY)), places, places),
    st.tuples(st.just("nested"), st.sampled_from(sorted(UNARY)), places, places),
)


def within(x, operations):
    """What one region does."""
    values = [x]
    for kind, name, first, second in operations:
        a, b = values[first % len(values)], values[second % len(values)]
        if kind == "unary":
            values.append(WITHIN[name](a))
        elif kind == "binary":
            values.append(BINARY[name](a, b))
        elif kind == "nested":
            values.append(lowtide.checkpoint(UNARY[name], a))
        else:
            with torch.no_grad():
                values.append(UNARY[name](a))
    return values[-1] + x


def three_steps(run, operations):
    """The gradients of three steps with two regions each: the first one is looked at closely, the others are not."""
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(SIZE, SIZE).to(DEVICE).requires_grad_()
        run(within, run(within, x.tanh(), operations), operations).sum().backward()
        found.append(x.grad.cpu())
    return found


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    operations=st.lists(inner_steps, min_size=1, max_size=6),
    keep=st.sets(st.sampled_from(KEPT), min_size=1, max_size=3),
    offload=st.booleans(),
)
def test_any_operators_are_kept(sim, operations, keep, offload):
    store = HostStore()
    schedule = Schedule(store) if offload else None
    plain = three_steps(lambda function, *args: function(*args), operations)

    def kept(function, *args):
        return lowtide.checkpoint(function, *args, keep=sorted(keep), offload=schedule)

    ours = three_steps(kept, operations)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))
    assert eventually(lambda: store.bytes_used == 0)
    assert simdevice.violations() == []
