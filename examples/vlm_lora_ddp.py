"""Train LoRA on a vision-language model under DDP, with recompute, the disk tier and tiles.

    torchrun --nproc-per-node 2 examples/vlm_lora_ddp.py

The model is a small Qwen3-VL with random weights, and the images are generated, so it runs anywhere, here on two CPU
processes. For GPUs, change the two lines that are marked; for a real model, change `build_model` and `batches`.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import peft
import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel

import lowtide

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKEND, DEVICE = "gloo", "cpu"  # for GPUs: "nccl", f"cuda:{os.environ['LOCAL_RANK']}"
SCRATCH = os.environ.get("SCRATCH", str(Path.cwd()))  # on a disk: saved activations wait there, in nameless files
POLICY = f"recompute+offload(disk={SCRATCH})+tile(tokens=64, loss_tokens=64)"  # for GPUs: "recompute+offload+tile"
STEPS = 8
IMAGE, START, END = 150, 152, 153  # token ids


def build_model() -> peft.PeftModel:
    """Return a model with a frozen base, vision tower and embeddings included, and LoRA on every linear layer."""
    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": 160, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "rope_theta": 10000.0, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4,
            "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 64, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=IMAGE, video_token_id=151, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    model = transformers.Qwen3VLForConditionalGeneration(config)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, lora_dropout=0.05, target_modules="all-linear"))


def batches(rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield one image and a text per step. Lengths differ by rank, which makes other engines hang or disagree."""
    generator = torch.Generator().manual_seed(rank)
    grid = torch.tensor([[1, 8, 8]])
    count = int(grid.prod()) // 4
    for _ in range(STEPS):
        text = torch.arange(1, 100 + 20 * rank) % 90 + 1  # something to learn
        ids = torch.cat([torch.tensor([START]), torch.full((count,), IMAGE), torch.tensor([END]), text])[None]
        yield {
            "input_ids": ids,
            "labels": ids.masked_fill(ids >= IMAGE, -100),
            "pixel_values": torch.randn(int(grid.prod()), 3 * 2 * 4 * 4, generator=generator),
            "image_grid_thw": grid,
            "mm_token_type_ids": (ids == IMAGE).long(),
        }


def main() -> None:
    if DEVICE != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKEND)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = build_model().to(DEVICE).train()

    applied = lowtide.apply(model, POLICY)  # before DDP; nothing else in the loop changes

    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    for step, batch in enumerate(batches(rank)):
        loss = parallel(**{name: value.to(DEVICE) for name, value in batch.items()}, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    for turn in range(dist.get_world_size()):
        dist.barrier()
        if turn == rank:
            print(f"rank {rank}: peak memory of the process {memory} MiB\n{applied.report()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
