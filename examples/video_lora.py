"""Train LoRA on a tiny Wan, a video transformer of diffusers, with recompute, the disk tier and tiles.

    pip install diffusers peft
    python examples/video_lora.py

The model has random weights and the videos are noise that moves, so it runs anywhere, here on a CPU. For a GPU, change
the two lines that are marked; for a real model, change `build_model` and `batches` (latents of its autoencoder, and
embeddings of its text encoder).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import diffusers
import peft
import torch
from torch.nn import functional as F

import lowtide

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE = "cpu"  # for a GPU: "cuda"
SCRATCH = os.environ.get("SCRATCH", str(Path.cwd()))  # on a disk: saved activations wait there, in nameless files
POLICY = f"recompute+offload(disk={SCRATCH})+tile(mlp, tokens=64)"  # for a GPU: "recompute+offload+tile(mlp)"
STEPS = 8
FRAMES, SIDE, CHANNELS = 3, 16, 4


def build_model() -> diffusers.WanTransformer3DModel:
    """Return a frozen video transformer with LoRA on its attention and its MLPs."""
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=CHANNELS, out_channels=CHANNELS, text_dim=32,
        freq_dim=32, ffn_dim=256, num_layers=4,
    )  # fmt: skip
    model.requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
    model.add_adapter(peft.LoraConfig(r=8, target_modules=targets))
    return model.to(DEVICE).train()


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Yield noisy videos with their times, the velocities to predict, and a prompt."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randn(2, 7, 32, generator=generator)
    still = torch.randn(2, CHANNELS, 1, SIDE, SIDE, generator=generator)
    video = torch.cat([still.roll(frame, dims=-1) for frame in range(FRAMES)], dim=2)
    for _ in range(STEPS):
        noise = torch.randn(video.shape, generator=generator)
        time = torch.rand(2, generator=generator)
        share = time.view(2, 1, 1, 1, 1)
        yield {
            "hidden_states": (1 - share) * video + share * noise,
            "timestep": 1000 * time,
            "encoder_hidden_states": prompt,
            "velocity": noise - video,
        }


def main() -> None:
    torch.manual_seed(0)
    model = build_model()

    applied = lowtide.apply(model, POLICY)  # nothing else in the loop changes

    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-2)
    for step, batch in enumerate(batches()):
        inputs = {name: value.to(DEVICE) for name, value in batch.items()}
        velocity = inputs.pop("velocity")
        loss = F.mse_loss(model(**inputs).sample, velocity)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
    print(applied.report())


if __name__ == "__main__":
    main()
