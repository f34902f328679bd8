"""Train on a sequence that is spread over ranks: DeepSpeed's Ulysses, with MLPs and the loss in tiles.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/ulysses.py

Each rank has a part of the sequence, and in attention all of it for a part of the heads. Labels are shifted before the
sequence is cut, because the next token may be another rank's. A rank's loss is a sum over its tokens, divided by the
tokens of all ranks; so gradients are added up.
"""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

POLICY = "recompute+tile(tokens=16, loss_tokens=16)"  # for GPUs: "recompute+offload+tile"
LENGTH = 128


def main() -> None:
    deepspeed.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=ranks, micro_batch_size=1
    )
    applied = lowtide.apply(model, POLICY)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    ids = (torch.arange(LENGTH) % 90 + 1)[None]
    shifted = F.pad(ids, (0, 1), value=-100)[:, 1:]
    positions = torch.arange(LENGTH)[None]
    part, labels, places = (whole.chunk(ranks, 1)[rank].contiguous() for whole in (ids, shifted, positions))
    given = {"input_ids": part, "position_ids": places, "labels": labels, "shift_labels": labels}
    for step in range(6):
        loss = model(**given, num_items_in_batch=LENGTH - 1, use_cache=False).loss
        loss.backward()
        for weight in model.parameters():  # or ZeRO: `deepspeed.initialize(..., mpu=...)` does it
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if rank == 0:
        print(applied.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
