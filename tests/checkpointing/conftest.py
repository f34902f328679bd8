from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from lowtide.checkpointing import Schedule
from lowtide.stores import HostStore

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def engine(sim):
    """A schedule with an offloading store, on the device."""
    return Schedule(HostStore())


@pytest.fixture
def debugging() -> Iterator[None]:
    """Lets a test switch on torch's debugging of checkpoints, which leaves its logger without parents.

    Pytest listens to such loggers, too, and this one's records are not for formatting: the next such test would fail.
    """
    logger = logging.getLogger("LoggingTensor")
    level, is_heard = logger.level, logger.propagate
    yield
    logger.propagate = is_heard
    logger.setLevel(level)
