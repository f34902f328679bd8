"""The parts of a batch, as descriptions: each makes its value for a seed, always of the same shape.

A recipe maps the arguments of a forward to parts. Where placeholders stand, how long things are and what is masked
belongs to the description; only values that a data set would vary depend on the seed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch


class Part(Protocol):
    """One argument of a forward."""

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> Any:
        """The value, given those of the parts before it."""


Recipe = dict[str, Part]


def make_batch(recipe: Recipe, seed: int) -> dict[str, Any]:
    """The batch of a recipe for a seed."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for name, part in recipe.items():
        made[name] = part.make(generator, made)
    return made


@dataclasses.dataclass(frozen=True)
class Noise:
    """Normal numbers: pixels, spectrograms, waveforms, embeddings."""

    shape: tuple[int, ...]

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> torch.Tensor:  # noqa: ARG002
        return torch.randn(self.shape, generator=generator)


@dataclasses.dataclass(frozen=True)
class Fractions:
    """Numbers in [low, high): coordinates, depths, masks."""

    shape: tuple[int, ...]
    low: float = 0.0
    high: float = 1.0

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> torch.Tensor:  # noqa: ARG002
        return self.low + (self.high - self.low) * torch.rand(self.shape, generator=generator)


@dataclasses.dataclass(frozen=True)
class Integers:
    """Integers in [low, high): classes, codes."""

    shape: tuple[int, ...]
    high: int
    low: int = 0

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> torch.Tensor:  # noqa: ARG002
        return torch.randint(self.low, self.high, self.shape, generator=generator)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Plain tokens, with others (placeholders, marks) planted at fixed positions of every row."""

    rows: int
    length: int
    plain: tuple[int, ...]
    planted: tuple[tuple[int, int], ...] = ()

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> torch.Tensor:  # noqa: ARG002
        chosen = torch.randint(len(self.plain), (self.rows, self.length), generator=generator)
        tokens = torch.tensor(self.plain)[chosen]
        for position, token in self.planted:
            tokens[:, position] = token
        return tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    """The same value for every seed: masks, grids, sizes, switches."""

    value: Any

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> Any:  # noqa: ARG002
        return self.value.clone() if isinstance(self.value, torch.Tensor) else self.value


@dataclasses.dataclass(frozen=True)
class Same:
    """A copy of another argument, made before."""

    name: str

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> torch.Tensor:  # noqa: ARG002
        copy: torch.Tensor = made[self.name].clone()
        return copy


@dataclasses.dataclass(frozen=True)
class Boxes:
    """Boxes as centre, width and height, well inside the unit square."""

    count: int

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> torch.Tensor:  # noqa: ARG002
        centres = 0.4 + 0.2 * torch.rand(self.count, 2, generator=generator)
        sizes = 0.2 + 0.3 * torch.rand(self.count, 2, generator=generator)
        return torch.cat([centres, sizes], dim=1)


@dataclasses.dataclass(frozen=True)
class Each:
    """A list with one entry for each sample; an entry is one part, or several by name."""

    rows: int
    entry: Part | dict[str, Part]

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> list[Any]:
        return [self._one(generator, made) for _ in range(self.rows)]

    def _one(self, generator: torch.Generator, made: dict[str, Any]) -> Any:
        if isinstance(self.entry, dict):
            return {name: part.make(generator, made) for name, part in self.entry.items()}
        return self.entry.make(generator, made)


@dataclasses.dataclass(frozen=True)
class PlacedPatches:
    """Patches of square pictures, each with its row and column, counted from one, in front."""

    rows: int
    side: int
    width: int

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> torch.Tensor:  # noqa: ARG002
        places = torch.cartesian_prod(torch.arange(self.side), torch.arange(self.side)) + 1
        pixels = torch.randn(self.rows, self.side**2, self.width, generator=generator)
        return torch.cat([places.float().expand(self.rows, -1, -1), pixels], dim=-1)
