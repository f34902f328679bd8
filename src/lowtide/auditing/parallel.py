"""Models under DDP: the reference is the plain model on every rank's own batch, its gradients averaged over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lowtide.auditing.comparing import checksum

if TYPE_CHECKING:
    from torch import Tensor, nn


def is_parallel(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel)


def inner(model: nn.Module) -> nn.Module:
    """The model inside of DDP, whose names are the ones that people know."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def averaged(gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """What DDP should make of each rank's gradients. Where one rank has none, the others' count as they are: it adds
    zeros of their kind, on the device of its own gradients, because all ranks must go to the same backend."""
    device = next((gradient.device for gradient in gradients.values() if gradient is not None), torch.device("cpu"))
    own_kinds = {name: (tuple(g.shape), g.dtype) for name, g in gradients.items() if g is not None}
    kinds = {name: kind for others in _everybodys(own_kinds) for name, kind in others.items()}
    found: dict[str, Tensor | None] = dict.fromkeys(gradients)
    for name in (name for name in gradients if name in kinds):
        own, (shape, dtype) = gradients[name], kinds[name]
        total = torch.zeros(shape, dtype=dtype, device=device) if own is None else own.clone()
        dist.all_reduce(total)
        found[name] = total / dist.get_world_size()
    return found


def differ_between_ranks(gradients: dict[str, Tensor | None]) -> list[str]:
    """Names of the gradients that are not the same bits on every rank."""
    sums = {name: None if gradient is None else checksum(gradient) for name, gradient in gradients.items()}
    everybody = _everybodys(sums)
    return [name for name in sums if len({others[name] for others in everybody}) > 1]


def _everybodys(own: dict[str, Any]) -> list[dict[str, Any]]:
    """The ranks' own ones, in their order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered
