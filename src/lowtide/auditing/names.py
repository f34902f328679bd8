"""Names of modules and parameters, without what wrappers add to them, so that two set-ups can be compared."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lowtide.auditing.parallel import inner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)(?:\.|$)")


def plain_name(name: str) -> str:
    """`layers._checkpoint_wrapped_module.0.weight` is `layers.0.weight` to an audit."""
    return _WRAPPERS.sub("", name).rstrip(".")


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once. A wrapper goes by its content's name, and only the content is listed."""
    found = {plain_name(name): module for name, module in inner(model).named_modules()}
    return iter(found.items())


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((plain_name(name), parameter) for name, parameter in inner(model).named_parameters())


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((plain_name(name), buffer) for name, buffer in inner(model).named_buffers())


def some(names: list[str], limit: int = 8) -> list[str]:
    """The first few, for a report; how many there are stands beside them."""
    return names[:limit]
