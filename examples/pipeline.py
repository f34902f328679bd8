"""Train a pipeline: each rank has a part of the layers, and several micro-batches are in flight.

    torchrun --nproc-per-node 2 examples/pipeline.py

Each stage is a model of its own and has a policy of its own. What a micro-batch leaves between its forward and its
backward is a stage's largest part of memory: with recompute, these are the regions' inputs alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import lowtide

POLICY = "recompute+tile(mlp, tokens=16)"  # for GPUs: "recompute+offload+tile(mlp)"
WIDTH, LAYERS, MICRO_BATCHES = 64, 8, 4


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def main() -> None:
    dist.init_process_group("gloo")  # for GPUs: "nccl"
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    part = nn.Sequential(*layers[rank * LAYERS // ranks : (rank + 1) * LAYERS // ranks])
    applied = lowtide.apply(part, POLICY)
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(part.parameters(), 3e-3)
    x = torch.randn(MICRO_BATCHES, 64, WIDTH)
    is_last = rank == ranks - 1
    for step in range(6):
        losses: list[torch.Tensor] = []
        inputs = [x] if rank == 0 else []
        schedule.step(*inputs, **({"target": x.flip(-1), "losses": losses} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
        if is_last:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.3f}")
    if is_last:
        print(applied.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
