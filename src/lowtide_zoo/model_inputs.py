"""Describes a batch before it exists (a recipe), and what it must fit (`ModelInputs`).

A recipe maps the arguments of a forward to parts, and each part makes its value for a seed, always of the same shape.
Where placeholders stand, how long things are and what is masked belongs to the recipe; only values that would vary in
a data set depend on the seed.

`ModelInputs` reads from a model what its batches must fit: the arguments of its forward, its vocabulary, and the
configurations of its towers.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lowtide_zoo.classes import configurations_in, first_field, get_field
from lowtide_zoo.shrink import is_token_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


# The samples in a batch, and the tokens in a sample.
ROWS = 2
LENGTH = 12

# Plain tokens are taken from this range: above the usual marks, below the placeholders.
_FIRST_PLAIN, _AFTER_PLAIN = 8, 72


class Part(Protocol):
    """A description of one argument of a forward."""

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> Any:
        """Make the value; `made` holds the values of the parts before it."""


Recipe = dict[str, Part]


def make_batch(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Make a recipe's batch for a seed."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for name, part in recipe.items():
        made[name] = part.make(generator, made)
    return made


@dataclasses.dataclass(frozen=True)
class Noise:
    """Normally distributed numbers: pixels, spectrograms, waveforms, embeddings."""

    shape: tuple[int, ...]

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> torch.Tensor:  # noqa: ARG002
        return torch.randn(self.shape, generator=generator)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Uniformly distributed numbers in [low, high): coordinates, depths, masks."""

    shape: tuple[int, ...]
    low: float = 0.0
    high: float = 1.0

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> torch.Tensor:  # noqa: ARG002
        return self.low + (self.high - self.low) * torch.rand(self.shape, generator=generator)


@dataclasses.dataclass(frozen=True)
class Integers:
    """Random integers in [low, high): classes, codes."""

    shape: tuple[int, ...]
    high: int
    low: int = 0

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> torch.Tensor:  # noqa: ARG002
        return torch.randint(self.low, self.high, self.shape, generator=generator)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Rows of plain tokens, with special ones (placeholders, marks) at fixed positions of every row."""

    rows: int
    length: int
    plain: tuple[int, ...]
    special: tuple[tuple[int, int], ...] = ()
    """Pairs of position and token."""

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> torch.Tensor:  # noqa: ARG002
        chosen = torch.randint(len(self.plain), (self.rows, self.length), generator=generator)
        tokens = torch.tensor(self.plain)[chosen]
        for position, token in self.special:
            tokens[:, position] = token
        return tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    """A value that is the same for every seed: masks, grids, sizes, switches."""

    value: Any

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> Any:  # noqa: ARG002
        return self.value.clone() if isinstance(self.value, torch.Tensor) else self.value


@dataclasses.dataclass(frozen=True)
class CopyOf:
    """A copy of an argument that was made before."""

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
class PerSample:
    """A list with one entry per sample; an entry is one part, or several by name."""

    rows: int
    entry: Part | dict[str, Part]

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> list[Any]:
        return [self._one(generator, made) for _ in range(self.rows)]

    def _one(self, generator: torch.Generator, made: dict[str, Any]) -> Any:
        if isinstance(self.entry, dict):
            return {name: part.make(generator, made) for name, part in self.entry.items()}
        return self.entry.make(generator, made)


@dataclasses.dataclass(frozen=True)
class PositionedPatches:
    """Patches of square images, each with its row and column, counted from one, in front."""

    rows: int
    side: int
    width: int

    def make(self, generator: torch.Generator, made: dict[str, Any]) -> torch.Tensor:  # noqa: ARG002
        positions = torch.cartesian_prod(torch.arange(self.side), torch.arange(self.side)) + 1
        pixels = torch.randn(self.rows, self.side**2, self.width, generator=generator)
        return torch.cat([positions.float().expand(self.rows, -1, -1), pixels], dim=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelInputs:
    """What a model takes as its inputs, read from its forward and its configuration."""

    model: nn.Module
    config: Any
    notes: list[str] = dataclasses.field(default_factory=list)
    """What went wrong while batches were proposed."""

    @functools.cached_property
    def arguments(self) -> dict[str, inspect.Parameter]:
        """The parameters of the model's forward, by name."""
        return dict(inspect.signature(self.model.forward).parameters)

    @functools.cached_property
    def required(self) -> tuple[str, ...]:
        """The names of the arguments without a default."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return tuple(name for name, p in self.arguments.items() if p.default is p.empty and p.kind in kinds)

    def takes(self, name: str) -> bool:
        """Tell whether the forward has an argument of this name."""
        return name in self.arguments

    @property
    def main_input(self) -> str:
        """The argument that the model declares to be its main input."""
        name = getattr(self.model, "main_input_name", "input_ids")
        return name if isinstance(name, str) else "input_ids"

    @property
    def class_name(self) -> str:
        """The name of the model's class."""
        return type(self.model).__name__

    @functools.cached_property
    def vocabulary(self) -> int:
        """The size of the vocabulary of plain text."""
        for name in ("vocab_size", "text_vocab_size", "src_vocab_size"):
            value = self.text_field(name)
            if isinstance(value, int):
                return value
        return _AFTER_PLAIN

    @functools.cached_property
    def plain_tokens(self) -> tuple[int, ...]:
        """Tokens that no field of the configuration gives a meaning to."""
        special = set(_special_tokens(self.config))
        low = _FIRST_PLAIN if self.vocabulary > 2 * _FIRST_PLAIN else 1
        plain = tuple(token for token in range(low, min(self.vocabulary, _AFTER_PLAIN)) if token not in special)
        return plain or (1,)

    def tokens(self, length: int = LENGTH, special: Sequence[tuple[int, int]] = ()) -> Tokens:
        """Describe rows of plain tokens, with special ones at the positions given."""
        return Tokens(ROWS, length, self.plain_tokens, tuple(special))

    def text_field(self, *names: str) -> Any:
        """Return the first of these fields that is set, in the text model's configuration or else in the whole one."""
        getter = getattr(self.config, "get_text_config", None)
        text = getter(decoder=True) if getter is not None else self.config
        found = first_field(text, *names)
        return first_field(self.config, *names) if found is None else found

    def tower(self, *towers: str) -> Any:
        """Return the configuration of the first of these towers, or the model's if it has none of them."""
        for config in configurations_in(self.config):
            for name in towers:
                found = get_field(config, name)
                if hasattr(found, "model_type"):
                    return found
        return self.config


def ones(*shape: int) -> Fixed:
    """Describe a mask that lets everything through."""
    return Fixed(torch.ones(shape, dtype=torch.long))


def text_recipe(inputs: ModelInputs, length: int = LENGTH) -> Recipe:
    """Describe plain text and its mask."""
    return {"input_ids": inputs.tokens(length), "attention_mask": ones(ROWS, length)}


def summarize_error(error: Exception) -> str:
    """Put an error into one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _special_tokens(config: Any) -> list[int]:
    found: list[int] = []
    for part in configurations_in(config):
        for name, value in vars(part).items():
            if is_token_id(name):
                found += [v for v in (value if isinstance(value, list | tuple) else [value]) if type(v) is int]
    return found
