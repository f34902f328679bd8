"""`make test-peers` runs with every peer at its pinned version, so that no test of a peer is left out there."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PINS = Path(__file__).parent.parent.parent / "constraints-peers.txt"


def pins() -> list[str]:
    return [line for line in PINS.read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.skipif("LOWTIDE_PEERS" not in os.environ, reason="peers are not expected here: make test-peers")
@pytest.mark.parametrize("pin", pins())
def test_the_peer_is_there(pin):
    requirement = Requirement(pin)
    assert requirement.specifier.contains(importlib.metadata.version(requirement.name))
