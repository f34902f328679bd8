"""Tiles under FSDP2, however the model is cut into units; other numbers of tiles on each rank, and no more gathers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from models.tiled import Mlp, batch, model
from support.joined import assert_joined, to_numpy
from support.launcher import run_ranks


class Collectives(TorchDispatchMode):
    """Counts gathers."""

    gathers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.gathers += "allgather" in str(func)
        return func(*args, **(kwargs or {}))


def units(net, kind):
    """The modules that become FSDP2 units, inner ones first."""
    mlps = [module for module in net.modules() if isinstance(module, Mlp)]
    if kind == "linears":
        return [linear for mlp in mlps for linear in mlp.children() if isinstance(linear, nn.Linear)]
    return {"root": [], "layers": list(net.layers), "mlps": mlps}[kind]


def sharded(rank: int, kind: str, reshard: bool, tokens: int | None) -> tuple[dict, int]:
    net = model().tile(tokens)
    mesh = init_device_mesh("cpu", (2,))
    for unit in units(net, kind):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(net, mesh=mesh)
    for _ in range(2):
        net.zero_grad()
        with Collectives() as collectives:
            net(batch(rank)).backward()
    states = [unit._get_fsdp_state()._fsdp_param_groups for unit in units(net, kind)]
    assert all(group.reshard_after_backward for groups in states for group in groups)
    assert all((group.post_forward_mesh_info is not None) == reshard for groups in states for group in groups)
    return to_numpy(net), collectives.gathers


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", ["root", "layers", "mlps", "linears"])
def test_gradients_and_gathers(kind, reshard):
    tiled = run_ranks(sharded, kind, reshard, 5)
    plain = run_ranks(sharded, kind, reshard, None)
    net = model()
    sum(net(batch(rank)) / 2 for rank in range(2)).backward()
    assert_joined([grads for grads, _ in tiled], net, tolerance=1e-12)
    gathers, plain_gathers = [count for _, count in tiled], [count for _, count in plain]
    assert gathers[0] == gathers[1] <= plain_gathers[0]
    assert plain_gathers[0] > 0


def tiled_with_units_inside(net: nn.Module) -> tuple[lowtide.Applied, list]:
    """The handle, and FSDP2's groups of the units that are inside a tiled module."""
    applied = lowtide.apply(net, "tile(mlp, tokens=13)", regions=["layers.*"])
    mesh = init_device_mesh("cpu", (2,))
    inner = units(net, "linears")
    for unit in inner:
        fully_shard(unit, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return applied, [group for unit in inner for group in unit._get_fsdp_state()._fsdp_param_groups]


def applied_and_sharded(rank: int, lengths: tuple[int, int], fails: bool) -> dict:
    net = model()
    applied, groups = tiled_with_units_inside(net)
    ids = batch(rank)[:, : lengths[rank]]
    if fails:
        handle = net.layers[0].norm.weight.register_hook(lambda _: 1 / 0)
        try:
            net(ids).backward()
        except ZeroDivisionError:
            handle.remove()
        net.zero_grad()
        with torch.no_grad():
            net(ids)
        assert all(group.reshard_after_backward for group in groups), "mended by the next forward"
    net(ids).backward()
    assert all(group.reshard_after_backward and not group.is_unsharded for group in groups)
    assert all(ledger.calls for ledger in applied.report().tiles)
    return to_numpy(net)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("lengths", [(20, 22), (4, 22)], ids=str)
def test_applied_with_units_inside(lengths, fails):
    """Also where one rank's sequence is too short to be cut: the trial gathers weights on both. And after a failure."""
    per_rank = run_ranks(applied_and_sharded, lengths, fails, timeout=60)
    net = model()
    sum(net(batch(rank)[:, : lengths[rank]]) / 2 for rank in range(2)).backward()
    assert_joined(per_rank, net, tolerance=1e-12)


def fails_between_tiles(rank: int) -> None:
    """The settings of the units; what FSDP2 itself keeps of a backward that failed is its own."""
    net = model()
    _, groups = tiled_with_units_inside(net)
    net.layers[0].mlp.gate.register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(batch(rank)).backward()
    assert not all(group.reshard_after_backward for group in groups), "it failed while tiles ran"
    with torch.no_grad():
        net(batch(rank))
    assert all(group.reshard_after_backward and not group.is_unsharded for group in groups)


def test_a_failure_between_tiles_is_mended_by_the_next_forward():
    run_ranks(fails_between_tiles, timeout=60)
