from __future__ import annotations

import pytest
from torch import nn

from lowtide.errors import NoRegionError
from lowtide.regions import Region, find_mlps, find_regions


class Block(nn.Module):
    def __init__(self, width: int = 8, experts: int = 0) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(width, width), nn.Sequential(nn.Linear(width, width), nn.GELU())
        if experts:
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(experts))

    def forward(self, x):
        return self.mlp(self.attention(x))


class CallableStage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = stack(2, width=width)

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


class GradientCheckpointingLayer(nn.Module):
    """Stands for transformers' class, which is recognised by name."""


class Marked(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Block(), Block()])


def stack(count: int, **options) -> nn.ModuleList:
    return nn.ModuleList(Block(**options) for _ in range(count))


def names(model: nn.Module, select=None) -> list[str]:
    return [region.name for region in find_regions(model, select)]


def test_a_plain_stack():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 8), "layers": stack(3), "head": nn.Linear(8, 4)})
    assert names(model) == ["layers.0", "layers.1", "layers.2"]
    assert [region.index for region in find_regions(model)] == [0, 1, 2]


def test_a_sequential_is_a_stack_too():
    assert names(nn.Sequential(Block(), Block())) == ["0", "1"]


def test_a_dictionary_of_numbered_blocks_is_a_stack_too():
    """torchtitan keeps its layers so. Two towers of one kind are none."""
    assert names(nn.ModuleDict({"layers": nn.ModuleDict({"0": Block(), "1": Block()})})) == ["layers.0", "layers.1"]
    with pytest.raises(NoRegionError):
        find_regions(nn.ModuleDict({"query": Block(), "document": Block()}))


def test_two_towers():
    model = nn.ModuleDict({"vision": nn.ModuleDict({"blocks": stack(2)}), "text": nn.ModuleDict({"layers": stack(2)})})
    assert names(model) == ["vision.blocks.0", "vision.blocks.1", "text.layers.0", "text.layers.1"]
    assert [region.index for region in find_regions(model)] == [0, 1, 0, 1]


def test_stages_of_different_width_are_looked_into():
    stages = nn.ModuleList(nn.ModuleDict({"blocks": stack(2, width=width)}) for width in (8, 16, 32))
    assert names(stages) == [f"{stage}.blocks.{block}" for stage in range(3) for block in range(2)]


def test_stages_without_stacks_inside_are_regions_themselves():
    assert names(nn.ModuleList([Block(8), Block(16), Block(32)])) == ["0", "1", "2"]


def test_a_block_without_a_stack_is_a_region_beside_stages_that_have_some():
    """Codecs (EnCodec, Mimi) put convolutions between residual units, MobileViT one block before its stages."""
    mixed = nn.ModuleList([Block(8), CallableStage(8), Block(16), CallableStage(16)])
    assert names(mixed) == ["0", "1.blocks.0", "1.blocks.1", "2", "3.blocks.0", "3.blocks.1"]


def test_a_module_that_only_names_its_parts_is_no_region():
    """Janus' VQGAN calls `down[level].block[i]`; a level itself has no forward."""
    levels = nn.ModuleList()
    for _ in range(2):
        levels.append(level := nn.Module())
        level.block = stack(2)
    assert names(levels) == ["0.block.0", "0.block.1", "1.block.0", "1.block.1"]


def test_experts_are_not_regions():
    assert names(nn.ModuleDict({"layers": stack(2, experts=4)})) == ["layers.0", "layers.1"]


def test_marked_layers_are_regions_and_what_is_inside_them_is_not():
    model = nn.ModuleDict({"layers": nn.ModuleList([Marked(), Marked()])})
    assert names(model) == ["layers.0", "layers.1"]


def test_a_tower_without_marked_layers_is_found_beside_one_that_has_them():
    model = nn.ModuleDict({"vision": stack(2), "text": nn.ModuleList([Marked(), Marked()])})
    assert names(model) == ["vision.0", "vision.1", "text.0", "text.1"]


@pytest.mark.parametrize("select", [["layers.*.attention"], [nn.Linear], ["Linear"]])
def test_users_name_regions(select):
    model = nn.ModuleDict({"layers": stack(2)})
    assert "layers.0.attention" in names(model, select)


def test_nested_choices_take_the_outer_one():
    model = nn.ModuleDict({"layers": stack(2)})
    assert names(model, ["layers.*"]) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("model", "select", "says"),
    [
        (nn.Linear(3, 3), None, "name its regions"),
        (nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3)), None, "Sequential has no stack"),
        (nn.ModuleDict({"layers": stack(2)}), ["blocks.*"], r"matches 'blocks\.\*'"),
    ],
)
def test_no_region_is_an_error(model, select, says):
    with pytest.raises(NoRegionError, match=says):
        find_regions(model, select)


def test_an_mlp_in_a_dictionary_is_never_called_as_one():
    """BridgeTower's blocks keep the layers of their MLP so."""
    parts = {"up": nn.Linear(8, 32), "act": nn.GELU(), "down": nn.Linear(32, 8)}
    blocks = nn.ModuleList(nn.ModuleDict({"mlp": nn.Sequential(*parts.values())}) for _ in range(2))
    loose = nn.ModuleList(nn.ModuleDict({"mlp": nn.ModuleDict(parts)}) for _ in range(2))
    assert [name for _, name, _ in find_mlps([Region("0", blocks[0], 0)])] == ["0.mlp"]
    assert find_mlps([Region("0", loose[0], 0)]) == []
