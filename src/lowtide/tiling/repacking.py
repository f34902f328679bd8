"""Knows the layers that pack their weights anew in a call: bitsandbytes' 4-bit ones, in evaluation on some CPUs.

Their first call without gradients in evaluation changes the weight for good, to a form that a kernel for CPUs with
AVX512-BF16 reads. From then on no gradient goes through the layer, in training either, and no error tells. So a trial,
or a pass of tiles that no gradient is asked of, must not be that call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide._torch import parts_of
from lowtide.errors import OddCallError

if TYPE_CHECKING:
    from torch import nn


def keep_packing(twin: nn.Module) -> None:
    """Leave such layers in training, in a twin that shares their weights. They draw nothing random."""
    for part in twin.modules():
        if _repacks(part):
            part.training = True


def refuse_repacking(module: nn.Module | None, tensor: torch.Tensor) -> None:
    """Refuse a block in evaluation that a gradient is asked of: its tiles also run without one."""
    if module is None or tensor.device.type != "cpu" or not torch.is_grad_enabled():
        return
    if any(not part.training and _repacks(part) for part in parts_of([module])):
        raise OddCallError(
            "in evaluation, its layers of bitsandbytes pack their weights for good in a call without gradients, which "
            "tiles make: call model.train() before training"
        )


def _repacks(module: nn.Module) -> bool:
    return any(kind.__module__.partition(".")[0] == "bitsandbytes" for kind in type(module).__mro__)
