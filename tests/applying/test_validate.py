"""A policy is validated once: what is found then is what is installed."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.applying import applied_to, apply_policy, tile_runtime, validate
from lowtide.errors import InvalidValueError
from lowtide.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.mix(x))


class LanguageModel(nn.Module):
    """By transformers' conventions: a head that can be asked for, and labels in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 16, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The finders that run, by name, wherever they are called from."""
    calls: list[str] = []

    def counted(name: str, find: Callable[..., Any]) -> Callable[..., Any]:
        def finder(*args: Any) -> Any:
            calls.append(name)
            return find(*args)

        return finder

    for name in ("find_regions", "find_mlps", "find_head"):
        for module in (validate, lowtide.regions):
            monkeypatch.setattr(module, name, counted(name, getattr(lowtide.regions, name)))
    return calls


@pytest.mark.parametrize("policy", ["recompute+tile", "tile(loss); *.mlp: tile(mlp)"])
def test_each_finder_runs_once(found: list[str], policy: str):
    model = LanguageModel()
    applied = lowtide.apply(model, policy)
    assert sorted(found) == ["find_head", "find_mlps", "find_regions"]
    found.clear()
    assert lowtide.apply(model, policy) is applied
    assert sorted(found) == ["find_head", "find_mlps", "find_regions"]


def test_a_head_is_looked_for_only_if_the_loss_is_tiled(found: list[str]):
    lowtide.apply(LanguageModel(), "recompute+tile(mlp)")
    assert sorted(found) == ["find_mlps", "find_regions"]


def test_an_installation_has_each_region_with_the_policy_that_takes_effect():
    model = LanguageModel()
    policy = Policy.parse("recompute(every=2)+tile; *.3: none; *.1.mlp: none")
    installation = validate.validate(model, policy)
    assert [(region.name, str(own)) for region, own in installation.regions] == [
        ("layers.0", "recompute(every=2)+tile"),
        ("layers.1", "none"),
        ("layers.2", "recompute(every=2)+tile"),
        ("layers.3", "none"),
    ]
    assert [mlp.name for mlp, _ in installation.mlps] == ["layers.0.mlp", "layers.2.mlp"]
    assert installation.head is not None
    assert (installation.head.module, installation.head.model) == (model.head, model)
    assert installation.keeps_less
    assert installation.with_store().store is None
    assert not any("forward" in vars(module) for module in model.modules()), "nothing is changed"


def test_what_is_refused_changes_nothing():
    model = LanguageModel()
    with pytest.raises(InvalidValueError, match="matches no region and no MLP"):
        lowtide.apply(model, "recompute+tile; tower.*: none")
    assert applied_to(model) == []
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("probe", [False, True])
def test_without_a_probe_a_module_is_not_tried_out(monkeypatch: pytest.MonkeyPatch, probe: bool):
    tried: list[str] = []

    class NotedTrial(tile_runtime.Trial):
        def __init__(self, name: str, *rest: Any) -> None:
            tried.append(name)
            super().__init__(name, *rest)

    monkeypatch.setattr(tile_runtime, "Trial", NotedTrial)
    model = LanguageModel()
    applied = apply_policy(model, "tile(mlp, tokens=4)", probe=probe)
    model(torch.randn(1, 12, 8)).sum().backward()
    assert tried == ([f"layers.{layer}.mlp" for layer in range(4)] if probe else [])
    assert applied.report().tiles[0].tiles == 3
    assert apply_policy(model, "tile(mlp, tokens=4)", probe=probe) is applied
    assert apply_policy(model, "tile(mlp, tokens=4)", probe=not probe) is not applied


def test_a_handle_that_nobody_keeps_lives_as_long_as_the_model():
    gc.collect()
    gc.disable()
    try:
        model = LanguageModel()
        handle = weakref.ref(lowtide.apply(model, "recompute+tile"))
        assert applied_to(model) == [handle()]
        assert applied_to(model.layers[0]) == [handle()], "a part of the model knows it as well"
        del model
        assert handle() is None
    finally:
        gc.enable()


def test_a_handle_that_is_removed_is_kept_by_nobody():
    """Not even by a seam that somebody has wrapped, and that stays therefore."""
    gc.collect()
    gc.disable()
    try:
        model = LanguageModel()
        handle = lowtide.apply(model, "recompute")
        seam = model.layers[0].forward
        model.layers[0].forward = functools.partial(seam)
        gone = weakref.ref(handle)
        handle.remove()
        del handle
        assert gone() is None
        assert applied_to(model) == []
        assert model(torch.randn(1, 4, 8)).shape == (1, 4, 16)
    finally:
        gc.enable()
