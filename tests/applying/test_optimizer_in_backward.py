"""Optimizers that act in backward: they step a weight as soon as its gradient is there, and let go of the gradient.

Plain autograd lets them, because a gradient is complete only when nothing in the graph needs the weight any more. What
runs a region or a tile again in backward must find that, too: it computes with weights that nobody has stepped yet, and
does not mind those that it only holds.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import lowtide
from lowtide import simdevice
from lowtide.errors import InPlaceError
from models import attentive
from models.attentive import everything_in_double  # noqa: F401  (a fixture)
from models.in_backward import InBackward, ids, model
from models.mlps import HIDDEN, Gated, batch, build
from models.tiny import IS_4, transformers
from support import ignore_dropped_caches
from support.foreign_warnings import ignore_warnings_of

pytestmark = [ignore_warnings_of("torch", "transformers"), ignore_dropped_caches]

EXACT = [
    "recompute",
    "recompute(every=2)",
    "recompute(keep=attention)",
    "offload(disk={})",
    "recompute+offload(disk={})",
]
TILED = ["tile(mlp, tokens=10)", "recompute+tile(mlp, tokens=10)", "recompute+offload(disk={})+tile(mlp, tokens=10)"]
ROUNDING = 1e-12
"""Tiles sum the products of a weight's gradient in another order: the most that differs of weights in double."""


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    """Let no other test's compiled code count: with it, nobody can tell what uses a weight."""
    monkeypatch.setattr("torch._dynamo.convert_frame.FRAME_COUNTER", 0)


def trained(policy, kind="adamw", hooks="before", steps=3):
    """Return the weights after some steps, each a forward and a backward of two micro-batches."""
    net = model()
    optimizer = InBackward(net, kind) if hooks == "before" else None
    if policy is not None:
        lowtide.apply(net, policy)
    optimizer = optimizer or InBackward(net, kind)
    for step in range(steps):
        for seed in (step, 10 + step):
            optimizer.fired.clear()
            net(ids(seed)).backward()
            assert optimizer.fired == dict.fromkeys(dict(net.named_parameters()), 1), "once each, with the whole sum"
            assert all(parameter.grad is None for parameter in net.parameters())
    return [parameter.detach() for parameter in net.parameters()]


def furthest(ours, expected):
    return max(float((one - two).norm() / two.norm()) for one, two in zip(ours, expected, strict=True))


@pytest.mark.parametrize("kind", ["adamw", "data", "clipped", "averaged"])
@pytest.mark.parametrize("policy", [*EXACT, *TILED])
def test_the_weights_are_those_of_plain_training(policy, kind, tmp_path):
    """Of a model that calls a layer twice, ties its head, and shares a block, a scale and adapters between layers."""
    distance = furthest(trained(policy.format(tmp_path), kind), trained(None, kind))
    assert distance == 0 if policy in EXACT else distance < ROUNDING


@pytest.mark.parametrize("policy", ["recompute", "recompute+tile(mlp, tokens=10)"])
def test_hooks_that_come_after_the_policy(policy):
    assert furthest(trained(policy, hooks="after"), trained(None)) < ROUNDING


def transformer_trained(policy, attention, kind):
    net, given = attentive.make("llama", attention), attentive.batch("llama", padded=True)
    net.lm_head.weight = net.model.embed_tokens.weight
    optimizer = InBackward(net, kind)
    if policy is not None:
        lowtide.apply(net, policy)
    for _ in range(2):
        optimizer.fired.clear()
        net(**given).loss.backward()
        assert set(optimizer.fired.values()) == {1}
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.skipif(IS_4, reason="transformers 4 hands out no eager attention")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", ["tile(attention, tokens=10)", "recompute+tile(tokens=10, loss_tokens=10)"])
def test_blocks_in_tiles_whose_weights_are_used_in_two_passes(policy, attention, everything_in_double):  # noqa: F811
    """The second pass is through before the first one is run again, and its weights are not stepped until then."""
    kind = "clipped"
    expected = transformer_trained(None, attention, kind)
    assert furthest(transformer_trained(policy, attention, kind), expected) < ROUNDING


def lomo(net):
    """As LOMO does it: a hook on each tensor steps the weights whose gradients are there, the last after backward."""

    def step(gradient=None):
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-0.05)
                    parameter.grad = None
        return gradient

    for parameter in net.parameters():
        parameter.register_hook(step)
    return step


