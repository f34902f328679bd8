"""Tests by experiment whether a module is token-wise: whether its output for a token depends on that token alone.

A convolution, a norm over the sequence, a router with limited capacity or a position counted from the start would give
wrong results in tiles, without an error. So before a module is first tiled, a few of its tokens are run together with
different ones, and must come out the same:

- with all other tokens replaced by copies of the first, or of the last (neighbours and means change),
- in the shape of the call, one place further to the front, and in reverse order,
- among many copies of one token (experts overflow).

What a call leaves behind counts, too. A buffer that is updated in forward (a router's bias, a power iteration) would be
updated once per tile: so one call and two halves of it must leave the same in all buffers, and the second half must
come out as it would without the first. A tensor in an attribute must not depend on the tokens: it would be the last
tile's. A module that changes its input in place is refused as well.

Every run has a fresh twin of the module that shares its parameters: no buffer changes, no random number is drawn, no
dispatch mode sees it, and of the hooks of its parts only those act that change something. Ranks that meet in
collectives inside the module run it equally often, whatever they find.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide._torch import no_dispatch_modes, version_of, without_parametrize_cache
from lowtide.errors import CannotCutError, NotTokenWiseError
from lowtide.randomness import RandomState
from lowtide.tensor_tree import flatten
from lowtide.tiling.collectives import CollectiveGroups, largest_in
from lowtide.tiling.remains import Remains, are_far_apart, different_attribute, different_buffer
from lowtide.tiling.tiled_function import TiledFunction, gathered
from lowtide.tiling.twin import evaluate, twin_of

if TYPE_CHECKING:
    from lowtide.tensor_tree import TensorTree
    from lowtide.tiling.hooks import Hook

LENGTH, ROWS = 16, 2
"""The size of the sample: tokens of the last token dimension, and rows of the other ones."""
CROWD = 1024
"""How many copies of one token run together."""
_SHOWN = 3
"""How many hooks a message names."""


FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError)
"""What a module may raise when it is given a few of its tokens alone."""


class Finding(NamedTuple):
    """What a trial found: why the module cannot be tiled, if so, and the groups of the collectives inside it."""

    fault: str | None
    groups: list[Any]
    lacks_rows: bool = False
    """Whether the fault is, on all ranks, that an output has no row for each token."""


class _NoRowError(ValueError):
    """An output has no row for each token."""


class Trial:
    """A trial of one module on some tokens of a call, which are taken when it is made."""

    def __init__(
        self, name: str, tiled: TiledFunction, args: tuple[Any, ...], kwargs: dict[str, Any], lead: torch.Size
    ) -> None:
        self._name = name
        self._tiled = tiled
        self._sample = _Sample(*flatten((args, kwargs)), lead)

    def run(self, hooks: list[Hook]) -> Finding:
        """Run the module with these hooks of its parts."""
        # Not in inference mode, where in-place changes are not counted; leaving that mode switches gradients on. A
        # forward may take a gradient all the same, and a checkpoint around it must not count what that saves.
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            no_dispatch_modes(),
            without_parametrize_cache(),
            gathered(self._tiled),
            torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor),
        ):
            experiment = _Experiment(self._tiled, hooks, self._sample)
            with CollectiveGroups() as collectives:
                fault = experiment.find_fault()
            groups = collectives.groups
            if groups and largest_in(groups, int(fault is not None), self._sample.device) and fault is None:
                fault = "another rank found that it is not token-wise"
            lacks_rows = experiment.lacks_rows
            if groups and fault is not None:
                lacks_rows = not largest_in(groups, int(not lacks_rows), self._sample.device)
        if fault is not None and hooks:
            fault += f" (with its hooks: {_listed(hooks)})"
        return Finding(fault, groups, lacks_rows)

    def refuse(self, fault: str) -> NotTokenWiseError:
        """Return the error for a fault that was found."""
        kind = type(self._tiled.module or self._tiled.function).__name__
        rule = f"'tile(mlp); {self._name}: none'"
        return NotTokenWiseError(f"{self._name} ({kind}) cannot be tiled: {fault}. Leave it out with a rule: {rule}")


def _listed(hooks: list[Hook]) -> str:
    names = list(dict.fromkeys(map(str, hooks)))
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


class _Sample:
    """A few tokens of a call, in the call's shape or flat in any order. A lone token is there twice."""

    def __init__(self, tensors: list[torch.Tensor], tree: TensorTree, lead: torch.Size) -> None:
        self._tree = tree
        self._is_split = [tensor.shape[: len(lead)] == lead for tensor in tensors]
        self._tensors = [
            _corner(t.detach(), lead) if split else t.detach() for t, split in zip(tensors, self._is_split, strict=True)
        ]
        first = next(t for t, split in zip(self._tensors, self._is_split, strict=True) if split)
        self.lead = first.shape[: len(lead)]
        self.count = self.lead.numel()
        self.device = first.device
        self.random = RandomState(*tensors)

    def in_shape(self) -> tuple[Any, list[torch.Tensor]]:
        """Return the arguments in the shape of the call, and the tensors in them."""
        tensors = [tensor.clone() for tensor in self._tensors]
        return self._tree.unflatten(tuple(tensors)), tensors

    def flat(self, order: list[int], *, varied: bool = False) -> tuple[Any, list[torch.Tensor]]:
        """Return the arguments as a tile gets them, with the tokens in this order, and the tensors in them.

        The tokens of a sample may be all the same (padding): `varied` ones are not.
        """
        tensors = []
        for tensor, split in zip(self._tensors, self._is_split, strict=True):
            if split:
                rows = tensor.reshape(self.count, *tensor.shape[len(self.lead) :])
                rows = _vary(rows) if varied else rows
                tensor = rows[torch.tensor(order, device=tensor.device)]  # noqa: PLW2901
                tensor = tensor.unsqueeze(0) if len(self.lead) > 1 else tensor  # noqa: PLW2901
            tensors.append(tensor.clone())
        return self._tree.unflatten(tuple(tensors)), tensors


