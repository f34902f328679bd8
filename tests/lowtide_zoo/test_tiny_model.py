from __future__ import annotations

import collections
import copy
import functools
import importlib
import importlib.util
import random

import numpy as np
import pytest
import torch
from torch import nn

import lowtide_zoo as zoo
from lowtide.errors import LowtideError
from lowtide.randomness import seeded
from lowtide_zoo.find import fitting_batch
from lowtide_zoo.tiny_model import Outcome
from support import needs_zoo
from support.foreign_warnings import ignoring_warnings_of

pytestmark = needs_zoo

# One of each: language models dense, mixed, hybrid and encoder-decoder; towers for images, video and audio beside
# them; vision, audio and time series alone.
WITH_TOWERS = {
    "blip-2": ("vision_model", "qformer", "language_model"),
    "gemma3": ("vision_tower", "language_model"),
    "granite_speech": ("encoder", "language_model"),
    "llava_next": ("vision_tower", "language_model"),
    "llava_onevision": ("vision_tower", "language_model"),
    "mllama": ("vision_model", "language_model"),
    "qwen2_audio": ("audio_tower", "language_model"),
    "qwen3_vl": ("visual", "language_model"),
    "whisper": ("encoder", "decoder"),
}
WITHOUT_TOWERS = [
    "bert",
    "clip",
    "clvp",
    "detr",
    "gemma2",
    "jamba",
    "llama",
    "mixtral",
    "patchtst",
    "swin",
    "t5",
    "time_series_transformer",
    "vit",
    "wav2vec2",
    "zamba2",
]
TYPES = [*WITH_TOWERS, *WITHOUT_TOWERS]
# No loss of their own: DETR's needs scipy, wav2vec2's and others' are there.
WITHOUT_LOSS = set() if importlib.util.find_spec("scipy") else {"detr"}


@functools.cache
def tiny_model(model_type: str) -> zoo.TinyModel:
    return zoo.find(model_type)


def train(model: nn.Module, batch: dict) -> object:
    """One forward and backward; the output."""
    with ignoring_warnings_of("torch", "transformers"):
        torch.manual_seed(0)
        output = model(**batch)
        loss = getattr(output, "loss", None)
        if loss is None:
            loss = sum(t.float().pow(2).mean() for t in tensors(output))
        loss.sum().backward()
    return output


def tensors(output: object) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for value in values for tensor in tensors(value)]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return all(map(same, one, other))
    return one == other


