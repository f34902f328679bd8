"""`torch.sim`: the module that torch and its users expect of a device (`torch.get_device_module("sim")`).

Most of it repeats, under the device's name, what `torch.accelerator` offers for whichever accelerator there is.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import accelerator

from lowtide.simdevice import _build

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_initialized = True  # torch's checkpoint keeps a device's random state only if it finds this

Stream = torch.Stream
Event = torch.Event

memory_allocated = accelerator.memory_allocated
max_memory_allocated = accelerator.max_memory_allocated
memory_reserved = accelerator.memory_reserved
max_memory_reserved = accelerator.max_memory_reserved
memory_stats = accelerator.memory_stats
reset_peak_memory_stats = accelerator.reset_peak_memory_stats
reset_accumulated_memory_stats = accelerator.reset_accumulated_memory_stats
mem_get_info = accelerator.get_memory_info
empty_cache = accelerator.empty_cache
synchronize = accelerator.synchronize
current_stream = accelerator.current_stream
set_stream = accelerator.set_stream


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False  # the device is ordinary memory, which a fork copies


def _lazy_init() -> None:
    pass


def init() -> None:
    pass


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: torch.device | int | str) -> None:
    accelerator.set_device_index(_index(device))


def device(device: torch.device | int | str | None = None) -> AbstractContextManager[None]:
    """Return a context in which `device` is current; there is only one."""
    _index(device)
    return contextlib.nullcontext()


def get_device_name(device: torch.device | int | str | None = None) -> str:
    _index(device)
    return "Lowtide emulated accelerator"


def get_device_capability(device: torch.device | int | str | None = None) -> tuple[int, int]:
    """Return (0, 0), which no product has."""
    _index(device)
    return (0, 0)


class DeviceProperties(NamedTuple):
    name: str
    total_memory: int


def get_device_properties(device: torch.device | int | str | None = None) -> DeviceProperties:
    return DeviceProperties(name=get_device_name(device), total_memory=accelerator.get_memory_info()[1])


def is_current_stream_capturing() -> bool:
    return False


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Return a context in which `stream` is current."""
    return contextlib.nullcontext() if stream is None else stream


def default_stream(device: Any = None) -> torch.Stream:
    _index(device)
    return torch.Stream(stream_id=0, device_index=0, device_type=current_stream().device_type)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:  # noqa: ARG001  (torch's signature)
    return True


def _generator() -> torch.Generator:
    generator: torch.Generator = _build.library().default_generator()
    return generator


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    _index(device)
    return _generator().get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "sim") -> None:
    _index(device)
    _generator().set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    (state,) = new_states
    set_rng_state(state)


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    manual_seed(seed)


def seed() -> int:
    return _generator().seed()


def seed_all() -> None:
    seed()


def initial_seed() -> int:
    return _generator().initial_seed()


def _index(device: Any) -> int:
    if device is None:
        return 0
    index = device if isinstance(device, int) else torch.device(device).index or 0
    if index != 0:
        raise RuntimeError(f"sim: there is one device per process, so index {index} does not exist; use sim or sim:0")
    return 0
