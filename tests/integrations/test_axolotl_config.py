"""axolotl's configuration: Lowtide's key or axolotl's words are honoured as a policy, or refused; never ignored."""

from __future__ import annotations

import logging

import pytest

from lowtide import Policy
from lowtide.errors import InvalidValueError
from lowtide.integrations.axolotl_config import policy_of, take_over

CHECKPOINTING = {"gradient_checkpointing": True}
OFFLOADING = {**CHECKPOINTING, "activation_offloading": True}
HIDDEN_STATES = {**CHECKPOINTING, "activation_offloading": "hidden_states"}


def selective(**settings):
    return {**CHECKPOINTING, "selective_checkpointing": settings}


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
        ({**CHECKPOINTING, "selective_checkpointing": True}, "recompute(keep=attention)"),
        ({**CHECKPOINTING, "selective_checkpointing": False}, "recompute"),
        ({**CHECKPOINTING, "selective_checkpointing": True, "adapter": "lora"}, "recompute(keep=attention)"),
        ({"lowtide": "none", **CHECKPOINTING, "selective_checkpointing": True}, "none"),
        (selective(), "recompute(keep=attention)"),
        (selective(save=[]), "recompute(keep=attention)"),
        (selective(save=["attention"], save_sliding_window=True), "recompute(keep=attention)"),
        (selective(save=["attention", "aten::mm"]), "recompute(keep=[attention, aten::mm])"),
        (selective(save=["mylib::op"], offload=False), "recompute(keep=[mylib::op])"),
        (HIDDEN_STATES | selective(offload=True), "recompute(keep=attention)+offload"),
        (
            selective() | {"gradient_checkpointing_kwargs": {"every_n_layers": 2}, "tiled_mlp": True},
            "recompute(every=2, keep=attention)+tile(mlp)",
        ),
        ({**CHECKPOINTING, "gradient_checkpointing_kwargs": {"selective": True}}, "recompute(keep=attention)"),
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
        ({"lowtide": "recompute", "selective_checkpointing": True}, "and for selective_checkpointing: leave one"),
        ({"selective_checkpointing": True}, "selective_checkpointing needs gradient_checkpointing: true"),
        ({**CHECKPOINTING, "selective_checkpointing": "attention"}, "true, false or a section, got 'attention'"),
        (selective(saves=["attention"]), "unknown setting of axolotl's selective_checkpointing 'saves': did you mean"),
        (selective(save="attention"), r"save must be a list, like \[attention\], got 'attention'"),
        (selective(save=["mm"]), "save: 'mm' is not the whole name of an operator. Write attention, or names like"),
        (selective(save=[3]), "save: 3 is not the whole name"),
        (selective(offload="no"), "offload must be true or false, got 'no'"),
        (selective(save_sliding_window=False), "a policy tells layers by name. Leave them out, or write"),
        (selective(recompute_layer_types=["full_attention"]), 'recompute_layer_types cannot .* "recompute.keep=atte'),
        (selective(offload=True), "leaves the device with the layers' inputs, or both stay.*hidden_states"),
        (HIDDEN_STATES | selective(), "set selective_checkpointing.offload: true"),
        (OFFLOADING | selective(offload=True), "activation_offloading: hidden_states"),
        (OFFLOADING | selective(offload=True) | {"adapter": "lora"}, "activation_offloading: hidden_states"),
        ({"gradient_checkpointing": "offload", "selective_checkpointing": True}, "hidden_states"),
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


def test_selective_checkpointing_is_taken_out_too(caplog):
    config = HIDDEN_STATES | selective(save=["attention"], offload=True)
    with caplog.at_level(logging.INFO, "lowtide"):
        take_over(config)
    assert config == {"lowtide": "recompute(keep=attention)+offload"}
    assert "gradient_checkpointing, selective_checkpointing, activation_offloading: taken over" in caplog.text
    assert "keeps attention over sliding windows, too" in caplog.text, "axolotl recomputes that, unless told"


def test_windows_that_axolotl_saves_are_no_news(caplog):
    with caplog.at_level(logging.INFO, "lowtide"):
        take_over(selective(save_sliding_window=True))
    assert "taken over" in caplog.text
    assert "windows" not in caplog.text


def test_with_policy_none_axolotls_own_settings_stay():
    config = {"lowtide": "none", **OFFLOADING}
    take_over(config)
    assert config == {"lowtide": "none", **OFFLOADING}
