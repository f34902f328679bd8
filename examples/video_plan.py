"""Plan LoRA on a video transformer, by frames and resolution: will it fit, and under which policy?

    cd examples
    lowtide plan video_plan:wan_14b_480p --device H100
    python -m video_plan --model wan_14b --frames 81 --height 720 --width 1280 --device H100

The models are Wan 2.1 14B and HunyuanVideo 13B at full size, from diffusers (`pip install diffusers peft`); their
dimensions are the defaults of its classes, which are those of Wan-AI/Wan2.1-T2V-14B-Diffusers and
hunyuanvideo-community/HunyuanVideo. They are built without memory for their weights, so no download and no GPU is
needed. For your own model, change `transformer` and `conditions`; what a plan asks for is a module that returns the
loss, and the arguments of its forward.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import diffusers
import peft
import torch
from torch import nn
from torch.nn import functional as F

import lowtide

Target = tuple[nn.Module, dict[str, Any]]
CHANNELS, TEXT, TEXT_WIDTH = 16, 512, 4096  # of the latents; tokens of the prompt, and how wide they are
LORA = ["to_q", "to_k", "to_v", "to_out.0"]


class FlowMatching(nn.Module):
    """A training step of a flow-matching model: the loss of the velocity that the transformer predicts."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, noisy: torch.Tensor, velocity: torch.Tensor, **conditions: Any) -> torch.Tensor:
        (predicted,) = self.transformer(hidden_states=noisy, return_dict=False, **conditions)
        return F.mse_loss(predicted.float(), velocity.float())


def target(kind: str, frames: int, height: int, width: int, rank: int = 32) -> Target:
    """Return the model with LoRA, and a batch: one video. Latents have a quarter of the frames, an eighth of a side."""
    if (frames - 1) % 4 or height % 16 or width % 16:
        raise SystemExit("frames must be 4 n + 1, and height and width multiples of 16")
    diffusers.utils.logging.set_verbosity_error()  # Wan's norms are loaded in float32: a few megabytes
    with torch.device("meta"):
        model = transformer(kind).requires_grad_(False).to(torch.bfloat16)
        model.add_adapter(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=LORA))
        for parameter in (one for one in model.parameters() if one.requires_grad):
            parameter.data = parameter.data.float()  # as PEFT makes them beside weights in bf16
        latents = torch.empty(1, CHANNELS, (frames - 1) // 4 + 1, height // 8, width // 8, dtype=torch.bfloat16)
        batch = {"noisy": latents, "velocity": torch.empty_like(latents), **conditions(kind)}
    return FlowMatching(model).train(), {**batch, "timestep": torch.tensor([500], device="cpu")}


def transformer(kind: str) -> nn.Module:
    if kind == "wan_14b":
        return diffusers.WanTransformer3DModel()  # 40 layers, 5120 wide, 40 heads, MLPs 13824 wide
    return diffusers.HunyuanVideoTransformer3DModel()  # 20 + 40 layers, 3072 wide, 24 heads, MLPs 12288 wide


def conditions(kind: str) -> dict[str, torch.Tensor]:
    prompt = torch.empty(1, TEXT, TEXT_WIDTH, dtype=torch.bfloat16)
    if kind == "wan_14b":
        return {"encoder_hidden_states": prompt}
    return {
        "encoder_hidden_states": prompt,
        "encoder_attention_mask": torch.ones(1, TEXT, device="cpu"),
        "pooled_projections": torch.empty(1, 768, dtype=torch.bfloat16),
        "guidance": torch.tensor([6000.0], device="cpu"),
    }


def wan_14b_480p() -> Target:
    return target("wan_14b", 81, 480, 832)


def wan_14b_720p() -> Target:
    return target("wan_14b", 81, 720, 1280)


def hunyuan_13b_720p() -> Target:
    return target("hunyuan_13b", 129, 720, 1280)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan LoRA on a video transformer.")
    parser.add_argument("--model", choices=["wan_14b", "hunyuan_13b"], default="wan_14b")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--policy", help="judge this one alone")
    options = parser.parse_args()
    build = importlib.import_module("video_plan").target  # of a module, and not of this script: plans need to find it
    model, batch = build(options.model, options.frames, options.height, options.width)
    tokens = batch["noisy"].numel() // CHANNELS // 4  # patches of 1 x 2 x 2
    print(f"{options.model}, {options.frames} frames of {options.width} x {options.height}: {tokens:,} tokens")
    print(lowtide.plan(model, batch=batch, device=options.device, policy=options.policy))


if __name__ == "__main__":
    main()
