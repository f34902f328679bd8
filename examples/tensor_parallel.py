"""Train a model that is split over ranks by tensor parallelism, with its MLPs in tiles.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

`apply` may come before or after the model is split. Ranks meet inside each tile, so they try out the MLPs together, and
run the same number of tiles.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

POLICY = "recompute+tile(mlp, tokens=16)"  # for GPUs: "recompute+offload+tile(mlp)"
COLUMNS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
ROWS = ["self_attn.o_proj", "mlp.down_proj"]


def main() -> None:
    dist.init_process_group("gloo")  # for GPUs: "nccl", and a mesh of "cuda"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    applied = lowtide.apply(model, POLICY)
    optimizer = torch.optim.AdamW(
        model.parameters(), 3e-3, foreach=False
    )  # some weights are DTensors, and some are not
    ids = (torch.arange(64) % 90 + 1)[None]  # the same on all ranks: each has a part of every layer
    for step in range(6):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        print(applied.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
