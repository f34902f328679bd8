"""Finds out on which parameters the loss depends although no gradient reaches them, by changing them a little.

The plain model runs forward again with changed parameters. If its loss stays the same to the last bit, it does not
depend on them. If it moves, either the graph is cut, or the parameters pick indices (codes, experts), which have no
gradient by nature. The size of the change tells: the twin that is changed computes in double precision, and by one part
in ten million. That moves the loss along every path that is smooth, and lets hardly an index out of thousands change:
only one whose candidates are as near to each other as that. A parameter counts if every one of a few such changes moves
the loss.

A model that cannot run in double precision is changed by more, and its loss must follow as along a line: half as far
for half the change, and back for the opposite one. Where indices change, it jumps.

Many parameters are changed together, and halves of them only if the loss moves.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import torch

from lowtide.auditing.precision import InDouble, in_double, spacing
from lowtide.modules import named_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from lowtide.auditing.step import Experiment

_LARGE = 0.02
"""A change by which every loss moves that depends on the parameters at all, in relation to their size."""
_TINY = 1e-7
_SEEDS = (0, 1, 2)
"""The random directions in which parameters are changed."""

_SIZES = (1e-4, 1e-3, 1e-2)
"""The changes in single precision: the first that moves the loss by many of its last bits is judged."""
_RESOLVED = 64
_STRAIGHT = 0.2
"""How far a loss may be off the line, in relation to its movement."""

MOST_TRIALS = 128
"""How many groups of parameters are changed, each with up to three forwards (nine without double precision)."""


@dataclasses.dataclass(frozen=True)
class Dependence:
    """On which of some parameters the loss depends."""

    on: list[str]
    """Those that were changed by themselves, and moved the loss."""
    untried: list[str]
    """Those that moved it together with others, and were not tried by themselves: there were too many."""
    is_known: bool = True
    """False if the loss is not finite: nothing can be said then."""


def find_dependence(
    model: nn.Module, experiment: Experiment, names: Sequence[str], copied: Callable[[], nn.Module]
) -> Dependence:
    """Find out on which of these parameters of the plain model its loss depends. `copied` makes a copy of the model."""
    single = _Nudged(model, experiment)
    if not torch.isfinite(single.loss):
        return Dependence(on=[], untried=[], is_known=False)
    if not single.moves(names, _LARGE, _SEEDS[0]):
        return Dependence(on=[], untried=[])
    double = _nudged_in_double(copied(), experiment)
    if double is None:
        return _bisected(names, single.follows)
    return _bisected(names, lambda group: all(double.moves(group, _TINY, seed) for seed in _SEEDS))


def _nudged_in_double(twin: nn.Module, experiment: Experiment) -> _Nudged | None:
    """Return the model in double precision; None if it cannot run in it."""
    try:
        nudged = _Nudged(*in_double(twin, experiment), is_double=True)
    except (RuntimeError, ValueError, TypeError):  # an operator or a device without a double kernel
        return None
    return nudged if nudged.loss.dtype is torch.double and torch.isfinite(nudged.loss) else None


def _bisected(names: Sequence[str], depends: Callable[[Sequence[str]], bool]) -> Dependence:
    """Try all together, then halves of what depends, the first ones first."""
    on: list[str] = []
    waiting, trials = [list(names)], 0
    while waiting and trials < MOST_TRIALS:
        group = waiting.pop()
        trials += 1
        if not depends(group):
            continue
        if len(group) == 1:
            on += group
        else:
            middle = len(group) // 2
            waiting += [group[middle:], group[:middle]]
    return Dependence(on=on, untried=[name for group in reversed(waiting) for name in group])


class _Nudged:
    """The plain model, and how its loss moves when parameters are changed."""

    def __init__(self, model: nn.Module, experiment: Experiment, *, is_double: bool = False) -> None:
        self.model, self.experiment, self.is_double = model, experiment, is_double
        self.parameters = dict(named_parameters(model))
        self.loss = self._run()
        self.noise = 4 * float((self._run() - self.loss).abs())

    def moves(self, names: Sequence[str], size: float, seed: int) -> bool:
        """Return whether the loss is another one after such a change."""
        return not abs(self._movement(names, size, seed)) <= self.noise  # so that NaN counts as a movement

    def follows(self, names: Sequence[str]) -> bool:
        """Return whether the loss moves as along a line, over all directions: in some of them it may hardly move."""
        for size in _SIZES:
            whole = self._movements(names, size)
            if whole.norm() > max(self.noise, _RESOLVED * spacing(self.loss)):
                half, back = self._movements(names, size / 2), self._movements(names, -size)
                off = max(float((whole - 2 * half).norm()), float((whole + back).norm()))
                return off <= _STRAIGHT * float(whole.norm())
        return False

    def _movements(self, names: Sequence[str], size: float) -> Tensor:
        return torch.tensor([self._movement(names, size, seed) for seed in _SEEDS], dtype=torch.double)

    def _movement(self, names: Sequence[str], size: float, seed: int) -> float:
        with _changed([self.parameters[name] for name in names], size, seed):
            return float(self._run() - self.loss)

    def _run(self) -> Tensor:
        with InDouble() if self.is_double else contextlib.nullcontext(), self.experiment.prepared(self.model):
            return self.experiment.objective(self.experiment.call(self.model)).detach()


@contextlib.contextmanager
def _changed(parameters: Sequence[nn.Parameter], size: float, seed: int) -> Iterator[None]:
    """Add noise to parameters, in relation to their size; put their bits back afterwards."""
    before = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            parameter.add_(noise, alpha=size * (float(parameter.float().square().mean().sqrt()) or 1.0))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, held in zip(parameters, before, strict=True):
                parameter.copy_(held)
