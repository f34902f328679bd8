"""A rank that dies while others train with the disk tier: they end with an error, in bounded time."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.stores import DiskStore
from support.launcher import RankFailedError, run_ranks

BOUND = 60


def train(rank: int, directory: str, dies: str | None) -> tuple[int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    if rank == 1 and dies is not None:
        layer = model[1][0]
        if dies == "forward":
            layer.register_forward_hook(lambda *_: os._exit(1))
        else:
            layer.weight.register_hook(lambda _: os._exit(1))
    applied = lowtide.apply(model, f"recompute+offload(disk={directory}, tmpfs, limit=1MiB)")
    replica = DistributedDataParallel(model)
    for _ in range(3):
        replica(torch.randn(256, 64)).sum().backward()
    disk = applied.report().disk
    return disk.written_bytes, disk.limit


def test_ranks_share_a_directory(tmp_path):
    assert run_ranks(train, str(tmp_path), None) == [(3 * 3 * 256 * 64 * 4, 1024**2)] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dies", ["forward", "backward"])
def test_the_others_fail_and_do_not_hang(tmp_path, dies):
    start = time.monotonic()
    with pytest.raises(RankFailedError) as failed:
        run_ranks(train, str(tmp_path), dies, timeout=BOUND)
    assert time.monotonic() - start < BOUND
    survivor = str(failed.value).partition("--- rank 1 ---")[0]
    assert "Error" in survivor
    assert "no result within" not in survivor, "rank 0 was told; it did not hang"
    assert list(tmp_path.iterdir()) == []


def test_a_limit_counts_all_ranks_of_the_node(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    with pytest.raises(lowtide.LowtideError, match="for each of 1000000 processes on this node"):
        DiskStore(tmp_path, limit="1GiB", tmpfs=True)
