"""One forward and backward of a model on a batch: does it work, and how much of the model does it train?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide.zoo.surroundings import own_randomness, quiet

if TYPE_CHECKING:
    from collections.abc import Iterator


class _UselessError(Exception):
    """The batch runs, and yet trains nothing, or not with numbers."""


@dataclasses.dataclass(frozen=True, order=True)
class Outcome:
    """What a batch does for a model. The larger, the better."""

    trained_share: float
    """Stacks of layers with gradients among all of them."""
    has_loss: bool
    """Whether the model made a loss of its own."""


def try_batch(model: nn.Module, batch: dict[str, Any]) -> Outcome:
    """Runs the model forward and backward. Whatever goes wrong is raised."""
    model.zero_grad(set_to_none=True)
    with quiet(), own_randomness(0):
        output = model(**batch)
        own = _own_loss(output)
        loss = own if own is not None else _loss_of_tensors(output)
        torch.autograd.backward(loss)
    _check_gradients(model, loss)
    stacks = list(_stacks(model))
    trained = sum(any(_is_trained(p) for p in stack.parameters()) for stack in stacks)
    model.zero_grad(set_to_none=True)
    return Outcome(trained / len(stacks) if stacks else 1.0, own is not None)


def _own_loss(output: Any) -> torch.Tensor | None:
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.sum()
    return None


def _loss_of_tensors(output: Any) -> torch.Tensor:
    """Weighs all finite numbers at random: a plain mean would cancel in normalised outputs."""
    generator = torch.Generator().manual_seed(0)
    outputs = (tensor for tensor in _tensors(output) if tensor.requires_grad and tensor.is_floating_point())
    finite = [numbers for numbers in (tensor[torch.isfinite(tensor)] for tensor in outputs) if numbers.numel()]
    terms = [(numbers * torch.randn(numbers.shape, generator=generator)).mean() for numbers in finite]
    if not terms:
        raise _UselessError("no output depends on a parameter")
    return torch.stack(terms).sum()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output):
        yield from _tensors(vars(output))


def _check_gradients(model: nn.Module, loss: torch.Tensor) -> None:
    if not torch.isfinite(loss):
        raise _UselessError(f"the loss is {loss.item()}")
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise _UselessError("a gradient is not finite")
    if not any(bool(gradient.any()) for gradient in gradients):
        raise _UselessError("all gradients are zero")


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


def _stacks(model: nn.Module) -> Iterator[nn.Module]:
    """Lists of layers that hold trainable parameters."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and any(p.requires_grad for p in module.parameters()):
            yield module
