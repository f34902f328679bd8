"""The device of tests that are about no device in particular: the emulated one, or that of `make test DEVICE=cuda`."""

from __future__ import annotations

import os

DEVICE = os.environ.get("LOWTIDE_TEST_DEVICE", "sim")
IS_EMULATED = DEVICE == "sim"
