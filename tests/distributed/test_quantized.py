"""Adapters on quantized weights, on two ranks: DDP with whole weights, and FSDP2 with shards of 4-bit ones."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from models import quantized
from support.launcher import run_ranks

pytest.importorskip("bitsandbytes")

POLICIES = ["recompute+tile(mlp, tokens=8)", "recompute+tile(attention, loss, tokens=8, loss_tokens=8)"]
FORMATS = ["nf4", "bitsandbytes int8", "torchao int8"]


@pytest.fixture
def folder(tmp_path) -> str:
    quantized.plain().save_pretrained(tmp_path)
    return str(tmp_path)


def config(name: str, storage: str = "uint8") -> object:
    if name == "torchao int8":
        torchao = pytest.importorskip("torchao.quantization")
        return transformers.TorchAoConfig(quant_type=torchao.Int8WeightOnlyConfig())
    if name == "bitsandbytes int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return quantized.nf4_config(storage=storage)


def build(folder: str, name: str, storage: str = "uint8") -> torch.nn.Module:
    return quantized.adapted(quantized.load(folder, config(name, storage)))


def batch(rank: int) -> torch.Tensor:
    torch.manual_seed(10 + rank)
    return torch.randint(0, quantized.SIZES["vocab_size"], (2, 16 + 8 * rank))


def in_ddp(rank: int, folder: str, name: str) -> list[dict]:
    """DDP cannot broadcast torchao's tensors when it is made: every rank has loaded the same."""
    wrap = functools.partial(DistributedDataParallel, init_sync=name != "torchao int8")
    return [gradients(rank, folder, name, policy, wrap) for policy in policies(folder)]


def in_fsdp2(rank: int, folder: str, name: str) -> list[dict]:
    """Shards have the type of the layer's other weights, as bitsandbytes' `quant_storage` is meant for."""
    return [gradients(rank, folder, name, policy, sharded, storage="float32") for policy in policies(folder)]


def policies(folder: str) -> list[str]:
    return [*POLICIES, f"recompute+offload(disk={folder}, tmpfs)"]


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    packed = model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    assert packed.to_local().nbytes == 64 * 128 // 2 // 2, "half a byte per weight, on two ranks"
    return model


def gradients(rank: int, folder: str, name: str, policy: str, wrap, storage: str = "uint8") -> dict:
    model = build(folder, name, storage)
    applied = lowtide.apply(model, policy)
    ids = batch(rank)
    wrapped = wrap(model)
    wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    report = applied.report()
    assert all(region.recomputes == 1 for region in report.regions)
    assert any(ledger.tiles > ledger.calls for ledger in report.tiles) == ("tile" in policy)
    assert (report.regions[0].packed_bytes > 0) == ("offload" in policy)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).numpy() for name, g in found.items()}


@pytest.mark.parametrize(
    ("run", "name"), [*[(in_ddp, name) for name in FORMATS], (in_fsdp2, "nf4")], ids=[*FORMATS, "nf4 under fsdp2"]
)
def test_gradients_are_those_of_the_joined_batch(run, name, folder):
    model = build(folder, name)
    one, two = (quantized.step(model, batch(rank)) for rank in range(2))
    expected = {name: (one[name] + two[name]) / 2 for name in one}
    for per_policy in run_ranks(run, folder, name):
        assert len(per_policy) == len(POLICIES) + 1
        for found in per_policy:
            ours = {"loss": expected["loss"]} | {name: torch.from_numpy(value) for name, value in found.items()}
            assert quantized.error(ours, expected) < 1e-5
