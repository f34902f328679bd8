"""Small models put together from named features: state, norms, randomness, hooks, parametrizations, mixtures.

A region is an MLP with a residual connection. A feature is a part before the MLP, a part between its two layers (its
name then begins with `mlp: `), something done to its weights, or a hook. A feature of the model is about its regions:
one of them called twice, a layer that two share, arguments by keyword.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from models.parts import PARTS

WIDTH, INNER, EXPERTS = 8, 16, 3


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
        self.is_nested = False
        for name in features:
            FEATURES[name](self)

    def forward(self, x, shared=None, keyword=None, state=(), unused=None):
        x = self.before(x)
        x = x if shared is None else shared(x).tanh()
        x = x + self.mlp(x) * self.factor
        for count in state:
            x = x * (1 + 0.1 * count.add_(1))
        x = x if keyword is None else x * keyword["scale"]
        return (x, {"largest": x.argmax(-1), "spread": x.std(-1)}) if self.is_nested else x


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
        for region in self.regions:
            region.is_nested = "nested output" in features
        self.call = None
        self.kwargs = {}
        """What regions get by keyword."""

    def forward(self, x):
        self.kwargs = dict(self._make_kwargs(x))
        again = self.regions[:1] if "a region twice" in self.features else []
        for region in [*self.regions, *again]:
            out = region(x, **self.kwargs) if self.call is None else self.call(region, x, **self.kwargs)
            x = out[0] + out[1]["spread"][..., None] if region.is_nested else out
            x = x.mul_(0.9) if "output in place" in self.features else x
        return x

    def _make_kwargs(self, x):
        if self.shared is not None:
            yield "shared", self.shared
        if "keyword" in self.features:
            scale = x.detach().square().mean(-1, keepdim=True) + 0.5
            yield "keyword", {"scale": scale[:]}  # a view, of which no copy is kept
        if "keyword that is not used" in self.features:
            yield "unused", torch.zeros(3, device=x.device)
        if "state by keyword" in self.features:
            yield "state", [torch.zeros((), device=x.device)]

    def losses(self, out):
        """Two losses of one forward; the second has those that parts keep in an attribute."""
        extra = [part.aux for part in self.modules() if getattr(part, "aux", None) is not None]
        return [out[:1].square().mean(), sum(extra, out[1:].square().mean())]


MODEL_FEATURES = [
    "a region twice",
    "shared layer",
    "shared weight",
    "keyword",
    "keyword that is not used",
    "state by keyword",
    "nested output",
    "output in place",
    "input needs a gradient",
]


class TinyLlama(nn.Module):
    """The same from transformers: its regions are marked, and it makes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        from models.tiny import transformers

        sizes = {"vocab_size": 32, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}
        self.llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        self.call = None
        self.kwargs = {}

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
