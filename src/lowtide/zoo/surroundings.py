"""What trying out models would otherwise leave behind or depend on: random states, warnings, log messages.

Some models draw from the random generators of numpy and Python, not only from torch's. All three are set from the seed
and put back afterwards, so that a specimen does not depend on its caller, nor its caller on it. Specimens are on the
CPU, so other devices' generators are left alone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import random
import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Random numbers from this seed inside, the caller's own afterwards."""
    numpy_random = importlib.import_module("numpy.random")
    numpy_state, python_state = numpy_random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds every device
            numpy_random.seed(seed)
            random.seed(seed)
            yield
    finally:
        numpy_random.set_state(numpy_state)
        random.setstate(python_state)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no log messages of transformers inside."""
    logger = logging.getLogger("transformers")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
