"""Adapters on 4-bit weights of bitsandbytes, on two ranks: DDP with whole weights, and FSDP2 with shards of them."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from models import quantized
from support.launcher import run_ranks

pytest.importorskip("bitsandbytes")

POLICIES = ["recompute+tile(mlp, tokens=8)", "recompute+tile(attention, loss, tokens=8, loss_tokens=8)"]


@pytest.fixture
def folder(tmp_path) -> str:
    quantized.plain().save_pretrained(tmp_path)
    return str(tmp_path)


def build(folder: str, storage: str) -> torch.nn.Module:
    return quantized.adapted(quantized.load(folder, quantized.nf4_config(storage=storage)))


def batch(rank: int) -> torch.Tensor:
    torch.manual_seed(10 + rank)
    return torch.randint(0, quantized.SIZES["vocab_size"], (2, 16 + 8 * rank))


def in_ddp(rank: int, folder: str) -> list[dict]:
    return [gradients(rank, folder, policy, DistributedDataParallel) for policy in POLICIES]


def in_fsdp2(rank: int, folder: str) -> list[dict]:
    """Shards have the type of the layer's other weights, as bitsandbytes' `quant_storage` is meant for."""
    return [gradients(rank, folder, policy, sharded, storage="float32") for policy in POLICIES]


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    packed = model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    assert packed.to_local().nbytes == 64 * 128 // 2 // 2, "half a byte per weight, on two ranks"
    return model


def gradients(rank: int, folder: str, policy: str, wrap, storage: str = "uint8") -> dict:
    model = build(folder, storage)
    applied = lowtide.apply(model, policy)
    ids = batch(rank)
    wrapped = wrap(model)
    wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    report = applied.report()
    assert all(region.recomputes == 1 for region in report.regions)
    assert any(ledger.tiles > ledger.calls for ledger in report.tiles)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).numpy() for name, g in found.items()}


@pytest.mark.parametrize("run", [in_ddp, in_fsdp2], ids=["ddp", "fsdp2"])
def test_gradients_are_those_of_the_joined_batch(run, folder):
    model = build(folder, "uint8")
    one, two = (quantized.step(model, batch(rank)) for rank in range(2))
    expected = {name: (one[name] + two[name]) / 2 for name in one}
    for per_policy in run_ranks(run, folder):
        assert len(per_policy) == len(POLICIES)
        for found in per_policy:
            ours = {"loss": expected["loss"]} | {name: torch.from_numpy(value) for name, value in found.items()}
            assert quantized.error(ours, expected) < 1e-5
