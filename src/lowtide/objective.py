"""What is differentiated: the loss that a user names, the model's own, or one made of all its outputs."""

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
    """A scalar that needs a gradient."""
    value = loss(outputs) if loss is not None else _own_loss(outputs)
    if value is None:
        value = _of_everything(outputs)
    if not isinstance(value, Tensor) or not value.requires_grad:
        raise NoGradientError(
            "the loss needs no gradient: are all parameters frozen, or is the forward run without gradients? "
            "Pass loss=, a function of the model's outputs, if the model returns none"
        )
    return value.sum() if value.numel() > 1 else value


def tensors_of(outputs: Any) -> dict[str, Tensor]:
    """The plain tensors in a model's outputs, by path. Others, such as logits that are not computed, are absent."""
    leaves = pytree.tree_flatten_with_path(_as_tree(outputs))[0]
    return {_dotted(path) or "output": leaf for path, leaf in leaves if type(leaf) is Tensor}


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _own_loss(outputs: Any) -> Tensor | None:
    if isinstance(outputs, Tensor):
        return outputs if outputs.numel() == 1 else None
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.requires_grad else None


def _of_everything(outputs: Any) -> Tensor | None:
    """Every output times random weights: nothing cancels, and no output goes unseen."""
    terms = []
    for index, tensor in enumerate(tensors_of(outputs).values()):
        if tensor.is_floating_point() and tensor.requires_grad and tensor.numel():
            generator = torch.Generator().manual_seed(_SEED + index)
            weights = torch.randn(tensor.shape, generator=generator).to(tensor)
            finite = torch.where(torch.isfinite(tensor), tensor, torch.zeros_like(tensor))
            terms.append((finite * weights).sum() / tensor.numel() ** 0.5)
    return torch.stack([term.float() for term in terms]).sum() if terms else None


def _as_tree(outputs: Any) -> Any:
    if isinstance(outputs, dict):  # a transformers ModelOutput is one, registered as a tree or not
        return dict(outputs)
    return outputs if isinstance(outputs, (Tensor, list, tuple)) else dict(getattr(outputs, "__dict__", {}))
