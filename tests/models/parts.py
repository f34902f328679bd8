"""Token-wise modules of any width, most of them with a state: what the regions of `models.featured` are made of."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Mean(nn.Module):
    """A running mean that is used right after its update; subclasses hold and update it in different ways."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hold(torch.zeros(width))

    def hold(self, zeros):
        self.register_buffer("mean", zeros)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.update(x.detach().flatten(0, -2).mean(0))
        return x * (1 + self.mean) + self.mean


class InPlace(Mean):
    def update(self, now):
        self.mean.mul_(0.9).add_(now, alpha=0.1)


class Replaced(Mean):
    def update(self, now):
        self.mean = 0.9 * self.mean + 0.1 * now


class ThroughData(Mean):
    def update(self, now):
        self.mean.data.mul_(0.9).add_(now, alpha=0.1)


class DataReplaced(Mean):
    def update(self, now):
        self.mean.data = 0.9 * self.mean.data + 0.1 * now


class Frozen(InPlace):
    def hold(self, zeros):
        self.mean = nn.Parameter(zeros, requires_grad=False)


class FrozenData(ThroughData):
    def hold(self, zeros):
        self.mean = nn.Parameter(zeros, requires_grad=False)


class Attribute(InPlace):
    def hold(self, zeros):
        self.mean = zeros

    def _apply(self, function, recurse=True):
        self.mean = function(self.mean)
        return super()._apply(function, recurse)


class AttributeReplaced(Replaced, Attribute):
    pass


class InADict(Attribute):
    def hold(self, zeros):
        self.means = {"mean": zeros}

    @property
    def mean(self):
        return self.means["mean"]

    @mean.setter
    def mean(self, value):
        self.means["mean"] = value


class Counter(nn.Module):
    """A number that a plain attribute holds."""

    def __init__(self, _width: int) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return x * (1 + 0.1 * self.calls)


class CounterWithBuffer(Counter):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x):
        return super().forward(x) * self.scale


class CounterBuffer(nn.Module):
    def __init__(self, _width: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Listed(nn.Module):
    """A list that grows."""

    def __init__(self, _width: int) -> None:
        super().__init__()
        self.seen = []

    def forward(self, x):
        if self.training:
            self.seen.append(round(float(x.detach().mean()), 6))
        return x * (1 + 0.05 * len(self.seen))


class Flags(nn.Module):
    """A mask of features that were seen to be active."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("flags", torch.zeros(width, dtype=torch.bool))

    def forward(self, x):
        out = x * torch.where(self.flags, 1.0, 0.5)
        if self.training:
            self.flags |= x.detach().flatten(0, -2).mean(0) > 0
        return out


class Mask(nn.Module):
    """A mask of more than 8 KiB, of which a recompute keeps no copy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("large", torch.arange(1024 * width).view(-1, width).remainder(3) == 0)

    def forward(self, x):
        return x.masked_fill(self.large[0], 0.5).tanh()


class LargeAttribute(Attribute):
    """A large tensor in an attribute, which nobody changes in forward."""

    def hold(self, zeros):
        self.mean = zeros + torch.linspace(0, 1, 4096)[:, None]

    def forward(self, x):
        return (x * (1 + self.mean[7])).sin()


class Settings(nn.Module):
    """A dictionary of numbers, and a list of tensors, as adapters have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scaling = {"default": 0.5, "other": 2.0}
        self.active = ["default"]
        self.signs = [torch.ones(width)]

    def _apply(self, function, recurse=True):
        self.signs = [function(sign) for sign in self.signs]
        return super()._apply(function, recurse)

    def forward(self, x):
        for name in self.active:
            x = (x * self.scaling[name] * self.signs[0]).sin()
        return x


class Hidden(nn.Module):
    """A layer in a list, which is no registered part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = [nn.Linear(width, width)]

    def _apply(self, function, recurse=True):
        for part in self.parts:
            part._apply(function, recurse)
        return super()._apply(function, recurse)

    def forward(self, x):
        return self.parts[0](x).tanh()


class FirstBatch(nn.Module):
    """Weights that the first batch sets, as Glow's normalisation does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.register_buffer("initialized", torch.zeros((), dtype=torch.uint8))

    def forward(self, x):
        if self.training and self.initialized.item() == 0:
            self.shift.data.copy_(-x.detach().flatten(0, -2).mean(0))
            self.initialized.fill_(1)
        return (x + self.shift).tanh()


class Shrinking(nn.Module):
    """A trained weight that every forward changes before it is used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.9)
        return x * self.scale


class ShrinkingData(Shrinking):
    def forward(self, x):
        if self.training:
            self.scale.data.mul_(0.9)
        return x * self.scale


