"""The launcher must bite: failures, deaths and hangs of a rank all fail the test, with words."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from support.launcher import RankFailedError, run_ranks


def add_up(rank: int, factor: int) -> float:
    value = torch.tensor([float(rank + 1)]) * factor
    dist.all_reduce(value)
    return value.item()


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


def die(rank: int) -> None:
    if rank == 0:
        os._exit(3)


def hang(rank: int) -> None:
    time.sleep(1000 * rank)


def test_results_come_back_in_rank_order():
    assert run_ranks(add_up, 10) == [30.0, 30.0]


def test_a_raised_error_is_shown_with_its_traceback():
    with pytest.raises(RankFailedError, match=r"(?s)rank 1.*ValueError: only here"):
        run_ranks(fail_on_one)


def test_a_dead_rank_is_named():
    with pytest.raises(RankFailedError, match=r"rank 0 ---\nno result .*exit code 3"):
        run_ranks(die, timeout=20)


def test_a_hang_is_a_failure():
    with pytest.raises(RankFailedError, match=r"rank 1 ---\nno result within 5 s \(still running\)"):
        run_ranks(hang, timeout=5)