def _corner(tensor: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    if lead.numel() > 1:
        return tensor[(*(slice(0, ROWS) for _ in lead[:-1]), slice(0, LENGTH))].clone()
    rest = tensor.shape[len(lead) :]
    token = tensor.reshape(-1, *rest) if lead.numel() else tensor.new_zeros(1, *rest)
    return token.repeat(2, *(1 for _ in rest)).view(*(1 for _ in lead[:-1]), 2, *rest)


def _vary(rows: torch.Tensor) -> torch.Tensor:
    """Return features of tokens that are all different; anything else as it is."""
    if not rows.is_floating_point() or rows.dim() != 2:  # noqa: PLR2004
        return rows
    steps = torch.linspace(0.5, 1.5, len(rows), device=rows.device, dtype=torch.float32)
    waves = torch.outer(steps, torch.arange(rows.shape[-1], device=rows.device, dtype=torch.float32)).cos()
    return rows * steps[:, None].to(rows.dtype) + 0.1 * waves.to(rows.dtype)


class _Experiment:
    def __init__(self, tiled: TiledFunction, hooks: list[Hook], sample: _Sample) -> None:
        self._tiled = tiled
        self._hooks = hooks
        self._sample = sample
        self._every = list(range(sample.count))
        self._changes_its_input = False
        self.lacks_rows = False

    def find_fault(self) -> str | None:
        """Return why the module cannot be tiled, in words; None if it can."""
        try:
            faults = [self._find_company(), self._find_place(), self._find_remains()]
        except CannotCutError as reason:
            return str(reason)
        except FAILURES as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.lacks_rows = isinstance(error, _NoRowError)
            return f"it fails on a few of its tokens alone ({type(error).__name__.removeprefix('_')}: {error})"
        if self._changes_its_input:
            return "it changes its input in place"
        return next(filter(None, faults), None)

    def _find_company(self) -> str | None:
        """Run as it is called, in training or not: the same tokens in the same places, among others."""
        plain = self._rows(self._every)
        differ = [_differ(plain[place], self._rows([place] * len(plain))[place]) for place in (0, -1)]
        return "its output for a token depends on the other tokens" if any(differ) else None

    def _find_place(self) -> str | None:
        """Run without dropout, which draws different numbers for another shape or order."""
        plain, shaped = self._rows(self._every, draws=False), self._rows(None, draws=False)
        shifted, reverse = self._rows(self._every[1:], draws=False), self._rows(self._every[::-1], draws=False)
        crowd = self._rows([0] * CROWD, draws=False)
        if _differ(plain[1], shifted[0]) or _differ(plain[-1], reverse[0]):
            return "its output for a token depends on the token's position"
        if any(_differ(plain[place], shaped[place]) for place in self._every):
            return "its output for a token depends on the other tokens"
        return "its output for a token depends on how many there are" if _differ(plain[0], crowd[-1]) else None

    def _find_remains(self) -> str | None:
        """Compare what one call leaves with what two halves of it leave, and the second half with one run alone."""
        middle = len(self._every) // 2
        first, second = self._every[:middle], self._every[middle:]
        whole, halves, alone = (self._twin() for _ in range(3))
        left_by_whole, left_by_halves = Remains(whole.module), Remains(halves.module)
        self._run(whole, self._every, varied=True)
        at_once = left_by_whole.now()
        self._run(halves, first, varied=True)
        half = left_by_halves.now()
        rows = self._run(halves, second, varied=True)
        in_two = left_by_halves.now()
        rows_alone = self._run(alone, second, varied=True)
        if (name := different_buffer(left_by_whole.before, at_once, in_two)) is not None:
            return f"it updates its buffer {name!r} in each call, which would be once per tile"
        if any(_differ(one, two) for one, two in zip(rows, rows_alone, strict=True)):
            return "its output depends on the calls before it, and each tile would be one"
        if (name := different_attribute([at_once, half, in_two])) is not None:
            return f"it leaves a tensor in its attribute {name!r}, which would be the last tile's"
        return None

    def _twin(self) -> TiledFunction:
        return twin_of(self._tiled, self._hooks)

    def _rows(self, order: list[int] | None, *, draws: bool = True) -> list[list[torch.Tensor]]:
        """Run a fresh twin as a tile in this order (None: in the shape of the call), in its own mode or evaluation."""
        twin = self._twin()
        if not draws and twin.module is not None:
            evaluate(twin.module)
        return self._run(twin, order)

    def _run(self, twin: TiledFunction, order: list[int] | None, *, varied: bool = False) -> list[list[torch.Tensor]]:
        """Return each token's part of every output."""
        sample = self._sample
        (args, kwargs), given = sample.in_shape() if order is None else sample.flat(order, varied=varied)
        versions = [version_of(tensor) for tensor in given]
        with sample.random.restored():
            outputs, _ = flatten(twin.function(*args, **kwargs))
        self._changes_its_input |= versions != [version_of(tensor) for tensor in given]
        count = sample.count if order is None else len(order)
        lead = sample.lead if order is None else torch.Size((1, count) if len(sample.lead) > 1 else (count,))
        columns = [_by_token(output, lead, count) for output in outputs]
        return [list(row) for row in zip(*columns, strict=True)]


def _differ(ours: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    if len(ours) != len(others):
        return True
    return any(are_far_apart(one, two) for one, two in zip(ours, others, strict=True))


def _by_token(output: torch.Tensor, lead: torch.Size, count: int) -> list[torch.Tensor]:
    """Return the rows of an output, in the token dimensions of the call or flattened by the module itself."""
    if output.shape[: len(lead)] == lead:
        output = output.reshape(count, *output.shape[len(lead) :])
    if output.shape[:1] != (count,):
        raise _NoRowError(f"an output of shape {tuple(output.shape)} has no row for each of {count} tokens")
    return list(output)
