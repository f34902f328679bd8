"""A whole model that is split over ranks: tensor parallelism, with FSDP2 around it, with the sequence split, and
transformers' `tp_plan="auto"`. Gradients are those of one process.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.errors import LowtideError
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
    "recompute+offload(disk)",
]
WITH_WHOLE_HEAD = POLICIES
WITH_SPLIT_HEAD = [policy for policy in POLICIES if "loss" not in policy]


def check_report(policy: str, report, *, blocks_are_cut: bool = True) -> None:
    assert all(region.recomputes == region.forwards == 1 for region in report.regions)
    cut = {tiled.name for tiled in report.tiles if tiled.tiles > tiled.calls}
    layers = {region.name for region in report.regions}
    mlps = {f"{name}.mlp" for name in layers}
    expected = {
        POLICIES[2]: mlps,
        POLICIES[3]: {*(layers if blocks_are_cut else mlps), "model.norm"},
        POLICIES[4]: {"lm_head"},
    }
    assert cut == expected.get(policy, set())
    assert (report.regions[0].restored_bytes > 0) == ("offload" in policy)  # the last one stays


def gradients(model, policy: str, directory: str = "", seed: int = 0, wrap=lambda model: model, **expected) -> dict:
    """Return the whole gradients of a step under a policy, which is applied before `wrap` goes around the model."""
    applied = lowtide.apply(model, policy.replace("disk", f"disk={directory}"))
    wrap(model)(**split.batch(seed), use_cache=False).loss.backward()
    check_report(policy, applied.report(), **expected)
    return to_numpy(model)


def check(per_rank: list[dict], *seeds: int) -> None:
    reference = split.reference(*seeds)
    for policy in per_rank[0]:
        assert_joined([found[policy] for found in per_rank], reference, tolerance=split.TOLERANCE)


def tensor_parallel(rank: int, directory: str) -> dict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {policy: gradients(split.split(split.make(), mesh), policy, directory) for policy in WITH_WHOLE_HEAD}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensor_parallel(ranks, tmp_path):
    check(run_ranks(tensor_parallel, str(tmp_path), ranks=ranks))


def with_fsdp2(rank: int, directory: str) -> dict:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def shard(model):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data"])
        return fully_shard(model, mesh=mesh["data"])

    seed = mesh["data"].get_local_rank()
    models = {policy: split.split(split.make(), mesh["tensor"]) for policy in WITH_WHOLE_HEAD}
    return {policy: gradients(model, policy, directory, seed, shard) for policy, model in models.items()}


def test_fsdp2_and_tensor_parallel(tmp_path):
    check(run_ranks(with_fsdp2, str(tmp_path), ranks=4), 0, 1)


def sequence_parallel(rank: int) -> dict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = {policy: split.split_sequence(split.make(), mesh) for policy in POLICIES[:4]}
    return {policy: gradients(net, policy, blocks_are_cut=False) for policy, net in models.items()}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sequence_parallel(ranks):
    """Hidden states are a `DTensor` between attention and MLP, which each rank has a part of."""
    check(run_ranks(sequence_parallel, ranks=ranks))


REFUSED = {
    "tile(attention, tokens=7)": r"layers\.0 .* with its attention: its hidden states are a DTensor",
    "tile(loss)": "'lm_head' is split over ranks",
    "recompute+offload(disk)": r"expected its saved tensors to be offloaded.*a tensor subclass",
}


def refused_for_parts(rank: int, directory: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for policy, message in REFUSED.items():
        model = split.split_sequence(split.make(), mesh)
        lowtide.apply(model, policy.replace("disk", f"disk={directory}"))
        with pytest.raises(LowtideError, match=message):
            model(**split.batch(), use_cache=False).loss.backward()


def test_what_needs_all_of_a_sequence_or_of_the_head_is_refused(tmp_path):
    run_ranks(refused_for_parts, str(tmp_path))


def planned_by_transformers(rank: int, directory: str) -> dict:
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_plan="auto")

    def load():
        model = transformers.LlamaForCausalLM.from_pretrained(directory, distributed_config=config, dtype="float64")
        return model.train()

    return {policy: gradients(load(), policy, directory) for policy in WITH_SPLIT_HEAD}  # its plan splits the head


@needs_transformers_5
def test_transformers_tp_plan(tmp_path):
    split.make().save_pretrained(tmp_path)
    check(run_ranks(planned_by_transformers, str(tmp_path)))
