"""A tensor's bytes as Python's buffer, for system calls. Torch itself has none, and NumPy is not needed for it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host. The tensor must outlive it."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
