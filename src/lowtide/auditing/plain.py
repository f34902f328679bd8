"""The reference: a copy of the model in which nothing is recomputed.

A copy with its own checkpointing flag off, run while torch's `checkpoint` simply calls its function: so also models
whose code calls it themselves, or that lie in torch's checkpoint wrappers, have a plain run to be compared with. The
replacement holds for the whole process, for as long as the run takes, and every name is put back.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch.utils.checkpoint
from torch import nn

from lowtide.auditing.errors import CannotAuditError
from lowtide.auditing.parallel import inner
from lowtide.auditing.setups import disable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy with weights of its own."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise CannotAuditError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and the audit compares "
            "copies: pass reference=, a second model with the same weights, and set the model up yourself instead of "
            "with configure="
        ) from error
    for parameter in twin.parameters():
        if not parameter.is_leaf:  # TorchScript copies by an operation, whose gradients go to the original
            parameter.detach_().requires_grad_()
    return twin


def reference_of(model: nn.Module, reference: nn.Module | Callable[[nn.Module], Any] | None) -> nn.Module:
    """A plain twin: the one given, or a copy, made plain by the function given or by its own flag."""
    if isinstance(reference, nn.Module):
        return reference
    twin = copy_of(inner(model))
    if reference is not None:
        made = reference(twin)
        return made if isinstance(made, nn.Module) else twin
    disable(twin)
    return twin


@contextlib.contextmanager
def without_torch_checkpoint(model: nn.Module) -> Iterator[None]:
    """Torch's checkpoint calls its function and does nothing else: by any name, and where the model's modules keep it,
    or a partial of it as torch's CheckpointWrapper does, to which no name leads."""
    original = torch.utils.checkpoint.checkpoint
    named = set(inspect.signature(original).parameters) - {"function", "args", "kwargs"}
    options = named | {"preserve_rng_state"}  # torch takes it out of its keywords

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in options})

    kept = list(_kept(original, model))
    for holder, name in [*_holders(original), *((module, name) for module, name, _ in kept)]:
        setattr(holder, name, call)
    try:
        yield
    finally:
        for module, name, held in kept:
            setattr(module, name, held)
        for holder, name in _holders(call):
            setattr(holder, name, original)


def _kept(function: Callable[..., Any], model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in model.modules():
        for name, held in vars(module).items():
            if held is function or (isinstance(held, functools.partial) and held.func is function):
                yield module, name, held


def _holders(value: Any) -> list[tuple[Any, str]]:
    return [
        (module, name)
        for module in list(sys.modules.values())
        for name, held in list(getattr(module, "__dict__", {}).items())
        if held is value
    ]
