"""Refuses tiles where torch cannot run them: inside `torch.func`'s transforms, and under compiled autograd.

A tile's nodes find their inputs in another node of the graph, which saved them once for all tiles. A transform wants
every node as a pure function, and compiled autograd has taken the saved tensors out of all nodes before it runs them.
"""

from __future__ import annotations

from lowtide._torch import is_in_forward_mode, runs_compiled_backward, transforms_around
from lowtide.errors import TransformError


def refuse_transforms(name: str) -> None:
    """Raise `TransformError` if `name` is about to be tiled inside a transform, or in forward-mode AD."""
    if transforms_around() or is_in_forward_mode():
        raise TransformError(
            f"{name} cannot run in tiles inside a transform of torch.func (grad, vmap, jvp, ...) or in forward-mode "
            "AD: tiles share what they save, and a transform allows only functions that share nothing. Use "
            "torch.autograd.grad or .backward() instead, take the policy off meanwhile (remove() of its handle), or "
            "call the function without Lowtide inside"
        )


def refuse_compiled_backward(name: str) -> None:
    """Raise `TransformError` if compiled autograd runs the backward of a tile of `name`."""
    if runs_compiled_backward():
        raise TransformError(
            f"{name} runs in tiles, and compiled autograd cannot run their backward: it takes all saved tensors out of "
            "the graph beforehand, and a tile looks for its inputs there. Run this backward without it "
            "(torch._dynamo.config.compiled_autograd = False, .backward() outside of the compiled function), or leave "
            f"the tiles out: without tile in the policy, or with a rule: '{name}: none'"
        )
