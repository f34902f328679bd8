"""The trial of a module before its first tile: what a call leaves behind, and reasons that are true."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import lowtide
from lowtide.errors import NotTokenWiseError
from lowtide.tiling.probe import Trial
from lowtide.tiling.tiled_function import TiledFunction
from models.mlps import EXPERTS, HIDDEN, INNER, Gated

TILED = "tile(mlp, tokens=10)"


class Layer(nn.Module):
    def __init__(self, mlp) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(x)


def stack(kind, policy=None):
    torch.manual_seed(0)
    net = nn.Sequential(Layer(kind()), Layer(kind()))
    if policy:
        lowtide.apply(net, policy)
    return net


def x(*lead, seed=1):
    torch.manual_seed(seed)
    return torch.randn(*(lead or (2, 48)), HIDDEN, dtype=torch.double)


def step(net):
    """The output, all gradients, and the buffers afterwards."""
    net.zero_grad()
    out = net(x())
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in net.parameters() if p.grad is not None), *net.buffers()]


def assert_as_untiled(kind, steps=1):
    plain, tiled = stack(kind), stack(kind, TILED)
    for _ in range(steps):
        ours, expected = step(tiled), step(plain)
        assert len(ours) == len(expected)
        for mine, other in zip(ours, expected, strict=True):
            assert (mine - other).double().norm() <= 1e-12 * other.double().norm()


def assert_refused(kind, says, tokens=None):
    net = stack(kind, TILED)
    before = [buffer.clone() for buffer in net.buffers()]
    with pytest.raises(NotTokenWiseError, match=rf"0\.mlp .* cannot be tiled: {says}.*'tile\(mlp\); 0\.mlp: none'"):
        net(x() if tokens is None else tokens)
    assert all(torch.equal(*pair) for pair in zip(net.buffers(), before, strict=True)), "the trial leaves no trace"


# --- Buffers --------------------------------------------------------------------------------------------------------


class Balanced(nn.Module):
    """A mixture of experts that corrects its routing bias in forward, without an auxiliary loss."""

    speed = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.double)
        self.experts = nn.ModuleList(Gated() for _ in range(EXPERTS))
        self.register_buffer("bias", torch.zeros(EXPERTS, dtype=torch.double))

    def forward(self, x):
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            self.correct(mask.detach().flatten(0, -2).sum(0))
        return sum(expert(x) * (scores * mask)[..., i, None] for i, expert in enumerate(self.experts))

    def correct(self, counts):
        self.bias.add_(torch.sign(counts.mean() - counts), alpha=self.speed)


class Slowly(Balanced):
    """The outputs do not show it."""

    speed = 1e-12


class Unseen(Balanced):
    def correct(self, counts):
        self.bias.data.add_(torch.sign(counts.mean() - counts), alpha=self.speed)


class Replacing(Balanced):
    def correct(self, counts):
        self.bias = self.bias + self.speed * torch.sign(counts.mean() - counts)


@pytest.mark.parametrize("kind", [Balanced, Slowly, Unseen, Replacing])
def test_a_routing_bias_that_forward_corrects(kind):
    assert_refused(kind, "it updates its buffer 'bias' in each call")


@pytest.mark.parametrize("kind", [Balanced, Unseen, Replacing])
def test_a_routing_bias_without_a_trial(kind):
    """`lowtide.tile` believes its caller. Its gradient is that of the forward that ran: each tile had another bias."""

    def gradients(run):
        torch.manual_seed(0)
        net, tokens = kind(), x(1, 40).requires_grad_()
        run(net, tokens).square().mean().backward()
        return [tokens.grad, net.bias, *(parameter.grad for parameter in net.parameters())]

    tiled = gradients(lambda net, tokens: lowtide.tile(net, tokens, tokens=10))
    parts = gradients(lambda net, tokens: torch.cat([net(part) for part in tokens.split(10, 1)], 1))
    assert all((one - two).norm() <= 1e-12 * two.norm() for one, two in zip(tiled, parts, strict=True))


class Counting(Gated):
    """Counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Averaging(Gated):
    """Keeps a running mean of what goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(HIDDEN, dtype=torch.double))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.flatten(0, -2).mean(0), 1e-3)
        return super().forward(x)


class Last(Averaging):
    """Keeps the mean of the last call."""

    def forward(self, x):
        self.mean = x.detach().flatten(0, -2).mean(0)
        return Gated.forward(self, x)


@pytest.mark.parametrize(("kind", "name"), [(Counting, "calls"), (Averaging, "mean"), (Last, "mean")])
@pytest.mark.parametrize("tokens", [x(), x(1, 1).expand(2, 48, HIDDEN).contiguous()], ids=["different", "padding"])
def test_a_buffer_that_depends_on_how_the_tokens_are_cut(kind, name, tokens):
    assert_refused(kind, f"it updates its buffer {name!r} in each call", tokens)


class Summing(Averaging):
    """Adds up what goes through: tile by tile, the sum is the same but for rounding."""

    def forward(self, x):
        self.mean += x.detach().flatten(0, -2).sum(0)
        return Gated.forward(self, x)


class Numbering(Counting):
    """Counts tokens."""

    def forward(self, x):
        self.calls += x.shape[:-1].numel()
        return Gated.forward(self, x)


class Growing(Gated):
    """Makes a table longer if there are more tokens than rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1, dtype=torch.double), persistent=False)

    def forward(self, x):
        if len(self.table) < x.shape[-2]:
            self.table = torch.ones(x.shape[-2], dtype=torch.double)
        return super().forward(x) * self.table[: x.shape[-2], None]


