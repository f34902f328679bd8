"""Train on a sequence that is spread over ranks by torch's `context_parallel`, with MLPs and the loss in tiles.

    torchrun --nproc-per-node 2 examples/context_parallel.py    # on GPUs: torch's ring has none of the CPU's kernels

Inside the `with`, tensors are cut to this rank's tokens, and attention gathers the keys of all ranks. Forward and
backward belong inside: a recompute attends once more. Labels are shifted before they are cut, because the next token
may be another rank's.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

POLICY = "recompute+tile(tokens=16, loss_tokens=16)"  # for GPUs: "recompute+offload+tile"
LENGTH = 128


def attend_causally(_module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Attend without a mask, which the ring does not take: it knows where its tokens lie."""
    return args, {**kwargs, "attention_mask": None, "is_causal": True}


def main() -> None:
    kind = getattr(torch.accelerator.current_accelerator(), "type", "cpu")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind != "cpu" else torch.device(kind)
    dist.init_process_group()
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).to(device)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(attend_causally, with_kwargs=True, prepend=True)
    applied = lowtide.apply(model, POLICY)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    for step in range(6):
        ids = (torch.arange(LENGTH, device=device) % 90 + 1)[None]
        labels = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
        places = torch.arange(LENGTH, device=device)[None]
        cut = [ids, labels, places]
        with context_parallel(mesh, buffers=cut, buffer_seq_dims=[1, 1, 1], no_restore_buffers={*cut}):
            given = {"input_ids": ids, "position_ids": places, "labels": labels, "shift_labels": labels}
            loss = model(**given, num_items_in_batch=LENGTH - 1, use_cache=False).loss
            loss.backward()
        for weight in model.parameters():  # or FSDP2 around the layers, which leaves the ranks' mean
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        print(applied.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
