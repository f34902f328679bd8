"""The audit inside DDP, on real ranks with batches of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import simdevice
from lowtide.auditing.reference import differ_between_ranks
from support.launcher import run_ranks, with_backend


class Opaque:
    """An output that DDP cannot look into."""

    def __init__(self, loss) -> None:
        self.loss = loss


class Net(nn.Module):
    def __init__(self, *, is_opaque: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh()) for _ in range(3)
        )
        self.is_opaque = is_opaque

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        loss = x.square().mean()
        return Opaque(loss) if self.is_opaque else {"loss": loss}


def verdicts(rank: int, is_opaque: bool, static: bool) -> dict[str, str]:
    net = Net(is_opaque=is_opaque)
    lowtide.apply(net, "recompute")
    model = DistributedDataParallel(net, static_graph=static)
    torch.manual_seed(rank)
    report = lowtide.audit(
        model, (torch.randn(8, 16),), loss=lambda outputs: outputs.loss if is_opaque else outputs["loss"]
    )
    return {check.name: check.verdict.value for check in report.checks}


def test_gradients_are_the_average_over_ranks():
    for found in run_ranks(verdicts, False, True):
        assert found["ranks agree"] == found["gradient values"] == found["recomputed"] == "pass"
        assert "fail" not in found.values()


def test_an_output_that_hides_the_loss_from_a_static_graph():
    for found in run_ranks(verdicts, True, True):
        assert found["ranks agree"] == "fail"
        assert found["gradient values"] == "fail"
        assert found["recomputed"] == "pass"


class Branching(Net):
    """Some batches leave a part of it out."""

    def __init__(self) -> None:
        super().__init__(is_opaque=False)
        self.tower = nn.Linear(16, 16)

    def forward(self, x, with_tower=False):
        return super().forward(self.tower(x) if with_tower else x)


def enable_sim() -> str:
    simdevice.enable(on_violation="raise")
    return "cpu:gloo,sim:sim_gloo"


@with_backend(enable_sim)
def verdicts_of_a_tower(rank: int, dtype: torch.dtype) -> dict[str, str]:
    net = Branching().to("sim", dtype)
    lowtide.apply(net, "recompute")
    model = DistributedDataParallel(net, find_unused_parameters=True)
    torch.manual_seed(rank)
    batch = {"x": torch.randn(8, 16).to("sim", dtype), "with_tower": rank == 0}
    report = lowtide.audit(model, batch, checks=["recomputed", "gradients present", "gradient values", "ranks agree"])
    return {check.name: check.verdict.value for check in report.checks}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_parameter_that_one_rank_alone_uses(dtype):
    for found in run_ranks(verdicts_of_a_tower, dtype):
        assert set(found.values()) == {"pass"}, found


def verdicts_of_a_lost_tower(rank: int) -> str:
    net = Branching()
    net.tower.weight.register_hook(torch.zeros_like)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    batch = {"x": torch.ones(8, 16), "with_tower": rank == 0}
    report = lowtide.audit(model, batch, checks=["gradients present"])
    return report["gradients present"].summary


def test_ranks_agree_on_a_parameter_that_one_of_them_uses():
    """On the other one, the gradient is not zero by mathematics: its batch says nothing about it."""
    first, second = run_ranks(verdicts_of_a_lost_tower)
    assert first == second == "1 parameters lose their gradient: tower.weight"


def bits_that_differ(rank: int) -> list[str]:
    sign = 1 - 2 * rank
    gradients = {
        "swapped": torch.tensor([1.0, 2.0]) if rank else torch.tensor([2.0, 1.0]),
        "opposite": torch.full((3,), float(sign)),
        "on one rank": torch.ones(2) if rank else None,
        "equal": torch.ones(2),
        "equal, and no number": torch.tensor([float("nan"), 1.0]),
        "on no rank": None,
    }
    return differ_between_ranks(gradients)


def test_ranks_agree_bit_by_bit():
    for found in run_ranks(bits_that_differ):
        assert found == ["swapped", "opposite", "on one rank"]
