"""Buffers that a forward changes: running statistics, power iterations, counters.

A recomputation would change them a second time, and where it reads them it would compute something else. So a module's
first run notes what its changing buffers held before; every later run finds those values, and leaves the buffers as it
found them. They are written behind autograd's back (`.data`): a batch norm saves its statistics without reading them in
training, and its own updates are not counted as changes either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

if TYPE_CHECKING:
    from collections.abc import Callable


def run_once_for_buffers(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` itself, unless it is a module with buffers or a method of one: then it changes them only once."""
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if not isinstance(module, nn.Module):
        return function
    candidates = [buffer for buffer in module.buffers() if buffer.dtype is not torch.bool]  # no masks
    return _OnceForBuffers(function, module, candidates) if candidates else function


class _OnceForBuffers:
    """A module's forward, run again and again."""

    def __init__(self, function: Callable[..., Any], module: nn.Module, candidates: list[Tensor]) -> None:
        self._function = function
        self._module = module
        self._candidates: list[Tensor] | None = candidates
        self._before: list[tuple[Tensor, Tensor]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._candidates is not None:
            return self._first_run(self._candidates, args, kwargs)
        after = [(buffer, buffer.detach().clone()) for buffer, _ in self._before]
        _write(self._before)
        try:
            return self._function(*args, **kwargs)
        finally:
            _write(after)

    def _first_run(self, candidates: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        statistics = _running_statistics(self._module)
        before = [(buffer, buffer.detach().clone(), buffer._version) for buffer in candidates]
        result = self._function(*args, **kwargs)
        self._candidates = None
        self._before = [
            (buffer, value)
            for buffer, value, version in before
            if buffer._version != version or any(buffer is statistic for statistic in statistics)
        ]
        return result


def _running_statistics(module: nn.Module) -> list[Tensor]:
    """Norms update them in one fused operator, which does not count as a change of the tensor."""
    return [
        buffer
        for part in module.modules()
        if isinstance(part, _NormBase) and part.training and part.track_running_stats
        for buffer in part.buffers(recurse=False)
    ]


def _write(values: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, value in values:
        buffer.data.copy_(value)