def torchs_own(net):
    """Torch's optimizer that is applied in backward: a hook on what adds up a weight's gradient."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.05})
    return lambda: None


@pytest.mark.parametrize("kind", [lomo, torchs_own])
@pytest.mark.parametrize("policy", [EXACT[0], EXACT[2], EXACT[-1], *TILED[:2]])
def test_hooks_of_other_kinds(policy, kind, tmp_path):
    def trained(policy):
        net = model()
        finish = kind(net)
        if policy is not None:
            lowtide.apply(net, policy.format(tmp_path))
        for seed in range(3):
            net(ids(seed)).backward()
            finish()
        return [parameter.detach() for parameter in net.parameters()]

    distance = furthest(trained(policy), trained(None))
    assert distance == 0 if policy in EXACT else distance < ROUNDING


# --- Two backwards --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "recompute+tile(mlp, tokens=10)", "tile(mlp, tokens=10)"])
def test_a_first_pass_for_the_norm_of_all_gradients(policy):
    """LOMO with clipping: one backward for the norm, and a second one of the same graph that steps."""

    def clipped_steps(policy):
        net, state = model(), {"norm": 0.0, "scale": None}
        if policy is not None:
            lowtide.apply(net, policy)

        def act(parameter):
            if state["scale"] is None:
                state["norm"] += float(parameter.grad.square().sum())
            else:
                parameter.data.add_(parameter.grad, alpha=-0.1 * state["scale"])
            parameter.grad = None

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(act)
        for seed in range(2):
            loss = net(ids(seed))
            state |= {"norm": 0.0, "scale": None}
            loss.backward(retain_graph=True)
            state["scale"] = 1 / max(1.0, state["norm"] ** 0.5)
            loss.backward()
        return [parameter.detach() for parameter in net.parameters()]

    assert furthest(clipped_steps(policy), clipped_steps(None)) < ROUNDING


@pytest.mark.parametrize("policy", [None, "offload(disk={})", "recompute", "tile(mlp, tokens=10)"])
def test_two_losses_of_one_forward_are_refused_as_plain_autograd_does(policy, tmp_path):
    net = model()
    InBackward(net)
    if policy is not None:
        lowtide.apply(net, policy.format(tmp_path))
    loss = net(ids(0))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    net(ids(1)).backward()


# --- Weights that are held, and used or not -------------------------------------------------------------------------


class Holding(nn.Module):
    """Holds the next layer's weight as well, and may use it without a gradient."""

    def __init__(self, use) -> None:
        super().__init__()
        self.own, self.next = (nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.listed = []
        self.use = use

    def forward(self, x):
        return self.use(self, self.own(x).tanh())


def detached(layer, x):
    return x * layer.next.weight.detach().sum(0)


def by_an_attribute(layer, x):
    return x + nn.functional.linear(x, layer.listed[0])


def only_as_saved(layer, x):
    """The recompute ends as the weight is saved, and never calls the product."""
    return x @ layer.next.weight.detach()


def as_a_number(layer, x):
    return (x * float(layer.next.weight[0, 0].detach())).sin()


def only_its_bias(layer, x):
    return x * layer.next.bias.detach()


def stack(use, policy):
    torch.manual_seed(0)
    layers = [Holding(use), Holding(lambda _layer, x: x)]
    layers[0].next.weight = layers[1].own.weight
    layers[0].listed.append(layers[1].own.weight.detach())
    net = nn.Sequential(*layers)
    optimizer = InBackward(net, "clipped")
    if policy:
        lowtide.apply(net, policy)
    return net, optimizer


def stepped_for(use, policy):
    return stepped(stack(use, policy)[0])


def stepped(net):
    torch.manual_seed(1)
    net(torch.randn(4, HIDDEN)).square().sum().backward()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("use", [lambda _layer, x: x, only_its_bias], ids=["nothing", "only_its_bias"])
def test_a_weight_that_a_region_holds_and_does_not_use_may_be_stepped(use):
    """Its gradient is complete when the layer that uses it is through, and the one that holds it runs again later."""
    assert furthest(stepped_for(use, "recompute"), stepped_for(use, None)) == 0


def test_a_small_tensor_in_an_attribute_is_found_as_forward_found_it_although_its_memory_is_stepped():
    net, _ = stack(by_an_attribute, None)
    net[0].listed[0] = net[0].listed[0].clone()  # memory that no optimizer steps
    assert furthest(stepped_for(by_an_attribute, "recompute"), stepped(net)) == 0


@pytest.mark.parametrize("use", [detached, only_as_saved, as_a_number])
def test_a_stepped_weight_that_a_region_uses_is_refused(use):
    with pytest.raises(InPlaceError, match=r"region '0': the weight 'weight' of shape .* modified by an inplace"):
        stepped_for(use, "recompute")


def test_a_program_that_compiles_is_refused_whatever_it_uses(monkeypatch):
    """What compiled code uses cannot be seen."""
    monkeypatch.setattr("torch._dynamo.convert_frame.FRAME_COUNTER", 1)
    with pytest.raises(InPlaceError, match="whether it is used cannot be seen, because this program compiles code"):
        stepped_for(lambda _layer, x: x, "recompute")


def test_a_region_that_calls_a_compiled_function_is_refused_although_no_module_is_compiled(monkeypatch):
    """What looks for uses lets such a function run uncompiled, and other tensors would be saved than in forward."""
    monkeypatch.undo()
    compiled = torch.compile(lambda x: x.sin().cos().tanh().exp(), backend="aot_eager")
    with pytest.raises(InPlaceError, match="because this program compiles code"):
        stepped_for(lambda _layer, x: compiled(x), "recompute")


class Rarely(Gated):
    """Corrects tokens that are large, and not every tile has one."""

    def __init__(self) -> None:
        super().__init__()
        self.correction = nn.Linear(HIDDEN, HIDDEN, dtype=torch.double)

    def forward(self, x):
        large = x[..., :1] > 2
        y = super().forward(x)
        return torch.where(large, y + self.correction(x), y) if large.any() else y


def test_a_weight_that_only_some_tiles_use():
    """It is stepped when those are through, while others have yet to run again."""

    def weights(run):
        mlp = build(Rarely)
        optimizer = InBackward(mlp, "clipped")
        x = batch(1, 40).detach().clamp(-1, 1)
        x[0, 25, 0] = 3
        assert (x[0, :, 0] > 2).nonzero().flatten().tolist() == [25]
        run(mlp, x).square().mean().backward()
        assert set(optimizer.fired.values()) == {1}
        return [parameter.detach() for parameter in mlp.parameters()]

    tiled = weights(lambda mlp, x: lowtide.tile(mlp, x, tokens=10))
    assert furthest(tiled, weights(lambda mlp, x: mlp(x))) < ROUNDING


# --- Memory ---------------------------------------------------------------------------------------------------------


def peak_of(layers, policy, *, in_backward):
    """Return the peak of a step over the weights, in the bytes of one layer's weights; few tokens, so mostly those."""
    width = 48
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
    )
    net = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").train().to("sim")
    if in_backward:
        InBackward(net, "data")
    lowtide.apply(net, policy)
    tokens = torch.randint(0, 16, (1, 4)).to("sim")
    net(input_ids=tokens, labels=tokens).loss.backward()
    net.zero_grad()
    torch.accelerator.synchronize()
    gc.collect()
    simdevice.reset()
    before = simdevice.stats().live_bytes
    net(input_ids=tokens, labels=tokens).loss.backward()
    torch.accelerator.synchronize()
    return (simdevice.stats().peak_bytes - before) / sum(p.nbytes for p in net.model.layers[0].parameters())


@pytest.mark.skipif(IS_4, reason="transformers 4 hands out no eager attention")
@pytest.mark.parametrize(("policy", "most"), [("recompute", 0.7), ("recompute+tile(tokens=2, loss_tokens=2)", 1.8)])
def test_gradients_of_one_layer_at_a_time(sim, policy, most):
    """A recompute holds one weight's gradient beside its activations; tiles hold one layer's sums, and a tile's own."""
    few, many = (peak_of(layers, policy, in_backward=True) for layers in (1, 3))
    assert many < most
    assert many - few < 0.1, "two more layers add their inputs only"
    assert peak_of(3, policy, in_backward=False) > 3, "an optimizer after backward needs the gradients of all layers"
