"""Optimizers that act in backward on two ranks: under FSDP2, whose shards fire the hooks of their own."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide
from models.in_backward import InBackward
from models.shared_block import batch, model
from support.joined import to_numpy
from support.launcher import run_ranks


def trained(rank: int, policy: str, directory: str = "") -> dict:
    net = model()
    if policy != "none":
        lowtide.apply(net, policy.replace("disk", f"disk={directory}"))
    mesh = init_device_mesh("cpu", (2,))
    for layer in net.layers[1:]:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = InBackward(net, "clipped")
    for _ in range(2):
        optimizer.fired.clear()
        net(batch(rank)).square().mean().backward()
        assert set(optimizer.fired.values()) == {1}
    for parameter in net.parameters():
        parameter.grad = parameter.detach()
    return to_numpy(net)


@pytest.mark.parametrize("policy", ["recompute", "recompute(every=2)", "recompute+offload(disk)"])
def test_the_weights_are_those_of_plain_fsdp(policy, tmp_path):
    for ours, plain in zip(run_ranks(trained, policy, str(tmp_path)), run_ranks(trained, "none"), strict=True):
        assert ours.keys() == plain.keys()
        assert all((ours[name] == plain[name]).all() for name in plain)
