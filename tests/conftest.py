from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING

import pytest
import torch

from lowtide import simdevice
from support.devices import DEVICE, IS_EMULATED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _device_comes_first() -> None:
    """Torch starts its backward threads with the first backward, for the devices that it knows then.

    It imports its compiler with the first function that the compiler must not see. What the import leaves in cycles
    holds the frames around it, and so the tensors of the test that happens to be the first.
    """
    importlib.import_module("torch._dynamo")
    if IS_EMULATED:
        simdevice.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On another device than the emulated one, run only the tests that take the device from the fixture."""
    if IS_EMULATED:
        return
    chosen = [item for item in items if is_about_no_device_in_particular(item.fixturenames)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def is_about_no_device_in_particular(fixtures: list[str]) -> bool:
    return "fresh_device" in fixtures and "sim" not in fixtures


@pytest.fixture
def fresh_device(request: pytest.FixtureRequest) -> str:
    """The device of tests that are about no device in particular: `sim`, or another one by `make test DEVICE=cuda`.

    On `sim`, the test may break no rule of streams and memory. A test with a parameter `device` takes this one.
    """
    if IS_EMULATED:
        return request.getfixturevalue("sim")
    torch.manual_seed(0)
    return DEVICE


@pytest.fixture
def device(fresh_device: str) -> str:
    """The same by its usual name."""
    return fresh_device


@pytest.fixture
def sim() -> Iterator[str]:
    """The emulated device in its default state, for tests that count on it.

    A test that breaks a rule must say so with `expect_violation`.

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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plans in a cache of their own."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    return tmp_path / "plans"
