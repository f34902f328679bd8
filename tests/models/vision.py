"""Tiny diffusion and vision models of diffusers and timm with random weights, and a batch each."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

diffusers = pytest.importorskip("diffusers", reason="make test-vision installs it")
timm = pytest.importorskip("timm", reason="make test-vision installs it")


class Specimen(NamedTuple):
    model: nn.Module
    batch: dict[str, Any]


def unet() -> Specimen:
    model = diffusers.UNet2DConditionModel(
        sample_size=16, layers_per_block=2, block_out_channels=(32, 64), norm_num_groups=8, cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=8,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return Specimen(model, {"sample": torch.randn(2, 4, 16, 16), **conditions(32)})


def sd3() -> Specimen:
    model = diffusers.SD3Transformer2DModel(
        sample_size=16, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16,
    )  # fmt: skip
    pooled = {"pooled_projections": torch.randn(2, 16)}
    return Specimen(model, {"hidden_states": torch.randn(2, 4, 16, 16), **conditions(32), **pooled})


def flux() -> Specimen:
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    batch = {"hidden_states": torch.randn(2, 16, 4), "pooled_projections": torch.randn(2, 16), **conditions(32)}
    positions = {"img_ids": torch.randint(0, 4, (16, 3)).float(), "txt_ids": torch.zeros(6, 3)}
    return Specimen(model, batch | positions)


def wan() -> Specimen:
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=64, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    return Specimen(model, {"hidden_states": torch.randn(2, 4, 3, 8, 8), **conditions(16)})


def hunyuan_video() -> Specimen:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2, num_single_layers=2,
        num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    pooled = {"pooled_projections": torch.randn(2, 8), "guidance": torch.tensor([1.0, 2.0])}
    mask = {"encoder_attention_mask": torch.tensor([[1.0] * 6, [1.0] * 4 + [0.0] * 2])}
    return Specimen(model, {"hidden_states": torch.randn(2, 4, 3, 8, 8), **conditions(16), **pooled, **mask})


def ltx() -> Specimen:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        num_layers=2, caption_channels=16,
    )  # fmt: skip
    sizes = {"num_frames": 3, "height": 4, "width": 4, "encoder_attention_mask": torch.ones(2, 6)}
    return Specimen(model, {"hidden_states": torch.randn(2, 48, 8), **conditions(16), **sizes})


def autoencoder() -> Specimen:
    model = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32), norm_num_groups=8, latent_channels=4,
    )  # fmt: skip
    return Specimen(model, {"sample": torch.randn(2, 3, 16, 16)})


def conditions(width: int) -> dict[str, torch.Tensor]:
    """The times of a denoising step and a prompt of six tokens."""
    return {"timestep": torch.tensor([3, 7]), "encoder_hidden_states": torch.randn(2, 6, width)}


def of_timm(name: str, **settings: Any) -> Specimen:
    return Specimen(timm.create_model(name, num_classes=10, **settings), {"x": torch.randn(2, 3, 32, 32)})


SMALL = {"img_size": 32, "patch_size": 4, "depth": 2, "embed_dim": 32, "num_heads": 4}
STAGES = {"depths": (2, 2, 2, 2), "dims": (8, 16, 16, 32)}

MODELS = {
    "UNet2DCondition": unet,
    "SD3": sd3,
    "Flux": flux,
    "Wan": wan,
    "HunyuanVideo": hunyuan_video,
    "LTX": ltx,
    "AutoencoderKL": autoencoder,
    "ViT": lambda: of_timm("vit_tiny_patch16_224", **SMALL),
    "EVA-02": lambda: of_timm("eva02_tiny_patch14_224", **SMALL),
    "Swin": lambda: of_timm(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)
    ),
    "ConvNeXt": lambda: of_timm("convnext_tiny", **STAGES),
    "ConvNeXt of convolutions": lambda: of_timm("convnext_atto", **STAGES),
    "EfficientNet": lambda: of_timm("efficientnet_b0"),
    "RegNet": lambda: of_timm("regnetx_002"),
}


def specimen(name: str) -> Specimen:
    """Return a model in training mode, with weights that are large enough for every part to matter."""
    torch.manual_seed(0)
    made = MODELS[name]()
    for parameter in made.model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    made.model.train()
    return made
