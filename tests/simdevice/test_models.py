"""Real transformers models, from tiny configs with random weights, train on the device."""

from __future__ import annotations

import pytest
import torch

from lowtide import simdevice

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")


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
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
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


@pytest.mark.parametrize("build", [llama, qwen3_vl])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_agrees_with_the_cpu(sim, build, checkpointing):
    results = []
    for device in ("cpu", sim):
        torch.manual_seed(0)
        model, batch = build()
        model.to(device).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(**{name: value.to(device) for name, value in batch.items()}, use_cache=False).loss
        loss.backward()
        results.append([loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for ours, cpu in zip(*results, strict=True):
        torch.testing.assert_close(ours, cpu, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [llama, qwen3_vl])
def test_the_loss_falls_and_no_rule_is_broken(sim, build):
    torch.manual_seed(0)
    model, batch = build()
    model.to(sim).train()
    batch = {name: value.to(sim) for name, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        with torch.autocast(sim, dtype=torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert simdevice.violations() == []
