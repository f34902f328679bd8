"""Train in a framework that calls torch's checkpoint itself: `patch_torch` replaces it, whatever `use_reentrant` is.

    python examples/patched_framework.py

For models that you build yourself, `lowtide.apply` is the better way.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).train()
    ids = (torch.arange(64) % 90 + 1)[None]
    before = torch.utils.checkpoint.checkpoint
    with lowtide.patch_torch() as patch:  # on a GPU: patch_torch(offload="host")
        model.gradient_checkpointing_enable({"use_reentrant": True})  # inside: the model stores the function
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        print(f"{patch.calls} calls answered, one graph: DDP's hooks fire once")
    print("torch's own function is back:", torch.utils.checkpoint.checkpoint is before)


if __name__ == "__main__":
    main()
