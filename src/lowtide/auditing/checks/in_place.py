"""Is it noticed if a tensor that backward needs is changed in place?

The input of a block is changed between forward and backward. Autograd refuses the backward then. An engine whose hooks
lose that check computes a wrong gradient; one that copied the input before may compute the right one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide._torch import pytree
from lowtide.auditing.comparison import compare
from lowtide.auditing.result import CheckResult, Verdict
from lowtide.auditing.step import gradients_with
from lowtide.modules import named_modules

if TYPE_CHECKING:
    from lowtide.auditing.case import Case

_NAME = "in-place changes"


def refused(case: Case) -> CheckResult:
    """Check that backward raises after the last recomputed block's input was changed, or still is right."""
    block = next((name for name in reversed(case.blocks) if name in case.recomputed), None)
    if block is None:
        return case.result(_NAME, Verdict.NOT_APPLICABLE, "no block is recomputed")
    model = case.install().model
    vandal = Vandal(model, block)
    try:
        gradients = gradients_with(model, case.experiment, vandal.strike)
    except RuntimeError as error:
        return _noticed(case, vandal, error)
    finally:
        vandal.handle.remove()
    if not vandal.has_struck:
        what = f"{block} has no input with a gradient that can be changed in place"
        return case.result(_NAME, Verdict.NOT_APPLICABLE, what, block=block)
    comparison = compare(case.run().gradients, gradients, case.reference.rerun_errors)
    if comparison.suspects:
        return case.result(
            _NAME,
            Verdict.FAIL,
            f"the input of {block} was changed in place after forward, and backward computed wrong gradients silently",
            remedy="saved-tensor hooks that hand the tensor itself through switch off autograd's own check: compare "
            "versions on unpack",
            block=block,
            wrong=len(comparison.suspects),
        )
    return case.result(_NAME, Verdict.PASS, f"changing {block}'s input in place does no harm", block=block)


def _noticed(case: Case, vandal: Vandal, error: RuntimeError) -> CheckResult:
    if not vandal.has_struck:
        raise error
    message = (str(error).strip().splitlines() or [""])[0][:160]
    return case.result(_NAME, Verdict.PASS, f"changing {vandal.block}'s input in place is refused", error=message)


class Vandal:
    """Changes a block's input after forward, as code does that keeps using a tensor after it gave it to a block."""

    def __init__(self, model: nn.Module, block: str) -> None:
        self.block = block
        self.has_struck = False
        self._input: Tensor | None = None
        module = dict(named_modules(model))[block]
        self.handle = module.register_forward_pre_hook(self._look, with_kwargs=True, prepend=True)

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inputs = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.grad_fn is not None]
        if self._input is None and inputs:
            self._input = inputs[0].detach()  # the same memory and version counter, and no graph

    def strike(self) -> None:
        if self._input is None:
            return
        pattern = torch.arange(self._input.numel(), device=self._input.device).cos()  # no norm cancels it
        with contextlib.suppress(RuntimeError):  # an expanded input: nobody can change it in place
            self._input.add_(pattern.view_as(self._input).to(self._input.dtype))
            self.has_struck = True
