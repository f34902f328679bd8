"""Names the warnings of other packages that a test may run into. A warning of Lowtide is never among them.

Which warnings come depends on versions, and `make test-compat` and `make test-torch` run the tests with others; so
packages are named and not messages. Lowtide's own warnings are known by their first word, whatever line they point to.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_OURS = "(?!lowtide)"
"""Fits the message of every warning but Lowtide's."""


def ignore_warnings_of(*packages: str) -> pytest.MarkDecorator:
    """Mark a test in which these packages may warn."""
    return pytest.mark.filterwarnings(*(f"ignore:{NOT_OURS}::{package}" for package in packages))


@contextlib.contextmanager
def ignoring_warnings_of(*packages: str) -> Iterator[None]:
    """Let these packages warn inside the block."""
    with warnings.catch_warnings():
        for package in packages:
            warnings.filterwarnings("ignore", message=NOT_OURS, module=package)
        yield
