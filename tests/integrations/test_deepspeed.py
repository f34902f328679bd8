"""DeepSpeed's `activation_checkpointing` block is honoured as a policy, or refused; it is never ignored."""

from __future__ import annotations

import json
import sys
import types

import pytest

from lowtide import Policy
from lowtide.errors import InvalidValueError
from lowtide.integrations.deepspeed import initialize, policy_of
from models.tiny import llama


@pytest.mark.parametrize(
    ("block", "policy"),
    [
        ({}, "recompute"),
        ({"partition_activations": False, "cpu_checkpointing": False}, "recompute"),
        ({"cpu_checkpointing": True}, "recompute+offload"),
    ],
)
def test_honoured(block, policy):
    assert policy_of({"activation_checkpointing": block}, None) == Policy.parse(policy)


@pytest.mark.parametrize(
    ("settings", "policy", "says"),
    [
        (
            {"activation_checkpointing": {"partition_activations": True}},
            None,
            "partition_activations cannot be honoured",
        ),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "recompute", "leave one of them out"),
        ({}, None, "no policy"),
    ],
)
def test_refused(settings, policy, says):
    with pytest.raises(InvalidValueError, match=says):
        policy_of(settings, policy)


@pytest.mark.parametrize("as_file", [False, True])
def test_deepspeed_gets_the_applied_model_and_the_rest_of_the_configuration(monkeypatch, tmp_path, as_file):
    given = {}
    model, _ = llama()  # first: transformers looks for the real package as its models are imported
    fake = types.SimpleNamespace(initialize=lambda **options: given.update(options) or "engine")
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    config = {"train_batch_size": 2, "activation_checkpointing": {"profile": False}}
    if as_file:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(config))
        config = str(path)
    assert initialize(model, config=config, optimizer="sgd", regions=["model.layers.0"]) == "engine"
    assert given == {"model": model, "config": {"train_batch_size": 2}, "optimizer": "sgd"}
    assert ["forward" in layer.__dict__ for layer in model.model.layers] == [True, False]
