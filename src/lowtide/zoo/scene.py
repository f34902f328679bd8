"""What a batch must fit: the arguments of a forward, the vocabulary, the sizes of pictures and sound."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from lowtide.zoo.fields import read
from lowtide.zoo.parts import Fixed, Recipe, Tokens
from lowtide.zoo.specimen import configurations_in
from lowtide.zoo.token_ids import is_token_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

ROWS = 2
LENGTH = 12
# Plain tokens are taken from here: above the usual marks, below the placeholders.
_FIRST_PLAIN, _AFTER_PLAIN = 8, 72


@dataclasses.dataclass(frozen=True, eq=False)
class Scene:
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


def text(scene: Scene, length: int = LENGTH) -> Recipe:
    """Plain text and its mask."""
    return {"input_ids": scene.tokens(length), "attention_mask": ones(ROWS, length)}


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
