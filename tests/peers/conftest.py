"""Tests here borrow the launcher of the distributed ones."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "distributed"))
