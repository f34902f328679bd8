"""Trains the workload under many policies at once: twins of one model that share its weights, each under one policy."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from typing import TYPE_CHECKING

import torch

import lowtide
from lowtide.selftest.models import workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from lowtide.selftest.bench import Bench
    from lowtide.selftest.models import Batch

PLAIN = "none"


@dataclasses.dataclass(frozen=True)
class Twin:
    """The workload under one policy."""

    policy: str
    model: nn.Module
    batch: Batch
    optimizer: torch.optim.Optimizer
    applied: lowtide.Applied | None

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self.model(**self.batch).loss
        return loss

    def finish(self) -> None:
        """Update the weights and free their gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Run one step of training."""
        self.forward().backward()  # type: ignore[no-untyped-call]
        self.finish()

    @property
    def moved_bytes(self) -> int:
        """Bytes that have gone to a store so far."""
        return 0 if self.applied is None else sum(region.packed_bytes for region in self.applied.report().regions)


@contextlib.contextmanager
def twins(bench: Bench, policies: Iterable[str]) -> Iterator[dict[str, Twin]]:
    """Build the workload under each policy. All twins train the same weights, which are on the device once.

    Each has made one step inside, so that allocators have what they need and optimizers have their states.
    """
    model, batch = workload(bench.work, bench.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shared = {id(parameter): parameter for parameter in model.parameters()}
    with contextlib.ExitStack() as stack:
        made = {}
        for policy in policies:
            bench.show(f"preparing {policy}")
            twin = copy.deepcopy(model, dict(shared))
            applied = None if policy == PLAIN else stack.enter_context(lowtide.apply(twin, bench.offload(policy)))
            made[policy] = Twin(policy, twin, batch, optimizer, applied)
            made[policy].step()
        gc.collect()  # what is left in cycles must not vanish in the middle of a measurement
        yield made
    del model, batch, optimizer, shared, made
    gc.collect()
