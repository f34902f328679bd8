"""A whole model that is split over ranks: tensor parallelism, with FSDP2 around it, with the sequence split, and
transformers' `tp_plan="auto"`. Gradients are those of one process.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide
from models import split
from models.tiny import transformers
from support import needs_transformers_5
from support.foreign_warnings import ignore_warnings_of
from support.joined import assert_joined, to_numpy
from support.launcher import run_ranks

pytestmark = ignore_warnings_of("torch", "transformers")

POLICIES = [
    "recompute",
    "recompute(keep=attention)",
    "recompute+tile(mlp, tokens=7)",
    "recompute+tile(attention, mlp, tokens=7)",
    "recompute+tile(loss, loss_tokens=7)",
]


def check_report(policy: str, report) -> None:
    assert all(region.recomputes == region.forwards == 1 for region in report.regions)
    cut = {tiled.name for tiled in report.tiles if tiled.tiles > tiled.calls}
    layers = {region.name for region in report.regions}
    expected = {
        POLICIES[2]: {f"{name}.mlp" for name in layers},
        POLICIES[3]: {*layers, "model.norm"},
        POLICIES[4]: {"lm_head"},
    }
    assert cut == expected.get(policy, set())


def gradients(model, policy: str, seed: int = 0) -> dict:
    """Return the whole gradients of a step."""
    model(**split.batch(seed), use_cache=False).loss.backward()
    check_report(policy, lowtide.apply(model, policy).report())  # the same handle again
    return to_numpy(model)


def check(per_rank: list[dict], *seeds: int) -> None:
    reference = split.reference(*seeds)
    for policy in per_rank[0]:
        assert_joined([found[policy] for found in per_rank], reference, tolerance=split.TOLERANCE)


def tensor_parallel(rank: int) -> dict:
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for policy in POLICIES:
        model = split.split(split.make(), mesh)
        lowtide.apply(model, policy)
        found[policy] = gradients(model, policy)
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensor_parallel(ranks):
    check(run_ranks(tensor_parallel, ranks=ranks))


def with_fsdp2(rank: int) -> dict:
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")), {}
    for policy in POLICIES:
        model = split.split(split.make(), mesh["tensor"])
        lowtide.apply(model, policy)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        found[policy] = gradients(model, policy, mesh["data"].get_local_rank())
    return found


def test_fsdp2_and_tensor_parallel():
    check(run_ranks(with_fsdp2, ranks=4), 0, 1)


def sequence_parallel(rank: int) -> dict:
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for policy in ("recompute", POLICIES[2]):
        model = split.split_sequence(split.make(), mesh)
        lowtide.apply(model, policy)
        found[policy] = gradients(model, policy)
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sequence_parallel(ranks):
    """Hidden states are a `DTensor` between attention and MLP, which each rank has a part of."""
    check(run_ranks(sequence_parallel, ranks=ranks))


def planned_by_transformers(rank: int, directory: str) -> dict:
    from transformers.distributed import DistributedConfig

    config, found = DistributedConfig(tp_plan="auto"), {}
    for policy in POLICIES[:4]:  # its plan splits the head, and tile(loss) is refused
        model = transformers.LlamaForCausalLM.from_pretrained(directory, distributed_config=config, dtype="float64")
        lowtide.apply(model.train(), policy)
        found[policy] = gradients(model, policy)
    return found


@needs_transformers_5
def test_transformers_tp_plan(tmp_path):
    split.make().save_pretrained(tmp_path)
    check(run_ranks(planned_by_transformers, str(tmp_path)))
