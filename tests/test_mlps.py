"""MLPs and mixtures of experts are found by their structure, whatever their parts are called and however wide."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.regions import Region, find_mlps


class Parts(nn.Module):
    """Nothing but its parts."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return x


class Stacked(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


def expert(inner: int) -> Parts:
    """With the layer that narrows in the middle, as Mixtral's have it."""
    return Parts(w1=nn.Linear(8, inner), w2=nn.Linear(inner, 8), w3=nn.Linear(8, inner))


def experts(*more: nn.Module, inner: int = 4) -> nn.ModuleList:
    return nn.ModuleList([*(expert(inner) for _ in range(3)), *more])


def found(part: nn.Module) -> list[str]:
    block = Parts(attention=nn.Linear(8, 8), part=part)
    return [name for _, name, _ in find_mlps([Region("0", block, 0)])]


@pytest.mark.parametrize(
    "part",
    [
        expert(inner=16),
        Parts(gate=nn.Linear(8, 3), experts=experts(inner=16)),
        Parts(gate=nn.Linear(8, 3), experts=experts()),
        Parts(gate=nn.Linear(8, 3), experts=experts(), shared=expert(inner=16)),
        Parts(gate=nn.Linear(8, 5), experts=experts(nn.Identity(), nn.Identity())),
        Parts(experts=Stacked(3, 8, 4), gate=nn.Linear(8, 3)),
        Parts(gate=nn.Linear(8, 3), experts=Parts(fc1=Stacked(3, 8, 8), fc2=Stacked(3, 4, 8))),
    ],
    ids=["MLP", "wide experts", "narrow ones", "a shared one", "ones that do nothing", "stacked", "stacked in parts"],
)
def test_it_is_found_as_a_whole(part):
    assert found(part) == ["0.part"]


@pytest.mark.parametrize(
    "part",
    [
        Parts(gate=nn.Linear(8, 2), adapters=experts()),
        Parts(gate=nn.Linear(8, 3), layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3))),
        Parts(down=nn.Linear(8, 2), up=nn.Linear(2, 8)),
        Parts(down=nn.Linear(8, 2), up=nn.Linear(2, 8), other=nn.Linear(2, 8)),
        Parts(convolution=nn.Conv1d(3, 8, 4), gate=nn.Linear(8, 3)),
    ],
    ids=["no router", "no experts", "low rank", "low rank for two", "a convolution"],
)
def test_what_looks_like_it(part):
    assert found(part) == []


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torchscript_has_no_signature_to_read():
    script = torch.jit.script(nn.GELU())
    assert found(Parts(up=nn.Linear(8, 16), activation=script, down=nn.Linear(16, 8))) == ["0.part"]
