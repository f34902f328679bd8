"""What tests of applied policies share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """The compiler as if it had compiled nothing yet."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
