"""The audit inside DDP, on real ranks with batches of their own."""

from __future__ import annotations

import torch
from launcher import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide


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
