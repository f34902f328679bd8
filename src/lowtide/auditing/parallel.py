"""Models under DDP: the reference is the plain model on every rank's own batch, its gradients averaged over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch import Tensor, nn


def is_parallel(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel)


def inner(model: nn.Module) -> nn.Module:
    """The model inside of DDP, whose names are the ones that people know."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def averaged(gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """What DDP should make of each rank's gradients. Where one rank has none, the others' count as they are."""
    found: dict[str, Tensor | None] = {}
    for name, gradient in gradients.items():
        has_one = torch.tensor([float(gradient is not None)])
        dist.all_reduce(has_one)
        if not float(has_one):
            found[name] = None
            continue
        total = _shared_shape(gradient)
        dist.all_reduce(total)
        found[name] = total / dist.get_world_size()
    return found


def _shared_shape(gradient: Tensor | None) -> Tensor:
    shapes: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, None if gradient is None else tuple(gradient.shape))
    shape = next(shape for shape in shapes if shape is not None)
    return torch.zeros(shape) if gradient is None else gradient.clone()


def differ_between_ranks(gradients: dict[str, Tensor | None]) -> list[str]:
    """Names of the gradients that are not the same bits on every rank."""
    sums = {name: None if g is None else float(g.double().norm()) for name, g in gradients.items()}
    everybody: list[dict[str, float | None]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, sums)
    return [name for name in sums if len({others[name] for others in everybody}) > 1]