class Table(nn.Module):
    """A table that is made again for longer inputs, and used by position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.length = width, 0
        self.register_buffer("table", torch.zeros(0, width), persistent=False)

    def forward(self, x):
        if x.shape[-2] > self.length:
            self.length = x.shape[-2]
            rows = torch.arange(self.length, device=x.device, dtype=x.dtype)[:, None]
            self.table = (rows / (1 + torch.arange(self.width, device=x.device))).sin()
        return x * (1 + 0.1 * self.table[: x.shape[-2]])


class Norm(nn.BatchNorm1d):
    def __init__(self, width: int, **settings) -> None:
        super().__init__(width, **settings)

    def forward(self, x):
        return super().forward(x.flatten(0, -2)).view_as(x)


class Aux(nn.Module):
    """A loss of its own, which the program finds in an attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 0.3))
        self.aux = None

    def forward(self, x):
        out = (x * self.weight).tanh()
        self.aux = out.square().mean()
        return out


class HostGenerators(nn.Module):
    """Draws from generators of NumPy and Python that it holds."""

    def __init__(self, _width: int) -> None:
        super().__init__()
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)  # noqa: S311

    def forward(self, x):
        return (x * (0.5 + self.numpy.random() + self.python.random())).tanh()


class OwnGenerator(nn.Module):
    def __init__(self, _width: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def __deepcopy__(self, _memo):
        twin = OwnGenerator(0)
        twin.generator.set_state(self.generator.get_state())
        return twin

    def forward(self, x):
        noise = torch.rand(x.shape[-1:], generator=self.generator).to(x)
        return (x * (0.5 + noise)).tanh()


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * ctx.factor * x**2 * grad, None


def without_gradients(x):
    with torch.no_grad():
        still = x.tanh()
    return x * still


def under_autocast(x):
    weight = torch.eye(x.shape[-1], dtype=torch.float32, device=x.device)
    with torch.autocast(x.device.type, torch.bfloat16):
        return x + F.linear(x.float(), weight).to(x.dtype)


def energy(x):
    with torch.enable_grad():
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(leaf.sin().square().sum(), leaf, create_graph=True)
    return x + slope


def halved_gradient(x):
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 0.5)
    return x.tanh()


FUNCTIONS = {
    "tanh": torch.tanh,
    "python random": lambda x: (x * (1 + random.random())).tanh(),  # noqa: S311
    "numpy random": lambda x: (x * (1 + float(np.random.rand()))).tanh(),  # noqa: NPY002
    "in place on its input": lambda x: x.mul_(0.5).tanh(),
    "in place on a copy": lambda x: (x * 1).mul_(0.5).tanh_(),
    "its input": lambda x: x,
    "a view": lambda x: x.view(-1, x.shape[-1]).view_as(x),
    "detached": lambda x: x + x.detach().sin(),
    "without gradients": without_gradients,
    "autocast inside": under_autocast,
    "own function": lambda x: Cube.apply(x.tanh(), 0.7),
    "gradient inside": energy,
    "tensor hook": halved_gradient,
    "checkpoint inside": lambda x: checkpoint(lambda t: (t.sin() * t).tanh(), x, use_reentrant=False),
    "reentrant inside": lambda x: checkpoint(lambda t: (t.sin() * t).tanh(), x, use_reentrant=True),
    "looks around": lambda x: x - x.mean(-2, keepdim=True),
}

PARTS = {
    "buffer": InPlace,
    "buffer replaced": Replaced,
    "buffer .data": ThroughData,
    "buffer .data replaced": DataReplaced,
    "frozen": Frozen,
    "frozen .data": FrozenData,
    "tensor attribute": Attribute,
    "tensor attribute replaced": AttributeReplaced,
    "tensor in a dict": InADict,
    "counter": Counter,
    "counter beside a buffer": CounterWithBuffer,
    "counter buffer": CounterBuffer,
    "list": Listed,
    "flags": Flags,
    "first batch": FirstBatch,
    "weight shrinks": Shrinking,
    "weight shrinks .data": ShrinkingData,
    "table": Table,
    "batch norm": Norm,
    "batch norm, momentum None": lambda width: Norm(width, momentum=None),
    "batch norm, no statistics": lambda width: Norm(width, track_running_stats=False),
    "layer norm": nn.LayerNorm,
    "dropout": lambda _: nn.Dropout(0.3),
    "auxiliary loss": Aux,
    "own generator": OwnGenerator,
    "generators of the host": HostGenerators,
    "large mask": Mask,
    "large tensor attribute": LargeAttribute,
    "settings": Settings,
    "hidden part": Hidden,
    **{name: lambda _, function=function: Call(function) for name, function in FUNCTIONS.items()},
}
