"""The peak of a step whose blocks run in tiles, attention included: counted on the emulated device."""

from __future__ import annotations

import functools
import gc

import pytest
import torch

import lowtide
from lowtide import simdevice
from models import attentive
from models.tiny import IS_4, transformers
from support import ignore_dropped_caches
from support.devices import DEVICE
from support.foreign_warnings import ignore_warnings_of

pytestmark = [
    ignore_warnings_of("torch", "transformers"),
    ignore_dropped_caches,
    pytest.mark.skipif(IS_4, reason="transformers 4 hands out no eager attention"),
]

LAYERS, WIDTH, HEADS, KEY_HEADS, TILES = 2, 64, 4, 1, 16


@functools.cache
def peak(policy: str, tokens: int) -> float:
    """Return the peak of a step over weights, their gradients and the batch, in units of one bf16 hidden state."""
    config = transformers.Qwen3Config(
        vocab_size=128,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=tokens,
    )
    model = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    model.train().to(DEVICE)
    ids = torch.randint(0, 128, (1, tokens)).to(DEVICE)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    size = tokens // TILES
    sizes = {"recompute": "", "recompute+tile": f"(tokens={size}, loss_tokens={size})"}
    settings = sizes.get(policy, f", tokens={size}, loss_tokens={size})")
    with lowtide.apply(model, policy.removesuffix(")") + settings):
        model(input_ids=ids[:, : 2 * size], labels=ids[:, : 2 * size]).loss.backward()
        torch.accelerator.synchronize()
        gc.collect()
        simdevice.reset()
        before = simdevice.stats().live_bytes
        model(input_ids=ids, labels=ids).loss.backward()
        torch.accelerator.synchronize()
        assert simdevice.violations() == []
        return (simdevice.stats().peak_bytes - before) / (tokens * WIDTH * 2)


def test_the_peak_is_a_third_of_what_tiled_mlps_leave(sim):
    """Both are of whole steps, over weights, their gradients and the batch; inputs of both layers are in both."""
    assert peak("recompute+tile", 8192) <= peak("recompute+tile(mlp, loss)", 8192) / 3


def test_only_inputs_keys_and_values_are_whole(sim):
    """Beside them there is what `recompute` has at its peak, of one tile, and sums of weight gradients in float32."""
    tokens = 4096
    states = LAYERS + 2  # the inputs of the layers, and the gradients of the last one's output and input
    keys_values = 2 * KEY_HEADS / HEADS
    rotations = 2 / HEADS  # cosines and sines
    whole = states + rotations + keys_values + 2 * keys_values  # whose gradients are in float32
    layer = 2 * WIDTH**2 + 2 * WIDTH**2 * KEY_HEADS // HEADS + 9 * WIDTH**2
    sums = (layer + 128 * WIDTH) * 4 / (tokens * WIDTH * 2)
    assert peak("recompute+tile", tokens) <= whole + peak("recompute", tokens) / TILES + sums


def test_the_peak_grows_with_the_tokens_and_no_faster(sim):
    lengths = (2048, 4096, 8192)
    found = [peak("recompute+tile", tokens) for tokens in lengths]
    assert found == sorted(found, reverse=True), "sums of weight gradients take the same bytes at every length"
    assert found[-1] > found[0] / 2


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("keep", ["", "(keep=attention)"])
def test_tiles_send_no_more_to_the_host(sim, keep, padded):
    """What leaves is each region's input, and attention if it is kept (tiles of more than 4 KiB); nothing of K or V."""
    model, batch = attentive.make("llama", dtype=torch.float32).to(DEVICE), attentive.batch("llama", rows=2, length=96)
    if padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, :5] = 0
    batch = {name: value.to(DEVICE) for name, value in batch.items()}
    expected = attentive.step(model, batch)
    figures = {}
    for policy in (f"recompute{keep}+offload", f"recompute{keep}+offload+tile(attention, mlp, tokens=48)"):
        with lowtide.apply(model, policy) as applied:
            assert attentive.error(attentive.step(model, batch), expected) <= 1e-4
            report = applied.report()
            figures[policy] = [region.packed_bytes for region in report.regions]
            if "tile" in policy:
                names = {region.name for region in report.regions}
                assert all(tiles.tiles >= 4 for tiles in report.tiles if tiles.name in names)
    whole, tiled = figures.values()
    assert whole == tiled
    assert whole[0] > 0
