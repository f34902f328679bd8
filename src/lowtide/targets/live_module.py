"""Sends a live module to the planning process without its weights: they arrive there as meta tensors.

A plan needs the shapes of weights and not their values. Integers, and small tensors of any kind that are not
parameters, keep their values: sizes, positions and masks decide what a model does.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import nn

from lowtide._torch import pytree
from lowtide.errors import PlanError

MOST_INTEGERS = 1 << 22
MOST_NUMBERS = 1 << 16
INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def has_kept_size(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is small enough to keep its value."""
    return tensor.numel() <= (MOST_INTEGERS if tensor.dtype in INTEGERS else MOST_NUMBERS)


def pickle_without_weights(model: nn.Module, batch: Any) -> bytes:
    """Pickle a module and its batch, with shapes in the place of weights."""
    buffer = io.BytesIO()
    batch = pytree.tree_map_only(torch.Tensor, _with_kept_value, batch)
    try:
        _Pickler(buffer).dump((model, batch))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PlanError(
            f"{type(model).__name__} cannot be sent to the planning process ({error}): plan it as 'MODULE:FACTORY', a "
            "function in an importable module that builds it"
        ) from error
    return buffer.getvalue()


def _with_kept_value(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if has_kept_size(tensor) and not tensor.is_meta else tensor


def unpickle(content: bytes, name: str) -> tuple[nn.Module, Any]:
    """Return the module, its weights on the meta device, and the batch that `pickle_without_weights` was given."""
    try:
        model, batch = pickle.loads(content)  # noqa: S301  (we made it)
    except (AttributeError, ImportError) as error:
        raise PlanError(
            f"{name} cannot be built in the planning process ({error}): its class must be in a module that can be "
            "imported, not in a script"
        ) from error
    return model, batch


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        if type(thing) not in (torch.Tensor, nn.Parameter):
            raise PlanError(
                f"the model has a weight of type {type(thing).__name__}, which cannot be planned from a live model: "
                "plan it by name, with engine= for sharded and base='4bit' for quantized weights"
            )
        is_parameter = isinstance(thing, nn.Parameter)
        if not is_parameter and thing.device.type == "cpu" and has_kept_size(thing):
            return NotImplemented
        return _meta_tensor, (tuple(thing.shape), thing.stride(), thing.dtype, is_parameter, thing.requires_grad)


def _meta_tensor(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    is_parameter: bool,
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return nn.Parameter(tensor, requires_grad=requires_grad) if is_parameter else tensor
