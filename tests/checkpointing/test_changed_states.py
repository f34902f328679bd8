"""Arguments that change after forward, or in it: a recompute sees what forward saw, or it is refused."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide


def leaf() -> torch.Tensor:
    return torch.linspace(1, 2, 8, requires_grad=True)


def test_a_counter_that_the_loop_moves_on_has_the_value_that_forward_saw():
    """Torch's checkpoint reads the new value, without a word."""

    def scaled(x, *, step):
        return x.square().mul(step).sum()

    x, step = leaf(), torch.tensor(3)
    y = lowtide.checkpoint(scaled, x, step=step)
    step += 1
    y.backward()
    assert torch.equal(x.grad, 6 * x.detach())
    assert step == 4


def test_a_region_of_a_policy_reads_the_counter_of_its_forward():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x, state):
            return self.inner(x).tanh() * float(state["steps"][0])

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Scaled() for _ in range(3))
            self.steps = [torch.tensor(1.5)]

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, {"steps": self.steps})
            self.steps[0].add_(1)
            return x

    def gradients(policy):
        torch.manual_seed(0)
        model = Stack()
        lowtide.apply(model, policy)
        model(leaf()).sum().backward()
        return [p.grad for p in model.parameters()], model.steps[0].item()

    (plain, counted), (ours, counted_by_us) = gradients("none"), gradients("recompute")
    assert counted == counted_by_us == 2.5
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_a_state_that_the_region_updates_is_updated_once():
    """A recompute on the state itself would count twice, and read what it should not."""

    def counting(x, states):
        states[0].add_(1)
        return x.square().mul(states[0]).sum()

    x, states = leaf(), [torch.zeros(())]
    y = lowtide.checkpoint(counting, x, states)
    for _ in range(2):
        x.grad = None
        y.backward(retain_graph=True)
        assert torch.equal(x.grad, 2 * x.detach()), "the recompute reads 1, as forward did"
    assert states[0] == 1


def test_a_state_that_becomes_part_of_the_graph():
    def remembering(x, state):
        state.copy_(x.detach().mean())
        return (x * state).sum()

    x, state = leaf(), torch.zeros(())
    lowtide.checkpoint(remembering, x, state).backward()
    assert torch.allclose(x.grad, state.expand(8))


def test_one_tensor_in_two_places_is_one_tensor_in_the_recompute():
    seen = []

    def attend(x, query, key):
        seen.append(query is key)
        return x.exp().sum()

    mask = torch.ones(2)
    lowtide.checkpoint(attend, leaf(), mask, key=mask).backward()
    assert seen == [True, True]


def test_a_state_that_is_also_seen_through_a_view_is_refused():
    """A copy would not change along with the view: the recompute would read something else."""

    def through_a_view(x, state, view):
        state.add_(1)
        return x.square().mul(view[0]).sum()

    x, state = leaf(), torch.zeros(2)
    y = lowtide.checkpoint(through_a_view, x, state, state[:1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_buffer_that_is_also_an_argument_is_refused():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x, steps):
            self.steps += 1
            return x.square().mul(steps).sum()

    module, x = Counting(), leaf()
    y = lowtide.checkpoint(module, x, module.steps)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_large_tensor_that_changes_is_refused():
    x, table = leaf(), torch.ones(2048)
    y = lowtide.checkpoint(lambda x, table: x.square().mul(table[0]).sum(), x, table=table)
    table += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_arguments_may_be_nested_deeper_than_the_stack():
    def deepest(x, value):
        while isinstance(value, list):
            (value,) = value
        return x.square().mul(value).sum()

    x = leaf()
    value = x
    for _ in range(2000):
        value = [value]
    lowtide.checkpoint(deepest, x, value).backward()
    assert torch.allclose(x.grad, 3 * x.detach().square())


def attend(x):
    heads = x.view(2, 4, 8, 8)
    return F.scaled_dot_product_attention(heads, heads, heads).view_as(x)


CHOICES = {
    "one kernel": ([SDPBackend.MATH], False),
    "an order": ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], True),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("settings", [{}, {"context_fn": lambda: (contextlib.nullcontext(), contextlib.nullcontext())}])
def test_attention_takes_the_kernel_that_forward_took(choice, settings):
    """`sdpa_kernel` around the forward alone: torch's checkpoint finds other tensors saved, and raises."""
    backends, is_order = CHOICES[choice]
    seen = []

    def watched(x):
        seen.append((torch.backends.cuda.flash_sdp_enabled(), torch._C._get_sdp_priority_order()[:2]))
        return attend(x)

    x = torch.randn(2, 4, 64, dtype=torch.double, requires_grad=True)
    before = torch._C._get_sdp_priority_order()
    with sdpa_kernel(backends, set_priority=is_order):
        (expected,) = torch.autograd.grad(attend(x).sin().sum(), x)
        y = lowtide.checkpoint(watched, x, **settings)
    y.sin().sum().backward()
    assert torch.equal(x.grad, expected)
    assert seen[0] == seen[1] != (torch.backends.cuda.flash_sdp_enabled(), before[:2])
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch._C._get_sdp_priority_order() == before


def test_attention_in_a_tile_takes_the_kernel_that_forward_took():
    x = torch.randn(7, 64, dtype=torch.double, requires_grad=True)

    def among_heads(rows):
        heads = rows.view(-1, 1, 8, 8)
        return F.scaled_dot_product_attention(heads, heads, heads).view_as(rows)

    with sdpa_kernel(SDPBackend.MATH):
        (expected,) = torch.autograd.grad(among_heads(x).sin().sum(), x)
        y = lowtide.tile(among_heads, x, tokens=3)
    y.sin().sum().backward()
    torch.testing.assert_close(x.grad, expected)
    assert torch.backends.cuda.flash_sdp_enabled()
