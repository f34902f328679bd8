"""Trains the workload under many policies at once: twins of one model that share its weights, each under one policy."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import lowtide
from lowtide.selftest.models import workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from lowtide.selftest.bench import Bench
    from lowtide.selftest.findings import Findings
    from lowtide.selftest.models import Batch

T = TypeVar("T")

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

    def measured(self, found: Findings, name: str, run: Callable[..., T], *arguments: Any) -> T | None:
        """Return what a measurement of this twin's steps returns; None if it failed, which `found` then says."""
        result = found.attempt(name, run, *arguments)
        if result is None:  # a step that raised leaves gradients, which the next twin would be measured with
            self.optimizer.zero_grad()
        return result

    @property
    def moved_bytes(self) -> int:
        """Bytes that have gone to a store so far."""
        return 0 if self.applied is None else sum(region.packed_bytes for region in self.applied.report().regions)


@contextlib.contextmanager
def twins(bench: Bench, policies: Iterable[str], found: Findings) -> Iterator[dict[str, Twin]]:
    """Build the workload under each policy. All twins train the same weights, which are on the device once.

    Each has made one step inside, so that allocators have what they need and optimizers have their states. A policy
    under which that step raises is missing, and `found` says why.
    """
    model, batch = workload(bench.work, bench.device)
    optimizer = adamw(bench, model)
    plain = Twin(PLAIN, model, batch, optimizer, None)
    with contextlib.ExitStack() as stack:
        made = {}
        for policy in policies:
            bench.show(f"preparing {policy}")
            twin = plain.measured(found, policy, _prepare, bench, plain, policy, stack)
            if twin is not None:
                made[policy] = twin
        gc.collect()  # what is left in cycles must not vanish in the middle of a measurement
        yield made
    del model, batch, optimizer, plain, made
    gc.collect()


def _prepare(bench: Bench, plain: Twin, policy: str, stack: contextlib.ExitStack) -> Twin:
    shared = {id(parameter): parameter for parameter in plain.model.parameters()}
    with contextlib.ExitStack() as undo:
        model = copy.deepcopy(plain.model, dict(shared))
        applied = None if policy == PLAIN else undo.enter_context(lowtide.apply(model, bench.offload(policy)))
        twin = Twin(policy, model, plain.batch, plain.optimizer, applied)
        twin.step()
        stack.push(undo.pop_all())
    return twin


def adamw(bench: Bench, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the workload. In fp16, squares of small gradients are zeros, and epsilon must hold."""
    epsilon = 1e-4 if bench.work.dtype == "fp16" else 1e-8
    return torch.optim.AdamW(model.parameters(), lr=1e-4, eps=epsilon, fused=True)
