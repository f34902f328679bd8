from __future__ import annotations

import pytest
import torch
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


class Attributes(nn.Module):
    """Holds its parts as attributes, and calls them in turn."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


def test_stages_and_blocks_that_are_numbered_attributes():
    """As timm's RegNet has them: a stage of one block, or of two, is a region itself."""
    stages = {
        "s1": Attributes(b1=Block(4)),
        "s2": Attributes(b1=Block(6), b2=Block(6)),
        "s3": Attributes(b1=Block(9), b2=Block(8), b3=Block(8)),
    }
    model = Attributes(stem=Block(4), **stages, head=nn.Linear(8, 2))
    assert names(model) == ["s1", "s2", "s3.b1", "s3.b2", "s3.b3"]


def test_numbered_attributes_that_are_no_stack():
    adapters = {f"w{number}": Adapter(8, 8) for number in (1, 2, 3)}
    for parts in (
        {"conv1": Block(), "conv2": Block()},
        {"b1": Block(), "b2": Block(), "b3": Attributes(inner=Block())},
        {"b1": Block(), "b2": Block(), "b3": Block(), "norm": Block()},
        adapters,
    ):
        with pytest.raises(NoRegionError):
            find_regions(Attributes(body=Attributes(**parts)))


class Adapter(nn.Linear):
    """A linear layer with parts, as PEFT makes them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.lora = nn.Linear(width, 2)


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


class Parts(nn.Module):
    """Nothing but its parts."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return x


class Stacked(nn.Module):
    """A weight of any shape. Names among `without` are parameters that it does not have."""

    def __init__(self, *shape: int, **without: None) -> None:
        super().__init__()
        for name in without:
            self.register_parameter(name, None)
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
        Parts(net=nn.ModuleList([nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)])),
        Parts(net=nn.ModuleList([Parts(proj=nn.Linear(8, 32)), nn.Dropout(0.1), nn.Linear(16, 8)])),
        Parts(up=nn.Linear(8, 16), norm=nn.LayerNorm(16, bias=False), down=nn.Linear(16, 8)),
        Parts(experts=Stacked(3, 8, 4, bias=None), gate=Stacked(3, 8, bias=None)),
    ],
    ids=[
        "MLP",
        "wide experts",
        "narrow ones",
        "a shared one",
        "ones that do nothing",
        "stacked",
        "stacked in parts",
        "layers in a list",
        "a gated MLP of diffusers",
        "a norm without a bias",
        "experts and a router without a bias",
    ],
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
