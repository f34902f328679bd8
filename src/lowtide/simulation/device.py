"""Puts a simulated accelerator in torch's place: the clock's streams and events, and the kernels a GPU would take.

Every patch is made on entering and undone on leaving. A plan still simulates in a separate process, so that even an
interrupted one leaves nothing behind in the user's.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import differentiable_kernel, import_dynamo, no_dispatch_modes
from lowtide.errors import PlanError
from lowtide.simulation.clock import Event, Stream
from lowtide.tiling import attention_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.simulation.attention import Attention
    from lowtide.simulation.clock import Clock


@contextlib.contextmanager
def simulated_device(clock: Clock, attention: Attention) -> Iterator[None]:
    """Let torch's streams and events be `clock`'s inside, and let attention take the accelerator's kernels."""
    import_dynamo()  # the first operation would import it, and it inherits from torch.Stream
    with contextlib.ExitStack() as stack:
        if attention.device_type == "cuda":
            stack.enter_context(differentiable_kernel("dropout", _dropout, "meta"))
        for target, name, replacement in _patches(clock, attention):
            stack.callback(setattr, target, name, getattr(target, name))
            setattr(target, name, replacement)
        yield


def _patches(clock: Clock, attention: Attention) -> Iterator[tuple[Any, str, Any]]:
    yield torch, "tensor", _tensor_through_the_dispatcher
    yield torch.autocast, "__init__", _autocast
    yield torch.nn.functional, "scaled_dot_product_attention", attention
    yield torch.backends.cuda, "can_use_flash_attention", attention.can_use_flash
    yield attention_kernels, "META_STANDS_FOR", attention.device_type
    yield attention_kernels, "run_kernel", attention.counted(attention_kernels.run_kernel)
    yield torch, "Stream", lambda device=None, **_: Stream(clock)  # noqa: ARG005
    yield torch, "Event", lambda *_, **__: Event(clock)
    yield torch.accelerator, "current_stream", lambda *_: clock.current
    yield torch.accelerator, "synchronize", lambda *_: clock.synchronize()
    yield torch.accelerator, "is_available", lambda: True
    for name in ("transformers.masking_utils", "transformers.modeling_attn_mask_utils"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "is_tracing"):  # else it would build the square of a causal mask
            yield module, "is_tracing", lambda *_: False


_torch_tensor, _torch_autocast = torch.tensor, torch.autocast.__init__


def _autocast(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **kwargs: Any) -> None:
    """Make an autocast for the CPU's tensors, or one that is switched off: meta tensors have none.

    Models switch it off around parts that need precision. One that switches it on is refused: its casts would be
    missing from the plan.
    """
    if device_type != "cpu" and enabled:
        raise PlanError(
            f"the model's forward switches on torch.autocast for {device_type!r}, whose casts are not simulated: plan "
            "it without that, with weights in 16 bits (dtype='bf16', and masters=True for float32 copies)"
        )
    _torch_autocast(self, "cpu", dtype if device_type == "cpu" else None, enabled, **kwargs)


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002
    """Drop numbers as CUDA's fused kernel does, which keeps a byte of mask for each.

    On meta tensors, torch multiplies with noise as wide as the input and keeps that. Whoever calls it, a module, a
    function or attention in its mathematical form, ends in this operator; to drop in place is another one.
    Source: aten/src/ATen/native/Dropout.cpp, `dropout` and `is_fused_kernel_acceptable`.
    """
    if not train or p == 0 or not input.numel():
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    out: torch.Tensor = torch.ops.aten.native_dropout(input, p, train)[0]
    return out


def _tensor_through_the_dispatcher(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """Make a tensor so that the ledger sees its copy to the device: `torch.tensor` fills memory behind its back."""
    numbers = _without_tensors(data)
    with no_dispatch_modes():
        real = _torch_tensor(numbers, *args, **kwargs)
    return real if device is None else real.to(device)


def _without_tensors(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.tolist()
    return [_without_tensors(item) for item in data] if isinstance(data, list | tuple) else data
