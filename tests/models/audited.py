"""Makes what `.github/workflows/audit.yml` audits with the action: a model, a batch, and Lowtide's set-up."""

from __future__ import annotations

import torch
import transformers

import lowtide


def llama():
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    ids = torch.randint(0, 128, (2, 24))
    batch = {"input_ids": ids, "labels": ids}
    return transformers.LlamaForCausalLM(config), batch, {"configure": recompute, "dropout": 0.1}


def recompute(model):
    return lowtide.apply(model, "recompute")