def shapes(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: shapes(inner) for key, inner in value.items()}
    return [shapes(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("model_type", TYPES)
def test_a_tiny_model_trains(model_type):
    found = tiny_model(model_type)
    model, batch = found.build(), found.batch()
    assert model.training
    assert type(model).__name__ == found.model_class
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    output = train(model, batch)
    assert (getattr(output, "loss", None) is not None) == (model_type not in WITHOUT_LOSS)
    assert gradients(model)
    assert all(gradient.isfinite().all() for gradient in gradients(model))
    assert any(gradient.any() for gradient in gradients(model))


@pytest.mark.parametrize("model_type", TYPES)
def test_seeds_change_values_and_nothing_else(model_type):
    found = tiny_model(model_type)
    assert same(found.batch(3), found.batch(3))
    assert not same(found.batch(3), found.batch(4))
    assert shapes(found.batch(3)) == shapes(found.batch(4))
    weights, again, others = (found.build(seed).state_dict() for seed in (3, 3, 4))
    assert same(weights, again)
    assert not same(weights, others)


@pytest.mark.parametrize("model_type", WITH_TOWERS)
def test_towers_get_gradients(model_type):
    found = tiny_model(model_type)
    model = found.build()
    train(model, found.batch())
    for tower in WITH_TOWERS[model_type]:
        inside = [p for name, p in model.named_parameters() if tower in name.split(".")]
        trained = [p for p in inside if p.grad is not None and p.grad.any()]
        assert len(trained) > 0.7 * len(inside) > 0, tower


def kinds_of_layers(model: nn.Module) -> dict[str, collections.Counter]:
    """How often every kind of layer occurs in each stack, told by class, parameters, and what attention it has."""
    found = {}
    for name, stack in model.named_modules():
        if isinstance(stack, nn.ModuleList) and name.endswith(("layers", "blocks")):
            found[name] = collections.Counter(map(kind_of, stack))
    return found


def kind_of(layer: nn.Module) -> tuple:
    said = {str(value) for module in layer.modules() for key, value in vars(module).items() if key == "layer_type"}
    windows = {str(getattr(module, "sliding_window", None)) for module in layer.modules()}
    return type(layer).__name__, tuple(name for name, _ in layer.named_parameters()), frozenset(said | windows)


@pytest.mark.parametrize(
    ("model_type", "kinds"), [("llama", 1), ("gemma2", 2), ("jamba", 2), ("zamba2", 2), ("mllama", 2), ("gemma3", 2)]
)
def test_every_kind_of_layer_occurs_twice(model_type, kinds):
    stacks = kinds_of_layers(tiny_model(model_type).build())
    assert max(len(counts) for counts in stacks.values()) == kinds
    assert min(min(counts.values()) for counts in stacks.values()) >= 2


@pytest.mark.parametrize("model_type", ["llava_next", "qwen3_vl", "gemma3"])
def test_placeholders_stand_in_the_same_places(model_type):
    found = tiny_model(model_type)
    token = found.config.image_token_id
    assert token < found.config.get_text_config().vocab_size
    places = [(found.batch(seed)["input_ids"] == token).nonzero() for seed in (0, 1)]
    assert len(places[0]) > 0
    assert torch.equal(*places)


def test_no_caches():
    model = tiny_model("llava_next").build()
    assert not model.config.get_text_config().use_cache
    assert train(model, tiny_model("llava_next").batch()).past_key_values is None


def test_zeros_hide_no_gradients():
    """DETR's and others' heads start at zero, and layer scales near it; biases of a fresh BERT are all zero."""
    assert all(parameter.any() for parameter in tiny_model("bert").build().parameters())


def test_finding_depends_on_no_random_state_and_changes_none():
    first = zoo.find("t5")
    torch.manual_seed(123)
    np.random.seed(123)  # noqa: NPY002
    random.seed(123)
    expected = copy.deepcopy((torch.get_rng_state(), np.random.get_state(), random.getstate()))  # noqa: NPY002
    second = zoo.find("t5")
    second.build()
    second.batch()
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    assert torch.equal(torch_state, expected[0])
    assert all(np.array_equal(now, then) for now, then in zip(numpy_state, expected[1], strict=True))
    assert python_state == expected[2]
    assert first.config.to_dict() == second.config.to_dict()
    assert first.model_class == second.model_class
    assert same(first.batch(), second.batch())


def test_the_random_numbers_of_a_device_are_left_alone(sim):
    torch.sim.manual_seed(7)
    before = torch.sim.get_rng_state()
    with seeded(3):
        torch.rand(1)
    assert torch.equal(torch.sim.get_rng_state(), before)


def test_a_batch_for_a_model_is_found_with_patience(monkeypatch):
    """A real model's forwards cost time: after a few that train no more, the best so far is it."""
    find = importlib.import_module("lowtide_zoo.find")  # the package has a function of this name
    model = tiny_model("llama").build()
    tried = []

    def smoke_step(model, batch):
        tried.append(batch)
        return Outcome(0.5, has_loss="labels" in batch)

    monkeypatch.setattr(find, "smoke_step", smoke_step)
    assert "labels" in fitting_batch(model), "one with a loss is better"
    assert 0 < len(tried) <= 2 * find.PATIENCE


def test_a_class_can_be_asked_for():
    assert zoo.find("bert", model_class="BertForTokenClassification").model_class == "BertForTokenClassification"
    with pytest.raises(zoo.CannotBuildError, match="no class BertForNothing"):
        zoo.find("bert", model_class="BertForNothing")


def test_every_model_type_is_known():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert zoo.model_types() == sorted(CONFIG_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("sam_prompt_encoder", "no model class of its own"),
        ("timm_backbone", "timm"),
        ("nothing-of-the-kind", "no such model type"),
    ],
)
def test_what_cannot_be_built_says_why(model_type, why):
    with pytest.raises(zoo.CannotBuildError, match=why) as caught:
        zoo.find(model_type)
    assert isinstance(caught.value, LowtideError)
    assert caught.value.model_type == model_type
    assert caught.value.reasons


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_most_model_types_can_be_built():
    failures = {}
    for model_type in zoo.model_types():
        try:
            zoo.find(model_type)
        except zoo.CannotBuildError as error:
            failures[model_type] = str(error)
    assert len(zoo.model_types()) - len(failures) >= 560, "\n".join(failures.values())
