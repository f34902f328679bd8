"""Refuses a region whose surroundings torch could not run it in, or which are gone when it runs again.

`grad`, `vjp`, `jacrev` and `hessian` forbid saved-tensor hooks, which every region needs. `vmap` and `jvp` allow them,
but their tensors are wrappers that end with the transform: they have no bytes to move, and a backward that comes
afterwards finds nothing to run the region again with.

Context parallelism lasts as long as a `with` statement, and replaces torch's attention meanwhile. A backward behind it
would run the region again with plain attention, on one rank's part of the keys.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F

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


def refuse_other_attention(name: str, attention: Any) -> None:
    """Raise `TransformError` if torch's attention is not the function that it was when region `name` ran."""
    now = F.scaled_dot_product_attention
    if now is attention:
        return
    was, is_now = (f"{one.__module__}.{getattr(one, '__qualname__', one)}" for one in (attention, now))
    raise TransformError(
        f"region {name!r} ran while torch.nn.functional.scaled_dot_product_attention was {was}, and is to be "
        f"recomputed while it is {is_now}, which computes something else. A context manager replaced it, as context "
        "parallelism does: call .backward() inside the same `with` as forward"
    )
