"""Train in your own loop with accelerate: `prepare` applies a policy and hands everything to the accelerator.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

If an FSDP plugin has its own activation checkpointing on, `prepare` refuses and says which setting to switch off.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide
from lowtide.integrations.accelerate import prepare

POLICY = "recompute+tile"  # for GPUs: "recompute+offload+tile"


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4
    )
    plain = LlamaForCausalLM(config)
    rows = (torch.arange(64)[None] + torch.arange(32)[:, None]) % 100 + 1  # something to learn
    accelerator = Accelerator(cpu=True)  # for GPUs: leave cpu out
    model, optimizer, loader = prepare(
        accelerator, POLICY, plain, torch.optim.AdamW(plain.parameters(), 3e-3), DataLoader(rows, batch_size=4)
    )
    for step, ids in enumerate(loader):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.3f}")
    accelerator.print(lowtide.apply(accelerator.unwrap_model(model), POLICY).report())  # the same handle again
    accelerator.end_training()


if __name__ == "__main__":
    main()
