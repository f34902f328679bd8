from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import lowtide
from lowtide import Policy
from lowtide.errors import InvalidValueError

ALL = ("attention", "mlp", "loss")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", Policy()),
        ("recompute", Policy(recompute=True)),
        ("recompute(every=2)", Policy(recompute=True, every=2)),
        ("offload", Policy(offload="host")),
        ("recompute + offload", Policy(recompute=True, offload="host")),
        ("recompute+offload(host=8GiB)", Policy(recompute=True, offload="host", host_limit=8 * 1024**3)),
        ("recompute+offload(disk=/scratch)", Policy(recompute=True, offload="disk", disk="/scratch")),
        ("recompute+offload(disk)", Policy(recompute=True, offload="disk")),
        (
            "offload(disk = /scratch/a+b.c, limit=1GiB, verify, tmpfs=true)",
            Policy(offload="disk", disk="/scratch/a+b.c", disk_limit=1024**3, verify=True, tmpfs=True),
        ),
        ("offload(disk=/scratch, verify=False)", Policy(offload="disk", disk="/scratch")),
        (
            "recompute+offload(host=8GiB, disk=/scratch)+tile",
            Policy(recompute=True, offload="host", host_limit=8 * 1024**3, disk="/scratch", tile=ALL),
        ),
        ("unsloth(disk=/scratch)", Policy(recompute=True, offload="disk", disk="/scratch")),
        ("gradient_checkpointing", Policy(recompute=True)),
        ("gradient_checkpointing(every_n_layers=3)", Policy(recompute=True, every=3)),
        ("unsloth", Policy(recompute=True, offload="host")),
        ("activation_offloading", Policy(offload="host")),
        ("cpu_checkpointing", Policy(recompute=True, offload="host")),
        ("tile", Policy(tile=ALL)),
        ("tile(mlp, attention, loss)", Policy(tile=ALL)),
        ("tile(attention)", Policy(tile=("attention",))),
        ("recompute+tile(attention, tokens=8k)", Policy(recompute=True, tile=("attention",), tile_tokens=8192)),
        ("tile(loss, mlp)", Policy(tile=("mlp", "loss"))),
        ("recompute+tile(mlp, tokens=8k)", Policy(recompute=True, tile=("mlp",), tile_tokens=8192)),
        ("tile(mlp, shards=4)", Policy(tile=("mlp",), tile_shards=4)),
        ("tile(tokens=16, loss_tokens=32)", Policy(tile=ALL, tile_tokens=16, loss_tokens=32)),
        ("tiled_mlp", Policy(tile=("mlp",))),
        ("tile(mlp)+tile(loss)", Policy(tile=("mlp", "loss"))),
        ("tile(loss)+recompute+tiled_mlp", Policy(recompute=True, tile=("mlp", "loss"))),
    ],
)
def test_strings(text, expected):
    assert Policy.parse(text) == expected
    assert Policy.parse(str(expected)) == expected, "it prints what it parses"


def test_rules_for_regions():
    policy = Policy.parse("recompute+offload; visual.*: recompute; *.layers.0: none")
    assert policy.for_region("model.layers.3") == Policy(recompute=True, offload="host")
    assert policy.for_region("visual.blocks.1") == Policy(recompute=True)
    assert policy.for_region("model.layers.0").is_none
    assert Policy.parse(str(policy)) == policy


def test_rules_use_the_models_store():
    policy = Policy.parse("recompute+offload(disk=/scratch, verify); *.0: offload(disk); *.1: recompute")
    assert policy.for_region("layers.0") == Policy(offload="disk")
    assert Policy.parse(str(policy)) == policy
    assert Policy.parse("recompute+offload(host=4KiB, disk=/scratch); *.0: offload").for_region("a.0").offload == "host"


