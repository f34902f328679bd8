"""A few steps on the emulated accelerator, and how they went."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

import lowtide
from lowtide import simdevice
from lowtide.demo.small_vlm import build, make_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

POLICY = "recompute+offload"


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """How one way of training went."""

    losses: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    milliseconds: float = 0.0
    """Of one step, on the device's clock."""
    error: str = ""
    report: str = ""


def plain() -> tuple[nn.Module, None]:
    """The model as it is."""
    return build(), None


def their_flag() -> tuple[nn.Module, None]:
    """transformers' own switch, which calls torch's checkpoint."""
    model = build()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model, None


def ours() -> tuple[nn.Module, lowtide.Applied]:
    """Blocks are recomputed, and their inputs wait in pinned host memory."""
    model = build()
    return model, lowtide.apply(model, POLICY)


def train(make: Callable[[], tuple[nn.Module, lowtide.Applied | None]], steps: Iterable[int]) -> Outcome:
    """AdamW on the device; running out of its memory ends it."""
    model, applied = make()
    model.to("sim")
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-2)
    batch = {name: tensor.to("sim") for name, tensor in make_batch().items()}
    simdevice.reset()
    outcome = Outcome()
    try:
        for _ in steps:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outcome.losses.append(loss.item())
    except torch.OutOfMemoryError as error:
        outcome.error = str(error)
    stats = simdevice.stats()
    outcome.peak_bytes = stats.peak_bytes
    outcome.milliseconds = stats.time * 1e3 / max(1, len(outcome.losses))
    outcome.report = str(applied.report()) if applied else ""
    return outcome
