"""What could not act is refused before anything is changed; what acts on something of the user's own says so."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import InvalidValueError, NoRegionError
from models.tiny import llama, qwen3_vl


def instance_forwards(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


def count_runs(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[int]:
    """How often the attention of each block runs in a training step."""
    runs = [0] * len(model.model.layers)
    for index, layer in enumerate(model.model.layers):

        def note(_module, _args, _kwargs, index=index):
            runs[index] += 1

        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
    model(**batch, use_cache=False).loss.backward()
    return runs


@pytest.mark.parametrize("policy", ["none; *.mlp: recompute", "tile(mlp); *.mlp: recompute+tile(mlp)"])
def test_a_rule_that_would_recompute_a_part_of_a_block(policy):
    model, _ = llama()
    with pytest.raises(InvalidValueError, match=r"matches only MLPs, and only whole regions \(with names like 'm"):
        lowtide.apply(model, policy)
    assert instance_forwards(model) == []


def test_a_rule_for_mlps_that_tiles_or_leaves_them():
    model, _ = llama()
    lowtide.apply(model, "recompute+tile(mlp); *.0.mlp: none")
    assert instance_forwards(model) == ["model.layers.0", "model.layers.1", "model.layers.1.mlp"]


def test_a_policy_for_a_part_of_a_model_that_has_one():
    model, _ = qwen3_vl()
    applied = lowtide.apply(model, "recompute")
    tower = model.get_submodule("model.visual")
    with pytest.raises(InvalidValueError, match=r"also acts on 'model\.language_model\.layers\.0', outside of it"):
        lowtide.apply(tower, "none; blocks.0: recompute")
    assert len(instance_forwards(model)) == len(applied.regions) == 4
    applied.remove()
    part = lowtide.apply(tower, "recompute")
    whole = lowtide.apply(model, "recompute")  # a larger one takes its place
    assert len(part.regions) == 2
    assert len(instance_forwards(model)) == len(whole.regions) == 4


class TestRegions:
    def build(self) -> nn.Module:
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2))
        return nn.ModuleDict({"embed": nn.Linear(4, 4), "layers": blocks})

    @pytest.mark.parametrize("regions", ["layers.*", nn.Sequential])
    def test_are_a_list(self, regions):
        with pytest.raises(InvalidValueError, match=r"regions must be a list, like regions=\['?\w"):
            lowtide.apply(self.build(), "recompute", regions=regions)

    @pytest.mark.parametrize("regions", [["layers"], ["layers.0", "layres.1"], ["layers.*", "Block"], [nn.Conv1d]])
    def test_each_fits_something_that_is_called(self, regions):
        with pytest.raises(NoRegionError, match=r"that is called matches .*name what is in them, like 'layers\.\*'"):
            lowtide.apply(self.build(), "recompute", regions=regions)

    def test_a_glob_that_fits_a_container_and_what_is_in_it_takes_what_is_in_it(self):
        model = self.build()
        lowtide.apply(model, "recompute", regions=["layers*"])
        assert instance_forwards(model) == ["layers.0", "layers.1"]

    def test_one_inside_another_counts_as_used(self):
        model = self.build()
        lowtide.apply(model, "recompute", regions=["layers.0.0", "layers.*"])
        assert instance_forwards(model) == ["layers.0", "layers.1"]


class TestOwnCheckpointing:
    """The model's own flag, when a policy comes."""

    def build(self):
        model, batch = llama()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train(), batch

    @pytest.mark.parametrize("policy", ["none", "tile(loss)", "tile(mlp, tokens=8)"])
    def test_stays_where_the_policy_recomputes_nothing(self, policy):
        model, batch = self.build()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lowtide.apply(model, policy)
        assert count_runs(model, batch) == [2, 2]

    def test_where_warnings_are_errors_nothing_is_changed(self):
        model, batch = self.build()
        before = lowtide.apply(model, "tile(mlp, tokens=8)")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="switched off"):
                lowtide.apply(model, "recompute")
        assert count_runs(model, batch) == [2, 2]
        assert before.report().tiles[0].calls == 1

    @pytest.mark.parametrize(("policy", "runs"), [("recompute", [2, 2]), ("recompute; *.layers.1: none", [2, 1])])
    def test_is_off_where_it_does_and_a_warning_says_so(self, policy, runs):
        model, batch = self.build()
        with pytest.warns(UserWarning, match="own gradient checkpointing is switched off while the policy recompute"):
            lowtide.apply(model, policy)
        assert count_runs(model, batch) == runs
