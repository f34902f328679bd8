"""axolotl's configuration: Lowtide's key or axolotl's words are honoured as a policy, or refused; never ignored."""

from __future__ import annotations

import logging

import pytest

from lowtide import Policy
from lowtide.errors import InvalidValueError
from lowtide.integrations.axolotl_config import policy_of, take_over

CHECKPOINTING = {"gradient_checkpointing": True}
OFFLOADING = {**CHECKPOINTING, "activation_offloading": True}


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({"lowtide": "recompute+offload+tile"}, "recompute+offload+tile"),
        ({"lowtide": {"recompute": True, "overrides": {"visual.*": "none"}}}, "recompute; visual.*: none"),
        ({"lowtide": "none", **OFFLOADING}, "none"),
        ({"lowtide": "none", "fsdp_config": {"activation_checkpointing": True}}, "none"),
        ({"lowtide": "recompute", "gradient_checkpointing": False, "fsdp_config": {}}, "recompute"),
        (CHECKPOINTING, "recompute"),
        ({**CHECKPOINTING, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "recompute"),
        ({**CHECKPOINTING, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}, "recompute(every=2)"),
        (OFFLOADING, "recompute+offload"),
        ({**OFFLOADING, "adapter": "lora"}, "offload"),
        ({**OFFLOADING, "activation_offloading": "legacy", "adapter": "lora"}, "recompute+offload"),
        ({**OFFLOADING, "activation_offloading": "hidden_states"}, "recompute+offload"),
        ({"gradient_checkpointing": "offload"}, "recompute+offload"),
        ({"tiled_mlp": True}, "tile(mlp)"),
        ({**OFFLOADING, "tiled_mlp": True, "tiled_mlp_num_shards": 4}, "recompute+offload+tile(mlp, shards=4)"),
    ],
    ids=str,
)
def test_honoured(config, policy):
    assert policy_of(config) == Policy.parse(policy)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"lowtide": "recompute", **CHECKPOINTING}, "and for gradient_checkpointing: leave one of them out"),
        ({"lowtide": "tile", "tiled_mlp": True, "tiled_mlp_num_shards": 2}, "tiled_mlp, tiled_mlp_num_shards: leave"),
        ({"lowtide": "offload", "activation_offloading": "disk"}, "activation_offloading: leave one"),
        ({"lowtide": "recompote"}, "did you mean 'recompute'"),
        ({"lowtide": "recompute", "selective_checkpointing": True}, "selective_checkpointing cannot be honoured"),
        ({**CHECKPOINTING, "selective_checkpointing": True}, "selective_checkpointing cannot be honoured"),
        ({"lowtide": "recompute", "fsdp_config": {"activation_checkpointing": True}}, "recomputed twice"),
        ({"lowtide": "recompute", "fsdp_config": {"fsdp_activation_checkpointing": True}}, "recomputed twice"),
        ({}, "asks for nothing"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, "asks for nothing"),
        ({"gradient_checkpointing": "offload_disk"}, "names no directory"),
        ({**OFFLOADING, "activation_offloading": "disk"}, "names no directory"),
        ({**OFFLOADING, "activation_offloading": "nvme"}, "activation_offloading value"),
        ({"gradient_checkpointing": "unsloth"}, "gradient_checkpointing: unsloth"),
        ({"activation_offloading": True}, "needs gradient_checkpointing"),
        ({"tiled_mlp_num_shards": 4}, r"needs tile\(mlp\)"),
        ({**CHECKPOINTING, "gradient_checkpointing_kwargs": {"context_fn": "x"}}, "unknown gradient_checkpointing_kw"),
        (
            {**OFFLOADING, "adapter": "lora", "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
            "it needs recompute",
        ),
    ],
    ids=str,
)
def test_refused(config, says):
    with pytest.raises(InvalidValueError, match=says):
        policy_of(config)


def test_words_are_taken_out_of_the_configuration_once(caplog):
    config = {**OFFLOADING, "tiled_mlp": True, "tiled_mlp_num_shards": 4, "learning_rate": 1e-3}
    with caplog.at_level(logging.INFO, "lowtide"):
        policy = take_over(config)
    assert config == {"lowtide": "recompute+offload+tile(mlp, shards=4)", "learning_rate": 1e-3}
    assert "gradient_checkpointing, activation_offloading, tiled_mlp, tiled_mlp_num_shards: taken over" in caplog.text
    before = dict(config)
    assert take_over(config) == policy
    assert config == before


def test_with_policy_none_axolotls_own_settings_stay():
    config = {"lowtide": "none", **OFFLOADING}
    take_over(config)
    assert config == {"lowtide": "none", **OFFLOADING}
