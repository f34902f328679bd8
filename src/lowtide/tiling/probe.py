"""Tests by experiment whether a module is token-wise: whether its output for a token depends on that token alone.

A convolution, a norm over the sequence, a router with limited capacity or a position counted from the start would give
wrong results in tiles, without an error. So before a module is first tiled, a few of its tokens are run together with
different ones, and must come out the same:

- with all other tokens replaced by copies of the first, or of the last (neighbours and means change),
- in the shape of the call, one place further to the front, and in reverse order,
- among many copies of one token (experts overflow).

A module that changes its input in place is refused as well, and one that leaves a tensor in an attribute (it would be
the last tile's). The experiment runs on a twin of the module that shares its parameters and nothing else: no hook
fires, no buffer changes, no random number is drawn, and no dispatch mode sees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide._torch import (
    COMPILED_CALL,
    CONTENT,
    buffers_of,
    children_of,
    no_dispatch_modes,
    parameters_of,
    version_if_any,
    version_of,
)
from lowtide.errors import NotTokenWiseError
from lowtide.randomness import RandomState
from lowtide.tensor_tree import flatten
from lowtide.tiling.tiled_function import TiledFunction, gathered

if TYPE_CHECKING:
    from lowtide.tensor_tree import TensorTree

LENGTH, ROWS = 16, 2
"""The size of the sample: tokens of the last token dimension, and rows of the other ones."""
CROWD = 1024
"""How many copies of one token run together."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3}
_LOW_PRECISION = 1.5e-2


def check_token_wise(
    name: str, tiled: TiledFunction, args: tuple[Any, ...], kwargs: dict[str, Any], lead: torch.Size
) -> None:
    """Raise `NotTokenWiseError` if tokens of these arguments come out differently among different tokens."""
    tensors, tree = flatten((args, kwargs))
    # Not in inference mode, where in-place changes are not counted; leaving that mode switches gradients on.
    with torch.inference_mode(mode=False), torch.no_grad(), no_dispatch_modes(), gathered(tiled):
        if lead.numel() < 2:  # noqa: PLR2004  (a lone token; the weights are gathered all the same, as all ranks must)
            return
        sample = _Sample(tensors, tree, lead)
        fault = _Experiment(_twin_of(tiled), sample).find_fault()
    if fault is not None:
        kind = type(tiled.module or tiled.function).__name__
        raise NotTokenWiseError(
            f"{name} ({kind}) cannot be tiled: {fault}. Leave it out with a rule: 'tile(mlp); {name}: none'"
        )


class _Sample:
    """A few tokens of a call, in the call's shape or flat in any order."""

    def __init__(self, tensors: list[torch.Tensor], tree: TensorTree, lead: torch.Size) -> None:
        self._tree = tree
        self._is_split = [tensor.shape[: len(lead)] == lead for tensor in tensors]
        corner = (*(slice(0, ROWS) for _ in lead[:-1]), slice(0, LENGTH))
        self._tensors = [
            t.detach()[corner] if split else t.detach() for t, split in zip(tensors, self._is_split, strict=True)
        ]
        self.lead = next(t for t, split in zip(self._tensors, self._is_split, strict=True) if split).shape[: len(lead)]
        self.count = self.lead.numel()
        self.random = RandomState(*tensors)

    def in_shape(self) -> tuple[Any, list[torch.Tensor]]:
        """Return the arguments in the shape of the call, and the tensors in them."""
        tensors = [tensor.clone() for tensor in self._tensors]
        return self._tree.unflatten(tuple(tensors)), tensors

    def flat(self, order: list[int]) -> tuple[Any, list[torch.Tensor]]:
        """Return the arguments as a tile gets them, with the tokens in this order, and the tensors in them."""
        tensors = []
        for tensor, split in zip(self._tensors, self._is_split, strict=True):
            if split:
                rows = tensor.reshape(self.count, *tensor.shape[len(self.lead) :])
                tensor = rows[torch.tensor(order, device=tensor.device)]  # noqa: PLW2901
                tensor = tensor.unsqueeze(0) if len(self.lead) > 1 else tensor  # noqa: PLW2901
            tensors.append(tensor.clone())
        return self._tree.unflatten(tuple(tensors)), tensors


