"""Tiny transformers models with random weights, and a fitting batch each: nothing is downloaded."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

IS_4 = Version(transformers.__version__) < Version("5")
"""Whether this is the oldest supported series, which `make test-compat` runs with."""


def llama():
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ids = torch.randint(0, 128, (2, 24))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def qwen3_vl():
    text = {
        "vocab_size": 160,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},  # every version reads this name
        "rope_theta": 10000.0,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=150,
        video_token_id=151,
        vision_start_token_id=152,
        vision_end_token_id=153,
    )
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
    image_tokens = grid.prod(-1) // 4
    ids = torch.randint(0, 100, (1, 40))
    start = 1
    for count in image_tokens.tolist():
        ids[0, start] = 152
        ids[0, start + 1 : start + 1 + count] = 150
        ids[0, start + 1 + count] = 153
        start += count + 3
    batch = {
        "input_ids": ids,
        "labels": ids,
        "pixel_values": torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 4 * 4),
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == 150).long(),
    }
    return transformers.Qwen3VLForConditionalGeneration(config), batch
