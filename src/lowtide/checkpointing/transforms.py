"""Refuses a region inside `torch.func`'s transforms where torch could not run it.

`grad`, `vjp`, `jacrev` and `hessian` forbid saved-tensor hooks, which every region needs. `vmap` and `jvp` allow them,
but their tensors are wrappers that end with the transform: they have no bytes to move, and a backward that comes
afterwards finds nothing to run the region again with.
"""

from __future__ import annotations

from lowtide._torch import are_hooks_allowed, transforms_around
from lowtide.errors import TransformError

_REMEDY = "Take the policy off meanwhile (remove() of its handle), or call the function without Lowtide inside"


def refuse_without_hooks(name: str) -> None:
    """Raise `TransformError` if saved-tensor hooks are forbidden around region `name`."""
    if not are_hooks_allowed():
        raise TransformError(
            f"region {name!r} cannot be recomputed or offloaded here, because saved-tensor hooks are forbidden: "
            "torch.func.grad, vjp, jacrev and hessian do so, and torch.autograd.graph.disable_saved_tensors_hooks. Use "
            f"torch.autograd.grad or .backward() instead. {_REMEDY}"
        )


def refuse_to_move(name: str) -> None:
    """Raise `TransformError` if the inputs of region `name` are wrappers without memory, which no store can take."""
    if transforms_around():
        raise TransformError(
            f"region {name!r} cannot be offloaded inside torch.func.vmap or jvp: the tensors there are wrappers that "
            f"have no memory of their own. {_REMEDY}, or call the transform under torch.no_grad() if no backward "
            "follows"
        )


def refuse_to_run_again(name: str, transforms: int) -> None:
    """Raise `TransformError` if region `name` ran inside more transforms than there are around its recompute."""
    if transforms > transforms_around():
        raise TransformError(
            f"region {name!r} ran inside torch.func.vmap or jvp, and backward comes after it, where the region cannot "
            f"be recomputed: its inputs ended with the transform. {_REMEDY}"
        )
