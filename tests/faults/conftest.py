from __future__ import annotations

import pytest

from support.faulty_disk import FaultyDisk


@pytest.fixture
def faulty(monkeypatch):
    """The disk, which works until a test says otherwise."""
    return FaultyDisk(monkeypatch)
