from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING

import pytest
import torch

from lowtide import simdevice

if TYPE_CHECKING:
    from collections.abc import Iterator

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _device_comes_first() -> None:
    """Torch starts its backward threads with the first backward, for the devices that it knows then.

    It imports its compiler with the first function that the compiler must not see. What the import leaves in cycles
    holds the frames around it, and so the tensors of the test that happens to be the first.
    """
    importlib.import_module("torch._dynamo")
    simdevice.enable()


@pytest.fixture
def sim() -> Iterator[str]:
    """The emulated device in its default state. A test that breaks a rule must say so with `expect_violation`.

    The collector waits: what an earlier test left in cycles must not vanish between two readings of live bytes.
    """
    gc.disable()
    default = simdevice.Settings()
    simdevice.enable(
        memory=default.memory,
        flops=default.flops,
        bandwidth=default.bandwidth,
        h2d=default.h2d,
        d2h=default.d2h,
        launch=default.launch,
        on_violation=default.on_violation,
    )
    # The device's backward thread holds the last node of the last backward until it is told to run another.
    torch.empty(0, device="sim", requires_grad=True).backward(torch.empty(0, device="sim"))
    simdevice.reset()
    torch.manual_seed(0)
    yield "sim"
    gc.enable()
    left = simdevice.violations()
    simdevice.reset()
    assert not left, "\n".join(map(str, left))
