"""Train with DeepSpeed ZeRO-3: `initialize` applies a policy and hands the model to DeepSpeed's engine.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/deepspeed_zero3.py

The ranks' sequences have different lengths: all ranks agree on one number of tiles, so nothing hangs. The
`activation_checkpointing` section of DeepSpeed's configuration is honoured as a policy, or refused.
"""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide
from lowtide.integrations.deepspeed import initialize

POLICY = "recompute+tile(tokens=32, loss_tokens=32)"  # for GPUs: "recompute+offload+tile"
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def main() -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    engine, *_ = initialize(model, POLICY, config=CONFIG, optimizer=torch.optim.AdamW(model.parameters(), 3e-3))
    rank = dist.get_rank()
    for step in range(6):
        ids = (torch.arange(64 + 32 * rank) % 90 + 1)[None].to(engine.device)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if rank == 0:
        print(lowtide.apply(model, POLICY).report())  # the same handle again
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
