"""Blocks in tiles whose attention reaches the tokens of other ranks: refused by name, or left alone and right."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import lowtide
from lowtide.errors import NotTokenWiseError
from models import attentive
from models.tiny import IS_4
from support import ignore_dropped_caches
from support.deepspeed_on_sim import use_cpu
from support.foreign_warnings import ignore_warnings_of
from support.launcher import run_ranks

pytestmark = [
    ignore_warnings_of("torch", "transformers"),
    ignore_dropped_caches,
    pytest.mark.skipif(IS_4, reason="transformers 4 hands out no eager attention"),
]


def replaced_attention(*args, **kwargs):
    return torch._C._nn.scaled_dot_product_attention(*args, **kwargs)


def test_a_replaced_attention_of_torch_is_refused_or_left_alone(monkeypatch):
    model, batch = attentive.make("llama"), attentive.batch("llama")
    expected = attentive.step(model, batch)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", replaced_attention)
    with (
        lowtide.apply(model, "recompute+tile(attention, tokens=12)"),
        pytest.raises(NotTokenWiseError, match="with its attention: its attention is replaced by one that may reach"),
    ):
        model(**batch)
    with lowtide.apply(model, "recompute+tile(attention, mlp, tokens=12)") as applied:
        assert attentive.error(attentive.step(model, batch), expected) <= 1e-6
        names = {region.name for region in applied.regions}
        assert all("replaced" in tiles.left_alone for tiles in applied.report().tiles if tiles.name in names)


def in_context_parallel(rank: int) -> str:
    """Return how a step with torch's context parallelism is refused."""
    mesh = init_device_mesh("cpu", (2,))
    model, ids = attentive.make("llama", dtype=torch.float32), attentive.batch("llama", length=32)["input_ids"]
    positions = torch.arange(32).expand(ids.shape[0], -1).contiguous()
    lowtide.apply(model, "recompute+tile(attention, tokens=12)")
    with context_parallel(mesh, buffers=[ids, positions], buffer_seq_dims=[1, 1]):
        try:
            model(input_ids=ids, position_ids=positions, use_cache=False)
        except NotTokenWiseError as error:
            return str(error)
    return "not refused"


def test_context_parallelism_is_refused():
    assert all("model.layers.0" in text and "context parallelism" in text for text in run_ranks(in_context_parallel))


def under_ulysses(rank: int) -> str:
    """Return how a step with DeepSpeed's Ulysses is refused."""
    use_cpu()
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed("gloo")
    model, batch = attentive.make("llama", dtype=torch.float32), attentive.batch("llama", length=32)
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=2,
        seq_length=32,
        seq_length_is_variable=True,
    )
    ids = batch["input_ids"].chunk(2, 1)[rank]
    positions = torch.arange(32).chunk(2)[rank].expand_as(ids)
    lowtide.apply(model, "recompute+tile(attention, tokens=8)")
    try:
        model(input_ids=ids, position_ids=positions, use_cache=False)
    except NotTokenWiseError as error:
        return str(error)
    return "not refused"


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the deepspeed extra is not installed")
def test_ulysses_is_refused():
    assert all("model.layers.0" in text and "Ulysses" in text for text in run_ranks(under_ulysses, timeout=300))
