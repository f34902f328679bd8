"""The parts of a batch, as descriptions: each makes its value for a seed, always of the same shape.

A recipe maps the arguments of a forward to parts. Where placeholders stand, how long things are and what is masked
belongs to the description; only values that a data set would vary depend on the seed.

What a batch must fit: the arguments of a forward, the vocabulary, the sizes of pictures and sound.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lowtide_zoo.classes import configurations_in, read
from lowtide_zoo.shrink import is_token_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


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


ROWS = 2

LENGTH = 12

# Plain tokens are taken from here: above the usual marks, below the placeholders.
_FIRST_PLAIN, _AFTER_PLAIN = 8, 72


@dataclasses.dataclass(frozen=True, eq=False)
class ModelInputs:
    """A model that needs a batch."""

    model: nn.Module
    config: Any
    notes: list[str] = dataclasses.field(default_factory=list)
    """What went wrong while batches were made up."""

    @functools.cached_property
    def arguments(self) -> dict[str, inspect.Parameter]:
        """The arguments of the model's forward, by name."""
        return dict(inspect.signature(self.model.forward).parameters)

    @functools.cached_property
    def required(self) -> tuple[str, ...]:
        """Those of them without a default."""
        empty, kinds = (
            inspect.Parameter.empty,
            (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY),
        )
        return tuple(name for name, p in self.arguments.items() if p.default is empty and p.kind in kinds)

    def takes(self, name: str) -> bool:
        """Whether the forward has an argument of this name."""
        return name in self.arguments

    @property
    def main_input(self) -> str:
        """The first thing the model says it works on."""
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
            value = self.text(name)
            if isinstance(value, int):
                return value
        return _AFTER_PLAIN

    @functools.cached_property
    def plain_tokens(self) -> tuple[int, ...]:
        """Tokens without a meaning of their own."""
        special = set(_special_tokens(self.config))
        low = _FIRST_PLAIN if self.vocabulary > 2 * _FIRST_PLAIN else 1
        plain = tuple(token for token in range(low, min(self.vocabulary, _AFTER_PLAIN)) if token not in special)
        return plain or (1,)

    def tokens(self, length: int = LENGTH, planted: Sequence[tuple[int, int]] = ()) -> Tokens:
        """Rows of plain tokens, with others planted in them."""
        return Tokens(ROWS, length, self.plain_tokens, tuple(planted))

    def text(self, *names: str) -> Any:
        """A field of the text model's configuration."""
        getter = getattr(self.config, "get_text_config", None)
        text = getter(decoder=True) if getter is not None else self.config
        found = first(text, *names)
        return first(self.config, *names) if found is None else found

    def tower(self, *towers: str) -> Any:
        """The configuration of a tower, or that of the model itself if it is one."""
        for config in configurations_in(self.config):
            for name in towers:
                found = read(config, name)
                if hasattr(found, "model_type"):
                    return found
        return self.config


def ones(*shape: int) -> Fixed:
    """A mask that lets everything through."""
    return Fixed(torch.ones(shape, dtype=torch.long))


def text(inputs: ModelInputs, length: int = LENGTH) -> Recipe:
    """Plain text and its mask."""
    return {"input_ids": inputs.tokens(length), "attention_mask": ones(ROWS, length)}


def in_short(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def first(config: Any, *names: str) -> Any:
    """The first of some fields that is set."""
    return next((read(config, name) for name in names if read(config, name) is not None), None)


def anywhere(config: Any, *names: str) -> Any:
    """The first of some fields that is set, in a configuration or those inside it."""
    found = (first(part, *names) for part in configurations_in(config))
    return next((value for value in found if value is not None), None)


def _special_tokens(config: Any) -> list[int]:
    found: list[int] = []
    for part in configurations_in(config):
        for name, value in vars(part).items():
            if is_token_id(name):
                found += [v for v in (value if isinstance(value, list | tuple) else [value]) if type(v) is int]
    return found