def test_sizes_are_described_for_people():
    policy = Policy.parse("offload(host=1048576, disk=/scratch, limit=3221225472)")
    assert policy.describe() == "offload(host=1 MiB, disk=/scratch, limit=3 GiB)"
    assert Policy.parse(policy.describe()) == policy


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"recompute": True, "offload": True}, Policy(recompute=True, offload="host")),
        ({"tile": ["loss"], "tiled_mlp": True}, "tile(mlp, loss)"),
        ({"tiled_mlp": True, "tile": False}, "none"),
        ({"tile": {"loss"}}, "tile(loss)"),
        ({"recompute": True, "tile": None, "overrides": None}, "recompute"),
        ({"recompute": True, "offload": "host", "host_limit": "1GiB"}, "recompute+offload(host=1GiB)"),
        (
            {"recompute": True, "offload": "disk", "disk": Path("/scratch"), "disk_limit": "1GiB"},
            "recompute+offload(disk=/scratch, limit=1GiB)",
        ),
        ({"gradient_checkpointing": True}, "recompute"),
        ({"gradient_checkpointing": False}, "none"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": None}, "recompute"),
        ({"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, "none"),
        (
            {"gradient_checkpointing_kwargs": {"use_reentrant": True, "every_n_layers": 2, "offload": True}},
            "recompute(every=2)+offload",
        ),
        ({"recompute": True, "overrides": {"visual.*": "none"}}, "recompute; visual.*: none"),
        ({"activation_offloading": True}, "offload"),
        ({"tile": True}, "tile"),
        ({"tile": "loss", "loss_tokens": "1k"}, "tile(loss, loss_tokens=1024)"),
        ({"tile": ["loss", "mlp"]}, "tile(mlp, loss)"),
        ({"tile": ["loss", "mlp", "attention"]}, "tile"),
        ({"tiled_mlp": True, "tiled_mlp_num_shards": 8}, "tile(mlp, shards=8)"),
        ({"activation_offloading": "hidden_states"}, "recompute+offload"),
        ({"use_gradient_checkpointing": "unsloth"}, "recompute+offload"),
        ({"activation_checkpointing": {"cpu_checkpointing": True, "profile": False}}, "recompute+offload"),
    ],
)
def test_dicts(mapping, expected):
    assert Policy.parse(mapping) == Policy.parse(expected)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("recomputee", "did you mean 'recompute'"),
        ("offlod", "did you mean 'offload'"),
        ("recompute(evry=2)", "did you mean 'every'"),
        ("recompute(every=two)", "whole number"),
        ("recompute(every=0)", "1 or more"),
        ("offload(often)", "unknown offload setting 'often': use one of host"),
        ("offload(disk=/scratch, limt=4)", "did you mean 'limit'"),
        ("offload(disk=/scratch, verify=often)", "true or false"),
        ("offload(host, disk)", r"needs offload\(host=8GiB, disk=/scratch\)"),
        ("offload(host, disk=/scratch)", "never reaches the disk"),
        ("offload(limit=4GiB)", "needs disk="),
        ("offload(verify)", "needs disk="),
        ("recompute; *.0: offload(disk)", "what stands before the rules does not"),
        ("recompute; *.0: offload(disk=/scratch)", "one for the whole model"),
        ("offload(disk=/scratch); *.0: offload", "what stands before the rules does not"),
        ({"offload": "host", "disk": "/scratch"}, "never reaches the disk"),
        ({"offload": "disk", "disk": "/a,b"}, "no comma"),
        ({"recompute": True, "disk": "/scratch"}, "needs offload"),
        ({"offload": "disk", "disk": "/scratch", "disk_limit": -1}, "negative"),
        ("tile(mpl)", "did you mean 'mlp'"),
        ("tile(token=4)", "did you mean 'tokens'"),
        ("tile(mlp, tokens=0)", "1 or more"),
        ("tile(loss, tokens=4)", r"needs tile\(mlp\) or tile\(attention\)"),
        ("tile(mlp, loss_tokens=4)", r"needs tile\(loss\)"),
        ("tile(mlp, tokens=4, shards=2)", "give one of them"),
        ("recompute; visual.*: tile(loss)", "a model has one loss"),
        ("recompute, offload", "is not a word"),
        ("recompute; visual", "'visual' in policy 'recompute; visual' is not a rule"),
        ({"recompote": True}, "did you mean 'recompute'"),
        ({"gradient_checkpointing_kwargs": {"offlaod": True}}, "did you mean 'offload'"),
        ({"offload": "dsik"}, "did you mean 'disk'"),
        ({"activation_offloading": "disk"}, "unknown activation_offloading value 'disk'"),
        ({"activation_checkpointing": {"partition_activations": True}}, "cannot be honoured"),
        ({"host_limit": 5}, "needs offload"),
        ({"every": 2}, "needs recompute"),
        ({"recompute": True, "offload": "host", "host_limit": -1}, "negative"),
        ({"recompute": "false"}, "recompute must be true or false, got 'false'"),
        ({"recompute": True, "every": "2"}, "every must be a whole number, got '2'"),
        ({"tiled_mlp": True, "tiled_mlp_num_shards": "8"}, "tile_shards must be a whole number"),
        ({"use_gradient_checkpointing": ["unsloth"]}, "unknown use_gradient_checkpointing value"),
        ("offload(disk=/scratch, limit)", "'' is not a memory size"),
        ({"recompute": True, "overrides": "visual.*: none"}, "pairs of a glob and a policy"),
        ({"recompute": True, "overrides": {"visual.*": "none; *.0: recompute"}}, "rules of its own"),
        ({"gradient_checkpointing_kwargs": True}, "gradient_checkpointing_kwargs must be a dict, got True"),
        ({"gradient_checkpointing": "yes"}, "gradient_checkpointing must be true or false, got 'yes'"),
        ({"tile": 4}, "tile must be true, false or a list of attention, mlp, loss, got 4"),
        (7, "not int"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_hint(bad, says):
    with pytest.raises(InvalidValueError, match=says):
        Policy.parse(bad)


def test_a_policy_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().recompute = True


def test_a_limit_in_a_rule_is_refused():
    with pytest.raises(lowtide.LowtideError, match="holds for the whole model"):
        lowtide.Policy.parse("none; layers.*: recompute+offload(host=4KiB)")


def test_a_limit_without_its_unit_is_refused():
    with pytest.raises(InvalidValueError, match="host_limit is 8 bytes: write a size with its unit, like 8GiB"):
        lowtide.Policy.parse("recompute+offload(host=8)")
