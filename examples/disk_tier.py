"""Train on the CPU with saved activations on a disk: the process's memory stays flat as the model gets deeper.

    MALLOC_MMAP_THRESHOLD_=262144 MALLOC_TRIM_THRESHOLD_=262144 python examples/disk_tier.py /scratch

The directory must be on a disk; the default is the current directory.
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

TOKENS, STEPS = 512, 6


def main(directory: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=1024,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, config.vocab_size, (1, TOKENS))

    policy = f"recompute+offload(disk={directory}, verify)+tile"
    with lowtide.apply(model, policy) as applied:
        for _ in range(STEPS):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss {loss.item():.4f}")
        print(applied.report())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
