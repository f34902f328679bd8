"""Pipelines: stages of a model on two ranks, micro-batches in flight, and backward in each schedule's own order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import lowtide
from lowtide import simdevice
from models.mlps import HIDDEN, Gated
from support.foreign_warnings import ignore_warnings_of
from support.launcher import run_ranks, with_backend

pytestmark = ignore_warnings_of("torch", "transformers")

SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "looped": ScheduleLoopedBFS,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zero-bubble, V": ScheduleZBVZeroBubble,
}
LAYERS, MICRO_BATCHES, TOKENS = 8, 4, 40


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN, dtype=torch.double), Gated()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def layers() -> list[Layer]:
    torch.manual_seed(0)
    return [Layer() for _ in range(LAYERS)]


def batch() -> torch.Tensor:
    return torch.randn(MICRO_BATCHES, TOKENS, HIDDEN, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def stages(rank: int, ranks: int, schedule: str) -> list[int]:
    """Return which stages a rank has: one, or two of a ring, or two of a V."""
    if schedule in ("GPipe", "1F1B"):
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if schedule == "zero-bubble, V" else [rank, rank + ranks]


def train(rank: int, schedules: list[str], policy: str, device: str = "cpu") -> dict[str, dict]:
    return {schedule: step(rank, schedule, policy, device) for schedule in schedules}


def step(rank: int, schedule: str, policy: str, device: str) -> dict:
    """Return the gradients of a rank's layers, by their place in the whole model."""
    ranks = dist.get_world_size()
    own = stages(rank, ranks, schedule)
    per_stage = LAYERS // (ranks * len(own))
    everything, parts = layers(), {}
    for index in own:
        parts[index] = nn.Sequential(*everything[index * per_stage : (index + 1) * per_stage]).to(device)
    applied = [lowtide.apply(part, policy) for part in parts.values()]
    made = [PipelineStage(part, index, ranks * len(own), torch.device(device)) for index, part in parts.items()]
    run = SCHEDULES[schedule](made if len(own) > 1 else made[0], MICRO_BATCHES, loss_fn=loss_of)
    has_last = ranks * len(own) - 1 in own
    run.step(*([batch().to(device)] if 0 in own else []), **({"target": batch().to(device)} if has_last else {}))
    for handle in applied:
        report = handle.report()
        assert all(
            region.forwards in (MICRO_BATCHES, MICRO_BATCHES + 1) for region in report.regions
        )  # it infers shapes
        assert all(region.recomputes >= MICRO_BATCHES for region in report.regions)
        assert all(tiled.tiles == 8 * tiled.calls for tiled in report.tiles)
        if "offload" in policy:
            assert all(region.restored_bytes > 0 for region in report.regions[:-1])
    return {
        f"{index * per_stage + place}.{name}": parameter.grad.cpu().numpy()
        for index, part in parts.items()
        for place, layer in enumerate(part)
        for name, parameter in layer.named_parameters()
    }


def check(per_rank: list[dict]) -> None:
    whole = nn.Sequential(*layers())
    loss_of(whole(batch()), batch()).backward()
    for schedule in per_rank[0]:
        found = {name: grad for found in per_rank for name, grad in found[schedule].items()}
        assert len(found) == len(list(whole.parameters()))
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(torch.from_numpy(found[name]), parameter.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_recompute_and_tiles(ranks):
    """Backward runs the micro-batches in another order than forward, and zero-bubble schedules in two halves."""
    check(run_ranks(train, [*SCHEDULES], "recompute+tile(mlp, tokens=5)", ranks=ranks))


class Attending(nn.Module):
    """A stage of Llama's layers, between hidden states."""

    def __init__(self, layers: list[nn.Module], config: transformers.LlamaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden):
        positions = torch.arange(hidden.shape[1])[None]
        turned = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=turned)
        return hidden


def attending() -> tuple[list[nn.Module], transformers.LlamaConfig]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=40, num_attention_heads=2, num_hidden_layers=4, vocab_size=8
    )
    config._attn_implementation = "sdpa"
    return [LlamaDecoderLayer(config, index).double() for index in range(4)], config


def train_attending(rank: int, policy: str) -> dict:
    """Return the gradients of a rank's layers after 1F1B."""
    layers, config = attending()
    part = Attending(layers[2 * rank : 2 * rank + 2], config)
    applied = lowtide.apply(part, policy)
    run = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu")), MICRO_BATCHES, loss_fn=loss_of)
    run.step(*([] if rank else [batch()]), **({"target": batch()} if rank else {}))
    assert all(tiled.tiles == 8 * tiled.calls > 0 for tiled in applied.report().tiles)
    named = part.layers.named_parameters()
    return {f"{int(name[0]) + 2 * rank}{name[1:]}": weight.grad.numpy() for name, weight in named}


def test_tiles_of_attention():
    whole = Attending(*attending())
    loss_of(whole(batch()), batch()).backward()
    found = {
        name: grad
        for part in run_ranks(train_attending, "recompute+tile(attention, tokens=5)")
        for name, grad in part.items()
    }
    for name, parameter in whole.layers.named_parameters():
        torch.testing.assert_close(torch.from_numpy(found[name]), parameter.grad, rtol=1e-9, atol=1e-13)


def test_offload_to_disk(tmp_path):
    check(run_ranks(train, [*SCHEDULES], f"recompute+offload(disk={tmp_path})"))


def enable_sim() -> str:
    simdevice.enable(on_violation="raise")
    return "cpu:gloo,sim:sim_gloo"


@with_backend(enable_sim)
def train_on_sim(rank: int, schedules: list[str], policy: str) -> dict:
    return train(rank, schedules, policy, "sim")


def test_offload_on_the_emulated_device():
    """It raises if a copy is not waited for. The other schedules send both ways at once, which would wait for ever."""
    check(run_ranks(train_on_sim, ["GPipe", "zero-bubble"], "recompute+offload+tile(mlp, tokens=5)"))
