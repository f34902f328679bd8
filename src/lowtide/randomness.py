"""Saves, seeds and restores the random generators: torch's on the CPU and on devices, Python's and NumPy's.

A recompute restores the state that its first run found (`RandomState`); the audit and the zoo run every step from one
seed and leave the caller's generators as they were. `torch.manual_seed` is avoided throughout: it seeds every device of
the machine, and a generator that is not touched need not be put back.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from lowtide.modules import device_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class RandomState:
    """A snapshot of the CPU's generator and of the generators of the devices that the given tensors live on."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._device = next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), None)
        self._cpu = torch.default_generator.get_state()
        self._devices: list[int] = []
        self._states: list[torch.Tensor] = []
        if self._device:
            there = [tensor for tensor in tensors if tensor.device.type == self._device]
            self._devices, self._states = get_device_states(*there)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState) or self._devices != other._devices:
            return NotImplemented
        pairs = zip([self._cpu, *self._states], [other._cpu, *other._states], strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]

    def again(self) -> RandomState:
        """Return a snapshot of the same generators as they are now."""
        now = object.__new__(RandomState)
        now._device, now._devices, now._cpu = self._device, self._devices, torch.default_generator.get_state()
        module = torch.get_device_module(self._device) if self._device else None
        now._states = [module.get_rng_state(device) for device in self._devices] if module is not None else []
        return now

    def set(self) -> None:
        """Let the generators go on from here."""
        torch.default_generator.set_state(self._cpu)
        if self._device:
            set_device_states(self._devices, self._states, device_type=self._device)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Set this state inside, and put back afterwards what was there before."""
        with torch.random.fork_rng(self._devices, device_type=self._device or "cuda"):
            self.set()
            yield


@contextlib.contextmanager
def seeded_like(seed: int, *tensors: torch.Tensor) -> Iterator[None]:
    """Seed the CPU's generator and those of the tensors' devices inside, and put back afterwards what was there."""
    state = RandomState(*tensors)
    with state.restored():
        torch.default_generator.manual_seed(seed)
        for device in {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}:
            seeded_state = torch.Generator(device).manual_seed(seed).get_state()
            torch.get_device_module(device).set_rng_state(seeded_state, device)
        yield


class HostRandomState:
    """A snapshot of Python's and NumPy's generators, which torch's checkpoint does not preserve."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)  # noqa: NPY002

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostRandomState):
            return NotImplemented
        return self._python == other._python and pickle.dumps(self._numpy) == pickle.dumps(other._numpy)

    __hash__ = None  # type: ignore[assignment]

    def set(self) -> None:
        """Let the generators go on from here."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Set this state inside, and put back afterwards what was there before."""
        now = HostRandomState()
        try:
            self.set()
            yield
        finally:
            now.set()


def set_seed(seed: int, devices: list[torch.device]) -> None:
    """Seed Python's, NumPy's and the CPU's generators, and the generators of `devices`."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (models draw from this one)
    torch.default_generator.manual_seed(seed)
    for device in devices:
        state = torch.Generator(device).manual_seed(seed).get_state()
        torch.get_device_module(device).set_rng_state(state, device)


@contextlib.contextmanager
def preserved_generators(model: nn.Module) -> Iterator[list[torch.device]]:
    """Restore, at the end, every generator that a step of `model` may draw from; yields the model's accelerators."""
    kind = device_of(model).type
    devices = sorted({p.device for p in model.parameters() if p.device.type == kind != "cpu"}, key=str)
    with _preserved(devices):
        yield devices


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's generators inside, and leave the caller's as they were."""
    with _preserved([]):
        set_seed(seed, [])
        yield


@contextlib.contextmanager
def _preserved(devices: list[torch.device]) -> Iterator[None]:
    before = HostRandomState()
    try:
        with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
            yield
    finally:
        before.set()
