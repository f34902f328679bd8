"""A model whose layers share weights in several ways, and optimizers that act in backward."""

from __future__ import annotations

import collections

import torch
from torch import nn
from torch.nn import functional as F

from models.mlps import HIDDEN, Gated

CLASSES, LENGTH = 24, 24


class Shared(nn.Module):
    """A block that several layers call, with an adapter for each of them, as Zamba2's is."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN, dtype=torch.double)
        self.adapters = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, dtype=torch.double) for _ in range(layers))

    def forward(self, x, layer):
        return torch.tanh(self.inner(x) + self.adapters[layer](x))


class Layer(nn.Module):
    """Attends, and has an MLP; the scale is one parameter in all layers."""

    def __init__(self, shared: Shared, scale: nn.Parameter, index: int) -> None:
        super().__init__()
        self.index, self.shared, self.scale = index, shared, scale
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.double)
        self.mlp = Gated()

    def forward(self, x):
        heads = self.norm(x).unflatten(-1, (2, HIDDEN // 2)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        x = x + self.shared(x, self.index)
        return x + self.mlp(x) * self.scale


class Model(nn.Module):
    """Calls its first layer twice, and has its embedding for a head."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, HIDDEN, dtype=torch.double)
        shared, scale = Shared(layers), nn.Parameter(torch.full((HIDDEN,), 0.5, dtype=torch.double))
        self.layers = nn.ModuleList(Layer(shared, scale, index) for index in range(layers))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in (self.layers[0], *self.layers):
            x = layer(x)
        return F.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), ids.flatten())


def model() -> Model:
    torch.manual_seed(0)
    return Model().train()


def ids(seed: int, rows: int = 2) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randint(0, CLASSES, (rows, LENGTH))


class InBackward:
    """Steps each parameter as soon as its gradient is there, and lets go of the gradient: `fired` counts."""

    def __init__(self, net: nn.Module, kind: str = "adamw") -> None:
        self.fired: collections.Counter[str] = collections.Counter()
        self._step = getattr(self, f"_{kind}")
        self._optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in net.parameters() if kind == "adamw"}
        self._averages = {p: p.detach().clone() for p in net.parameters() if kind == "averaged"}
        for name, parameter in net.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._act(name, p))

    def _act(self, name: str, parameter: nn.Parameter) -> None:
        self.fired[name] += 1
        self._step(parameter)
        parameter.grad = None

    def _adamw(self, parameter: nn.Parameter) -> None:
        self._optimizers[parameter].step()

    def _data(self, parameter: nn.Parameter) -> None:
        """LOMO: a change that torch does not count."""
        parameter.data.add_(parameter.grad, alpha=-0.01)

    def _clipped(self, parameter: nn.Parameter) -> None:
        torch.nn.utils.clip_grad_norm_([parameter], 0.1)
        with torch.no_grad():
            parameter.sub_(parameter.grad)

    def _averaged(self, parameter: nn.Parameter) -> None:
        """An average of all steps, which becomes the weight."""
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.05)
            self._averages[parameter].lerp_(parameter, 0.5)
            parameter.copy_(self._averages[parameter])
