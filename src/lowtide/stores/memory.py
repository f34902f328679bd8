"""Host memory for copies: pinned if there is any left, else pageable, which is said and counted."""

from __future__ import annotations

import warnings

import torch

PAGE = 4096
"""What direct I/O wants addresses, lengths and offsets to be multiples of."""


def round_up(size: int) -> int:
    """To whole pages."""
    return -(-size // PAGE) * PAGE


def round_down(size: int) -> int:
    """To whole pages."""
    return size // PAGE * PAGE


def pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def page_aligned(size: int) -> torch.Tensor:
    """Pageable memory that starts at a page. None of it is touched."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + size]


class HostMemory:
    """Allocates pinned memory for one store.

    When the system has none left (a driver's or a container's limit), memory is pageable: everything stays right, and
    copies to it no longer overlap with compute. A warning says so once, and `pageable_bytes` tells how much it was.
    """

    def __init__(self) -> None:
        self.pageable_bytes = 0

    def __call__(self, size: int) -> torch.Tensor:
        try:
            return pinned(size)
        except RuntimeError as error:
            if not self.pageable_bytes:
                reason = str(error).splitlines()[0]
                warnings.warn(
                    f"lowtide: no pinned memory left for {size} bytes ({reason}): the store goes on with pageable "
                    "memory, whose copies do not overlap with compute. Lower the host limit, or raise the limit of "
                    "locked memory (ulimit -l)",
                    stacklevel=2,
                )
            self.pageable_bytes += size
            return page_aligned(size)
