"""What a recompute must find as the first run did: the state of the random generators, and autocast."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

if TYPE_CHECKING:
    from collections.abc import Iterator


class RandomState:
    """The generators of the CPU and of the devices that some tensors live on."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._device = next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), None)
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors) if self._device else ([], [])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState) or self._devices != other._devices:
            return NotImplemented
        mine, others = [self._cpu, *self._states], [other._cpu, *other._states]
        return all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))

    __hash__ = None  # type: ignore[assignment]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """This state inside; what was there before, after."""
        with torch.random.fork_rng(self._devices, device_type=self._device or "cuda"):
            torch.set_rng_state(self._cpu)
            if self._device:
                set_device_states(self._devices, self._states, device_type=self._device)
            yield


class Autocast:
    """Autocast as it is now, without its cache of cast weights.

    A cached cast belongs to one graph node, in which the tiles' gradients would be summed in low precision.
    """

    def __init__(self, device: torch.device) -> None:
        kinds = [kind for kind in {device.type, "cpu"} if torch.amp.is_autocast_available(kind)]
        self._settings = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._settings:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            yield