class _Experiment:
    def __init__(self, tiled: TiledFunction, sample: _Sample) -> None:
        self._tiled = tiled
        self._sample = sample
        self._changes_its_input = False

    def find_fault(self) -> str | None:
        """Return why the module cannot be tiled, in words; None if it can."""
        attributes = _tensor_attributes(self._tiled.module)
        try:
            fault = self._find_dependence()
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return f"it fails on a few of its tokens alone ({type(error).__name__}: {error})"
        if self._changes_its_input:
            return "it changes its input in place"
        left = [name for name, value in _tensor_attributes(self._tiled.module).items() if value != attributes.get(name)]
        if fault is None and left:
            return f"it leaves a tensor in its attribute {left[0]!r}, which would be the last tile's"
        return fault

    def _find_dependence(self) -> str | None:
        count = self._sample.count
        every = list(range(count))
        plain = self._rows(every)
        for place in (0, count - 1):
            if self._differ(plain[place], self._rows([place] * count)[place]):
                return "its output for a token depends on the other tokens"
        if self._tiled.module is not None:
            self._tiled.module.train(mode=False)  # dropout would draw different numbers for a different shape
        plain, shaped = self._rows(every), self._rows(None)
        shifted, reverse = self._rows(every[1:]), self._rows(every[::-1])
        crowd = self._rows([0] * CROWD)
        if self._differ(plain[1], shifted[0]) or self._differ(plain[-1], reverse[0]):
            return "its output for a token depends on the token's position"
        if any(self._differ(plain[place], shaped[place]) for place in every):
            return "its output for a token depends on the other tokens"
        return "its output for a token depends on how many there are" if self._differ(plain[0], crowd[-1]) else None

    def _rows(self, order: list[int] | None) -> list[list[torch.Tensor]]:
        """Return each token's part of every output, run as a tile in this order; None: in the shape of the call."""
        (args, kwargs), given = self._sample.in_shape() if order is None else self._sample.flat(order)
        versions = [version_of(tensor) for tensor in given]
        with self._sample.random.restored():
            outputs, _ = flatten(self._tiled.function(*args, **kwargs))
        self._changes_its_input |= versions != [version_of(tensor) for tensor in given]
        count = self._sample.count if order is None else len(order)
        lead = (
            self._sample.lead if order is None else torch.Size((1, count) if len(self._sample.lead) > 1 else (count,))
        )
        columns = [_by_token(output, lead, count) for output in outputs]
        return [list(row) for row in zip(*columns, strict=True)]

    @staticmethod
    def _differ(ours: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        if len(ours) != len(others):
            return True
        return any(_are_far_apart(one, two) for one, two in zip(ours, others, strict=True))


def _by_token(output: torch.Tensor, lead: torch.Size, count: int) -> list[torch.Tensor]:
    """Return the rows of an output, in the token dimensions of the call or flattened by the module itself."""
    if output.shape[: len(lead)] == lead:
        output = output.reshape(count, *output.shape[len(lead) :])
    if output.shape[:1] != (count,):
        raise ValueError(f"an output of shape {tuple(output.shape)} has no row for each of {count} tokens")
    return list(output)


def _are_far_apart(one: torch.Tensor, two: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return not torch.equal(one, two)
    if not (torch.isfinite(one).all() and torch.isfinite(two).all()):
        return False  # infinities and NaN prove nothing
    tolerance = _TOLERANCE.get(one.dtype, _LOW_PRECISION)
    if one.dtype is torch.float32 and one.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        tolerance = _TOLERANCE[torch.float16]
    scale = torch.maximum(one.double().norm(), two.double().norm())
    return bool((one.double() - two.double()).norm() > tolerance * scale)


def _twin_of(tiled: TiledFunction) -> TiledFunction:
    """Return the function on a twin of its module, without hooks."""
    if tiled.module is None:
        return tiled
    twin: Any = _twin(tiled.module, {})
    if tiled.function is tiled.module:
        return TiledFunction(twin)
    own = getattr(tiled.function, "__func__", type(tiled.module).forward)  # the original below any wrapper
    return TiledFunction(own.__get__(twin), twin)


def _twin(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a module with the same parameters, copied buffers, no hooks, and twins for children."""
    if module not in made:
        twin = made[module] = object.__new__(module.__class__)  # FSDP2's `__new__` builds a different class
        attributes = {
            name: type(value)() if name.endswith("_hooks") and isinstance(value, dict) else value
            for name, value in module.__dict__.items()
            if name not in ("forward", COMPILED_CALL)
        }
        object.__setattr__(twin, "__dict__", attributes)
        content = (
            dict(parameters_of(module)),
            {name: None if buffer is None else buffer.clone() for name, buffer in buffers_of(module).items()},
            {name: None if child is None else _twin(child, made) for name, child in children_of(module).items()},
        )
        attributes.update(zip(CONTENT, content, strict=True))
    return made[module]


def _tensor_attributes(module: nn.Module | None) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a module and its parts hold in plain attributes, as identities and versions."""
    inner = [] if module is None else list(module.named_modules())
    return {
        f"{path}.{name}".strip("."): tuple(number for t in tensors for number in (id(t), version_if_any(t)))
        for path, part in inner
        for name, value in part.__dict__.items()
        if name not in CONTENT and (tensors := flatten(value)[0])
    }
