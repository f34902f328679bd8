"""A tiny Llama that is split over ranks, by torch's plans for tensor parallelism, and its steps in one process.

All in double precision, but for the loss, which transformers computes in single precision.
"""

from __future__ import annotations

import torch
import transformers
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

TOLERANCE = 2e-6
"""What single precision leaves of a gradient."""
LENGTH = 24


def make() -> torch.nn.Module:
    """Return the same weights in every process. Heads can be split over four ranks."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_bias=True,
    )
    return transformers.LlamaForCausalLM(config).double().train()


def batch(seed: int = 0, length: int = LENGTH) -> dict:
    torch.manual_seed(100 + seed)
    ids = torch.randint(1, 100, (2, length))
    return {"input_ids": ids, "labels": ids}


def reference(*seeds: int) -> torch.nn.Module:
    """Return the plain model after its backward: of the mean over the batches of these seeds."""
    model = make()
    for seed in seeds or (0,):
        (model(**batch(seed), use_cache=False).loss / max(1, len(seeds))).backward()
    return model


LAYER = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(),
}
"""Heads and features are split; each rank has all tokens."""


def split(model: torch.nn.Module, mesh) -> torch.nn.Module:
    """Split the features of each layer over the ranks of a mesh."""
    for layer in model.model.layers:
        parallelize_module(layer, mesh, LAYER)
    return model


SEQUENCE_LAYER = {
    **LAYER,
    "input_layernorm": SequenceParallel(),
    "post_attention_layernorm": SequenceParallel(),
    "self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
        use_local_output=True,
    ),
    "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}
"""Norms and residuals have a part of the sequence; attention and MLP gather it."""


def split_sequence(model: torch.nn.Module, mesh) -> torch.nn.Module:
    """Split the features of each layer, and the sequence between them."""
    root = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, SEQUENCE_LAYER)
    return parallelize_module(model, mesh, root)
