"""Finds the number to differentiate in what a model returns.

Models disagree on how they return a loss, and those who look for it disagree on what to do without one:

- `objective` (the audit, the zoo's survey) always has something to differentiate: the loss that the caller's function
  makes, the model's own loss, or a random projection of all outputs.
- `returned_loss` (the planner) takes what a training loop would: one number, in one of the usual places. Whether there
  must be one is the caller's decision, and so is the error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide._torch import pytree
from lowtide.errors import NoGradientError

if TYPE_CHECKING:
    from collections.abc import Callable

_SEED = 1234


def objective(outputs: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """Return a scalar that requires a gradient: `loss(outputs)`, the model's own loss, or a projection of all outputs.

    A loss of several numbers is summed. `NoGradientError` is raised if nothing in the outputs requires a gradient.
    """
    value = loss(outputs) if loss is not None else own_loss(outputs)
    if value is None:
        value = random_projection(outputs)
    if not isinstance(value, Tensor) or not value.requires_grad:
        raise NoGradientError(
            "the loss needs no gradient: are all parameters frozen, or does forward run without gradients? If the "
            "model returns no loss, pass loss=, a function of its outputs"
        )
    return value.sum() if value.numel() > 1 else value


def own_loss(outputs: Any) -> Tensor | None:
    """Return the loss that the model computed: the output itself if it is one number, or `loss` in it.

    A `loss` that requires no gradient does not count. A single number is returned in any case: if it requires no
    gradient, there is nothing else that could.
    """
    if isinstance(outputs, Tensor):
        return outputs if outputs.numel() == 1 else None
    loss = named_loss(outputs)
    return loss if isinstance(loss, Tensor) and loss.requires_grad else None


def returned_loss(outputs: Any) -> Tensor | None:
    """Return the one number that a training loop would call `backward` on: the output, its `loss`, or a tuple's first.

    None if there is not exactly one number in that place.
    """
    loss = named_loss(outputs)
    if loss is None and isinstance(outputs, tuple) and outputs:
        loss = outputs[0]
    if isinstance(outputs, Tensor):
        loss = outputs
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def named_loss(outputs: Any) -> Any:
    """Return what the outputs hold under the name `loss`, as an item of a dict or as an attribute; None without one."""
    return outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)


def random_projection(outputs: Any) -> Tensor | None:
    """Return the sum of all outputs times fixed random weights, so that nothing cancels and no output goes unseen.

    Numbers that are not finite count as zero. None if no output requires a gradient.
    """
    terms = []
    for index, tensor in enumerate(tensors_of(outputs).values()):
        if tensor.is_floating_point() and tensor.requires_grad and tensor.numel():
            generator = torch.Generator().manual_seed(_SEED + index)
            weights = torch.randn(tensor.shape, generator=generator).to(tensor)
            finite = torch.where(torch.isfinite(tensor), tensor, torch.zeros_like(tensor))
            terms.append((finite * weights).sum() / tensor.numel() ** 0.5)
    return torch.stack([term.float() for term in terms]).sum() if terms else None


def tensors_of(outputs: Any) -> dict[str, Tensor]:
    """Return the plain tensors in a model's outputs by their path, such as `past.0`.

    Subclasses of `Tensor`, such as logits that are never computed, are left out.
    """
    leaves = pytree.tree_flatten_with_path(_as_tree(outputs))[0]
    return {_dotted(path) or "output": leaf for path, leaf in leaves if type(leaf) is Tensor}


def _as_tree(outputs: Any) -> Any:
    if isinstance(outputs, dict):  # a transformers ModelOutput is one, registered as a tree or not
        return dict(outputs)
    return outputs if isinstance(outputs, (Tensor, list, tuple)) else dict(getattr(outputs, "__dict__", {}))


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
