"""Tries out whether a module is token-wise: whether what it makes of a token depends on that token alone.

A convolution, a norm over the sequence, a router with limited capacity or a position counted from the start would give
wrong results in tiles, without an error. So before a module is first tiled, a few of its tokens are run in different
company, and must come out the same:

- all others replaced by copies of the first, or of the last (experts overflow, neighbours and means change),
- one place further to the front, and in reverse order.

The trial runs on a twin of the module that shares its parameters and nothing else: no hook fires, no buffer changes, no
random number is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide.errors import NotTokenWiseError
from lowtide.slots import take_tensors
from lowtide.tiling.sharded import gathered, inner_units, module_of
from lowtide.tiling.surroundings import RandomState

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.slots import Frame

TOKENS = 32
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_LOW_PRECISION = 3e-2


@torch.no_grad()
def check_token_wise(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], lead: torch.Size
) -> None:
    """Raise `NotTokenWiseError` if tokens of these arguments come out differently in other company."""
    tensors, frame = take_tensors((args, kwargs))
    sample = [_first_tokens(tensor, lead) if tensor.shape[: len(lead)] == lead else tensor for tensor in tensors]
    is_sampled = [tensor.shape[: len(lead)] == lead for tensor in tensors]
    if min(lead.numel(), TOKENS) < 2:  # noqa: PLR2004  (a token without company)
        return
    with gathered(inner_units(function)):
        trial = _Trial(_bare(function), frame, sample, is_sampled, batched=len(lead) > 1)
        suspect = trial.find_dependence()
    if suspect is not None:
        kind = type(module_of(function)).__name__
        raise NotTokenWiseError(
            f"{name} ({kind}) cannot be tiled: {suspect}. Leave it out with a rule: 'tile(mlp); {name}: none'"
        )


class _Trial:
    def __init__(
        self,
        function: Callable[..., Any],
        frame: Frame,
        sample: list[torch.Tensor],
        is_sampled: list[bool],
        *,
        batched: bool,
    ) -> None:
        self._function = function
        self._frame = frame
        self._sample = sample
        self._is_sampled = is_sampled
        self._dim = 1 if batched else 0
        self._random = RandomState(*sample)
        self._count = next(t.shape[self._dim] for t, cut in zip(sample, is_sampled, strict=True) if cut)

    def find_dependence(self) -> str | None:
        """What a token depends on besides itself, in words."""
        every = list(range(self._count))
        plain = self._run(every)
        for place in (0, self._count - 1):
            if self._differ(plain, self._run([place] * self._count), place, place):
                return "its output for a token depends on the other tokens"
        _set_training(self._function, mode=False)  # dropout would draw other numbers for another shape
        plain, shifted, reverse = self._run(every), self._run(every[1:]), self._run(every[::-1])
        if self._differ(plain, shifted, 1, 0) or self._differ(plain, reverse, self._count - 1, 0):
            return "its output for a token depends on the token's position"
        return None

    def _run(self, order: list[int]) -> list[torch.Tensor]:
        """The outputs' tensors for the sample's tokens in this order."""
        places = torch.tensor(order, device=self._sample[0].device)
        tensors = [
            tensor.index_select(self._dim, places) if cut else tensor
            for tensor, cut in zip(self._sample, self._is_sampled, strict=True)
        ]
        args, kwargs = self._frame.fill(tuple(tensors))
        with self._random.restored():
            return take_tensors(self._function(*args, **kwargs))[0]

    def _differ(self, ours: list[torch.Tensor], others: list[torch.Tensor], place: int, other_place: int) -> bool:
        if len(ours) != len(others):
            return True
        return any(
            _are_far_apart(self._row(one, place), self._row(two, other_place))
            for one, two in zip(ours, others, strict=True)
        )

    def _row(self, output: torch.Tensor, place: int) -> torch.Tensor:
        """A token's part of an output: `[1, tokens, ...]`, or flat `[tokens, ...]`."""
        has_batch = self._dim == 1 and output.dim() > 1 and output.shape[0] == 1
        return output[0, place] if has_batch else output[place]


def _are_far_apart(one: torch.Tensor, two: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return not torch.equal(one, two)
    if not (torch.isfinite(one).all() and torch.isfinite(two).all()):
        return False  # nothing can be said
    tolerance = _TOLERANCE.get(one.dtype, _LOW_PRECISION)
    scale = torch.maximum(one.double().norm(), two.double().norm())
    return bool((one.double() - two.double()).norm() > tolerance * scale)


def _first_tokens(tensor: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    flat = tensor.detach().reshape(lead.numel(), *tensor.shape[len(lead) :])[:TOKENS]
    return flat.unsqueeze(0) if len(lead) > 1 else flat


def _bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on a twin of its module, without hooks."""
    module = module_of(function)
    if module is None:
        return function
    twin = _twin(module, {})
    underlying = getattr(function, "__func__", None)
    return twin if function is module or underlying is None else underlying.__get__(twin)


def _twin(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """Another module with the same parameters, copied buffers, no hooks, and twins for children."""
    if module not in made:
        twin = made[module] = module.__class__.__new__(module.__class__)
        twin.__dict__ = {
            name: type(value)() if name.endswith("_hooks") and isinstance(value, dict) else value
            for name, value in module.__dict__.items()
        }
        twin._parameters = dict(module._parameters)
        twin._buffers = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
        twin._modules = {name: None if child is None else _twin(child, made) for name, child in module._modules.items()}
    return made[module]


def _set_training(function: Callable[..., Any], *, mode: bool) -> None:
    module = module_of(function)
    if module is not None:
        module.train(mode)