@pytest.mark.parametrize("kind", [Summing, Numbering])
def test_a_sum_over_tokens_is_as_untiled(kind):
    assert_as_untiled(kind, steps=2)


def test_a_table_that_grows():
    net = stack(Growing, TILED)
    plain = stack(Growing)
    torch.testing.assert_close(net(x()), plain(x()))


class Tiring(Gated):
    """Has no buffer, and computes less in each call."""

    strength = 1.0

    def forward(self, x):
        self.strength *= 0.9
        return super().forward(x) * self.strength


def test_an_output_that_depends_on_the_calls_before():
    assert_refused(Tiring, "its output depends on the calls before it")


# --- Parametrizations -----------------------------------------------------------------------------------------------


class Spectral(Gated):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.up)


class Weighted(Gated):
    def __init__(self) -> None:
        super().__init__()
        for linear in (self.gate, self.up, self.down):
            parametrizations.weight_norm(linear)


def test_spectral_norm_is_refused_for_its_power_iteration_in_training_only():
    assert_refused(Spectral, r"it updates its buffer 'up\.parametrizations\.weight\.0\._[uv]' in each call")
    assert_as_untiled(lambda: Spectral().eval())


@pytest.mark.parametrize("is_backward_inside", [True, False])
def test_cached_parametrizations(is_backward_inside):
    def gradients(policy):
        torch.manual_seed(0)
        net = nn.Sequential(*(Layer(Weighted()) for _ in range(4)))
        if policy:
            lowtide.apply(net, policy)
        with parametrize.cached():
            loss = net(x()).square().mean()
            if is_backward_inside:
                loss.backward()
        if not is_backward_inside:
            loss.backward()
        return {name: parameter.grad for name, parameter in net.named_parameters()}

    ours, expected = gradients(TILED), gradients(None)
    for name, grad in expected.items():
        assert ours[name] is not None, name
        assert (ours[name] - grad).norm() <= 1e-12 * grad.norm(), name


def test_the_trial_leaves_the_cache_of_parametrizations_alone():
    net = stack(Weighted, TILED)
    with parametrize.cached():
        weight = net[0].mlp.up.weight
        kept = dict(parametrize._cache)
        net(x())
        assert parametrize._cache == kept
        assert net[0].mlp.up.weight is weight


# --- Attributes -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class State:
    codes: torch.Tensor | None = None
    scale: torch.Tensor | None = None


class Quantized(nn.Linear):
    """As bitsandbytes' int8 layers: the first forward moves what quantizing left with the weight to a state."""

    def __init__(self, inputs, outputs) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=torch.double)
        self.weight.requires_grad_(False)
        self.weight.scale = self.weight.detach().abs().amax(-1, keepdim=True) / 127
        self.weight.codes = (self.weight.detach() / self.weight.scale).round()
        self.state = State()

    def forward(self, x):
        if self.weight.codes is not None:
            self.state.codes, self.state.scale = self.weight.codes, self.weight.scale
            self.weight.codes = self.weight.scale = None
        return x @ (self.state.codes * self.state.scale).T


class InInt8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.double)
        self.up, self.down = Quantized(HIDDEN, INNER), Quantized(INNER, HIDDEN)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def test_a_state_that_the_first_call_fills():
    assert_as_untiled(InInt8)


class Auxiliary(Gated):
    def forward(self, x):
        self.loss = x.square().mean()
        return super().forward(x)


class Collecting(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.mean())
        return super().forward(x)


@pytest.mark.parametrize("kind", [Auxiliary, Collecting])
@pytest.mark.parametrize("tokens", [x(), torch.zeros(2, 48, HIDDEN, dtype=torch.double)], ids=["different", "padding"])
def test_a_tensor_of_the_tokens_in_an_attribute(kind, tokens):
    net = stack(kind, TILED)
    with pytest.raises(NotTokenWiseError, match=r"leaves a tensor in its attribute '(loss|seen)'"):
        net(tokens)
    assert not getattr(net[0].mlp, "seen", None), "the trial leaves no trace"
    assert not hasattr(net[0].mlp, "loss")


# --- Quantization-aware training ------------------------------------------------------------------------------------


class FakeQuantized(Gated):
    """Rounds its input by the largest number in it; the gradient passes through."""

    dims: tuple[int, ...] = ()

    def forward(self, x):
        scale = (x.abs().amax(self.dims, keepdim=True) if self.dims else x.abs().amax()) / 127
        return super().forward(x + ((x / scale).round() * scale - x).detach())


class PerToken(FakeQuantized):
    dims = (-1,)


def test_scales_per_token_are_fine_and_one_scale_for_all_is_not():
    assert_as_untiled(PerToken)
    assert_refused(FakeQuantized, "its output for a token depends on the other tokens")


def test_fake_quantization_with_an_observer():
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    class Observed(Gated):
        def __init__(self) -> None:
            super().__init__()
            observer = MovingAverageMinMaxObserver
            self.quantize = FakeQuantize(observer, quant_min=0, quant_max=255)

        def forward(self, x):
            return super().forward(self.quantize(x.float()).double())

    assert_refused(Observed, "its output for a token depends on the other tokens")


class Sum(Gated):
    def forward(self, x):
        return super().forward(x) + x.sum(-2, keepdim=True)


@pytest.mark.parametrize("lead", [(1,), (1, 1)])
def test_a_lone_token_can_be_tried_out(lead):
    """A rank may have one token where others have many, and all try their modules in the same call."""
    one = torch.randn(*lead, HIDDEN, dtype=torch.double)

    def fault_of(module):
        return Trial("mlp", TiledFunction(module.double()), (one,), {}, one.shape[:-1]).run([]).fault

    assert fault_of(Gated()) is None
    assert "depends on" in fault_of(Sum())
