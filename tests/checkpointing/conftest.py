from __future__ import annotations

import pytest

from lowtide.checkpointing import Schedule
from lowtide.stores import HostStore


@pytest.fixture
def engine(sim):
    """A schedule with an offloading store, on the device."""
    return Schedule(HostStore())
