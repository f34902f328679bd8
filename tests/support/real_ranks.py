"""A real training step on one of several ranks that share a batch, and what the profiler says about its memory.

Peaks are measured with torch's `fake` process group, in which exchanges do nothing: gloo's threads hold what they send
for a while, longer in one run than in the next, so that a peak under gloo is never the same twice.
"""

from __future__ import annotations

import collections
import contextlib
import gc
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from support.real_steps import profiled_peak, train

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def standing_bytes(model: nn.Module, batch: dict[str, Any]) -> int:
    """This rank's weights, buffers and batch."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *batch.values())}
    return sum(_local(tensor).nbytes for tensor in tensors.values())


def measured_peak(model: nn.Module, batch: dict[str, Any], policy: str) -> int:
    """The peak of this rank's step with plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    with lowtide.apply(model, policy):
        train(model, batch, optimizer)
        with _without_garbage(model):
            return standing_bytes(model, batch) + profiled_peak(lambda: train(model, batch, optimizer))


def counted_exchanges(model: nn.Module, batch: dict[str, Any], policy: str) -> dict[str, int]:
    """How often this rank exchanges something in a step, by kind."""
    with lowtide.apply(model, policy), Exchanges() as exchanges:
        train(model, batch)
    return dict(exchanges.counts)


@contextlib.contextmanager
def _without_garbage(model: nn.Module) -> Iterator[None]:
    """Look for garbage often: DTensors lie in cycles, which hold logits and hidden states until then."""

    def collect(*_: Any) -> None:
        gc.collect()

    def collect_before_backward(_model: nn.Module, _args: Any, output: Any) -> None:
        output.loss.register_hook(collect)

    gc.collect()
    gc.freeze()  # what is there already need not be looked through each time
    leaves = (module for module in model.modules() if not any(module.children()))
    hooks = [module.register_forward_hook(collect) for module in leaves]
    hooks.append(model.register_forward_hook(collect_before_backward))
    hooks += [weight.register_post_accumulate_grad_hook(collect) for weight in model.parameters()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        gc.unfreeze()


class Exchanges(TorchDispatchMode):
    """Counts collectives, below DTensor, and in backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.counts.update(_kinds(func))
        return func(*args, **(kwargs or {}))


def _kinds(func: Any) -> Iterator[str]:
    if func.namespace in ("c10d", "_c10d_functional"):
        name = func._schema.name.partition("::")[2].replace("allreduce", "all_reduce").replace("alltoall", "all_to_all")
        yield from (kind for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") if kind in name)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
