"""Small models put together from named features: state, norms, randomness, hooks, parametrizations, mixtures.

A region is an MLP with a residual connection. A feature is a part before the MLP, a part between its two layers (its
name then begins with `mlp: `), something done to its weights, or a hook. A feature of the model is about its regions:
one of them called twice, a layer that two share, arguments by keyword.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH, INNER, EXPERTS = 8, 16, 3


# --- Parts: token-wise modules of any width, most of them with a state ----------------------------------------------


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
    "python random": lambda x: (x * (1 + random.random())).tanh(),
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
    "layer norm": lambda width: nn.LayerNorm(width),
    "dropout": lambda _: nn.Dropout(0.3),
    "auxiliary loss": Aux,
    "own generator": OwnGenerator,
    **{name: lambda _, function=function: Call(function) for name, function in FUNCTIONS.items()},
}


# --- Regions --------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.inside = nn.Sequential()
        self.act = nn.GELU()
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.inside(self.up(x))))


class Mixture(nn.Module):
    """Experts with a routing bias that balances them, updated in forward."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))
        self.speed = speed
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x):
        scores = self.router(x).sigmoid()
        chosen = torch.zeros_like(scores).scatter(-1, (scores + self.bias).topk(2, -1).indices, 1.0)
        if self.training and self.speed:
            with torch.no_grad():
                load = chosen.flatten(0, -2).sum(0)
                self.bias.add_(torch.sign(load.mean() - load), alpha=self.speed)
        return sum(expert(x) * (scores * chosen)[..., i, None] for i, expert in enumerate(self.experts))


class Region(nn.Module):
    def __init__(self, features: tuple[str, ...]) -> None:
        super().__init__()
        self.before = nn.Sequential()
        self.mlp = Mlp()
        self.factor = 1.0
        for name in features:
            FEATURES[name](self)

    def forward(self, x, scale=None, shared=None):
        x = self.before(x)
        x = x if shared is None else shared(x).tanh()
        x = x + self.mlp(x) * self.factor
        return x if scale is None else x * scale["scale"]


class MixingHook:
    def __call__(self, _module, _args, out):
        return out - out.mean(-2, keepdim=True)


class CountingHook:
    """A hook with a state: what it does depends on how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _module, _args, out):
        self.calls += 1
        return out * (1 + 0.1 * self.calls)


def _doubled(_module, _args, out):
    return out * 2


def _doubled_input(_module, args):
    return (args[0] * 2, *args[1:])


def _halved(_module, grads, _more=None):
    return tuple(grad if grad is None else grad * 0.5 for grad in grads)


def _halve_gradient(weight):
    if weight.requires_grad:
        weight.register_hook(lambda grad: grad * 0.5)


def _hooks(of, place):
    """Hooks on the module that `of` finds in a region."""
    return {
        f"hook doubles {place}": lambda r: of(r).register_forward_hook(_doubled),
        f"hook doubles input of {place}": lambda r: of(r).register_forward_pre_hook(_doubled_input),
        f"hook looks around {place}": lambda r: of(r).register_forward_hook(MixingHook()),
        f"hook counts {place}": lambda r: of(r).register_forward_hook(CountingHook()),
        f"hook halves gradient of {place}": lambda r: of(r).register_full_backward_hook(_halved),
        f"hook halves gradient before {place}": lambda r: of(r).register_full_backward_pre_hook(_halved),
    }


FEATURES = {
    **{name: lambda r, part=part: r.before.append(part(WIDTH)) for name, part in PARTS.items()},
    **{f"mlp: {name}": lambda r, part=part: r.mlp.inside.append(part(INNER)) for name, part in PARTS.items()},
    "mixture": lambda r: setattr(r, "mlp", Mixture(0.0)),
    "mixture with bias": lambda r: setattr(r, "mlp", Mixture(0.05)),
    "spectral norm": lambda r: parametrizations.spectral_norm(_up(r)),
    "spectral norm, old": lambda r: spectral_norm(_up(r)),
    "weight norm": lambda r: parametrizations.weight_norm(_up(r)),
    "weight norm, old": lambda r: weight_norm(_up(r)),
    "frozen layer": lambda r: _up(r).requires_grad_(requires_grad=False),
    "weight hook": lambda r: _halve_gradient(next(_up(r).parameters())),
    **_hooks(lambda r: r, "region"),
    **_hooks(lambda r: r.mlp, "mlp"),
    **_hooks(lambda r: _mlp(r).act, "activation"),
}


def _mlp(region):
    return region.mlp if isinstance(region.mlp, Mlp) else region.mlp.experts[0]


def _up(region):
    return _mlp(region).up


# --- Models ---------------------------------------------------------------------------------------------------------


class Featured(nn.Module):
    """A stack of regions. `call` runs a region: by calling it, or through somebody's checkpoint."""

    def __init__(self, regions: tuple[tuple[str, ...], ...], features: tuple[str, ...]) -> None:
        super().__init__()
        self.features = features
        self.regions = nn.ModuleList(map(Region, regions))
        self.shared = nn.Linear(WIDTH, WIDTH) if "shared layer" in features else None
        if "shared weight" in features:
            _mlp(self.regions[-1]).down.weight = _mlp(self.regions[0]).down.weight
        self.call = None

    def forward(self, x):
        again = self.regions[:1] if "a region twice" in self.features else []
        for region in [*self.regions, *again]:
            x = self.run(region, x)
        return x

    def run(self, region, x):
        kwargs = {}
        if "keyword" in self.features:
            kwargs["scale"] = {"scale": x.detach().square().mean(-1, keepdim=True) + 0.5}
        if self.shared is not None:
            kwargs["shared"] = self.shared
        return region(x, **kwargs) if self.call is None else self.call(region, x, **kwargs)

    def losses(self, out):
        """Two losses of one forward; the second has those that parts keep in an attribute."""
        extra = [part.aux for part in self.modules() if getattr(part, "aux", None) is not None]
        return [out[:1].square().mean(), sum(extra, out[1:].square().mean())]


MODEL_FEATURES = ["a region twice", "shared layer", "shared weight", "keyword", "input needs a gradient"]


class TinyLlama(nn.Module):
    """The same from transformers: its regions are marked, and it makes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        from models.tiny import transformers

        sizes = {"vocab_size": 32, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}
        self.llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        self.call = None

    @property
    def regions(self):
        return self.llama.model.layers

    def forward(self, x):
        labels = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(x.shape[:2]) % 32
        return self.llama(inputs_embeds=x, labels=labels).loss

    def losses(self, out):
        return [0.3 * out, 0.7 * out]


def build(regions: tuple[tuple[str, ...], ...], features: tuple[str, ...], dtype: torch.dtype) -> nn.Module:
    """Build the model; without regions, it is transformers' Llama."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return (Featured(regions, features) if regions else TinyLlama()).train()
    finally:
        torch.set_default_dtype(before)
