"""Knows which region runs, in forward and in backward, without a place in the graph.

In forward, module hooks tell. In backward, a hook on the tensor that a region returned fires when its gradient is
ready, which is when the region's own backward begins; a hook on the tensor that it was given fires at its end.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from torch import nn

    from lowtide.planning.blank import Ledger
    from lowtide.planning.parallel import Parallel
    from lowtide.regions import Region


class Watch:
    """Tells the ledger and the engine's model where the step is."""

    def __init__(self, ledger: Ledger, regions: list[Region], parallel: Parallel) -> None:
        self.ledger = ledger
        self._regions = regions
        self._parallel = parallel
        self._handles: list[Any] = []
        self._entered = 0.0
        self.seconds: dict[str, dict[str, float]] = collections.defaultdict(dict)

    def __enter__(self) -> Self:
        for region in self._regions:
            name, module = region.name, region.module
            self._handles.append(module.register_forward_pre_hook(self._on_entry(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._on_exit(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _on_entry(self, name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._parallel.enter(name, "forward")
            self.ledger.blocks.append(name)
            self._entered = self.ledger.clock.compute.time
            tensor = _differentiable((args, kwargs))
            if tensor is not None:
                tensor.register_hook(lambda _: self._leave_backward(name))  # type: ignore[no-untyped-call]

        return hook

    def _on_exit(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            self.ledger.blocks.pop()
            self._note("forward", name)
            self._parallel.leave(name, "forward")
            tensor = _differentiable(output)
            if tensor is not None:
                tensor.register_hook(lambda _: self._enter_backward(name))  # type: ignore[no-untyped-call]

        return hook

    def _enter_backward(self, name: str) -> None:
        if self.ledger.blocks[-1] != name:
            if self.ledger.blocks[-1]:
                self._leave_backward(self.ledger.blocks[-1])
            self.ledger.blocks[:] = [name]
            self._entered = self.ledger.clock.compute.time
            self._parallel.enter(name, "backward")

    def _leave_backward(self, name: str) -> None:
        if self.ledger.blocks[-1] == name:
            self.ledger.blocks[:] = [""]
            self._note("backward", name)
            self._parallel.leave(name, "backward")

    def end_backward(self) -> None:
        """Backward is over. The first region's may have had no input to tell of its end: frozen embeddings."""
        if self.ledger.blocks[-1]:
            self._leave_backward(self.ledger.blocks[-1])

    def _note(self, phase: str, name: str) -> None:
        so_far = self.seconds[phase].get(name, 0.0)
        self.seconds[phase][name] = so_far + self.ledger.clock.compute.time - self._entered


def _differentiable(tree: Any) -> torch.Tensor | None:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return next((tensor for tensor in tensors if tensor.requires_grad and tensor.is_floating_point()), None)
