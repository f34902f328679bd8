"""Tiny transformers models in double precision and without dropout, whose gradients tiles must give."""

from __future__ import annotations

import torch

from models import architectures


def make(build, *, lora=False):
    model, batch = architectures.make(build, "cpu", lora=False)
    for module in model.modules():  # other tiles, other random numbers
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product knows no doubles
    if lora:
        model = architectures.with_lora(model)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    batch = {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in batch.items()
    }
    return model.double(), batch


def assert_same(ours, expected, tolerance):
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert (ours[name] - value).norm() <= tolerance * value.norm() + 1e-14 * (tolerance > 0), name
