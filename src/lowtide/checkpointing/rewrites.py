"""Tells weights that a forward writes anew with what they held from those that it changes.

A parametrization that is registered and removed inside forward, as PEFT does it for adapters on experts and routers,
ends with `weight.set_(weight)`: another version, the same numbers. The close looks at a region's first calls compare
the numbers. By as many versions as such a call moved a weight, later calls and recomputes may move it, too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch.utils.weak import WeakIdKeyDictionary

from lowtide._torch import version_if_any

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

    import torch

    from lowtide.weights import Weight


class Rewrites:
    """How far a region's own runs have moved the versions of weights whose numbers they left alone."""

    def __init__(self) -> None:
        self._each: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
        """The most versions by which one run moves a weight."""
        self._so_far: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
        """By how many versions all runs have moved it."""

    def __bool__(self) -> bool:
        return len(self._each) > 0

    def noted(self, weights: list[Weight]) -> list[Weight]:
        """Return weights with the versions that they would have without those runs."""
        return [weight._replace(version=weight.version - self._so_far.get(weight.tensor, 0)) for weight in weights]

    def expected(self, weights: list[Weight]) -> list[Weight]:
        """Return weights that were noted so with the versions that they must have now."""
        return [weight._replace(version=weight.version + self._so_far.get(weight.tensor, 0)) for weight in weights]

    def learn(self, weights: list[Weight]) -> None:
        """Note by how many versions a run has moved each weight. Its numbers are known to be the same."""
        for before in self.expected(weights):
            moved = version_if_any(before.tensor) - before.version
            if moved > 0 and before.storage is not None:
                self._each[before.tensor] = max(moved, self._each.get(before.tensor, 0))

    def count(self, before: list[Weight]) -> None:
        """Count what a run has done to weights that had these versions."""
        for weight in before:
            moved = version_if_any(weight.tensor) - weight.version
            if 0 < moved <= self._each.get(weight.tensor, 0):
                self._so_far[weight.tensor] = self._so_far.get(weight.tensor, 0) + moved

    @contextlib.contextmanager
    def counted(self, weights: list[Weight]) -> Iterator[None]:
        """Count what a run inside does to these weights."""
        before = [weight._replace(version=version_if_any(weight.tensor)) for weight in weights]
        try:
            yield
        finally:
            self.count(before)
