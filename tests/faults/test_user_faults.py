"""Whatever goes wrong around a store, the error is the user's own, nothing is left, and the next step is right."""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide import simdevice
from models.trained import (
    BOUNDARY,
    DEVICES,
    TOKENS,
    Scene,
    assert_same,
    build,
    end_of_failed_backward,
    forward,
    on_disk,
    train_step,
)
from support import eventually
from support.devices import DEVICE

STORES = {
    "host": "recompute+offload",
    "disk": "recompute+offload(disk={}, tmpfs)",
    "both": f"recompute+offload(host={2 * BOUNDARY}, disk={{}}, tmpfs)",
    "all saved": "offload(disk={}, tmpfs)",
}
PLACES = [(DEVICE, kind) for kind in STORES] + [("cpu", "disk"), ("cpu", "all saved")]
everywhere = pytest.mark.parametrize(("device", "kind"), PLACES)


@everywhere
@pytest.mark.parametrize("number", [0, 2, 4])
def test_an_error_in_forward(sim, tmp_path, device, kind, number):
    scene = Scene(device, STORES[kind].format(tmp_path))
    handle = scene.model[number].down.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        forward(scene.model)
    handle.remove()
    scene.assert_recovers()
    scene.close()


@everywhere
@pytest.mark.parametrize("number", [0, 2, 4])
def test_an_error_in_backward(sim, tmp_path, device, kind, number):
    scene = Scene(device, STORES[kind].format(tmp_path))
    handle = scene.model[number].up.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        train_step(scene.model)
    handle.remove()
    scene.assert_recovers()
    scene.close()


def fail(*_):
    raise ZeroDivisionError


@everywhere
def test_a_backward_that_never_comes(sim, tmp_path, device, kind):
    scene = Scene(device, STORES[kind].format(tmp_path))
    for _ in range(5):
        loss = forward(scene.model)
    assert scene.store.bytes_used > 0
    del loss
    scene.assert_recovers()
    scene.close()


@pytest.mark.parametrize("kind", ["host", "disk", "both"])
@pytest.mark.parametrize("when", ["forward", "recompute"])
def test_out_of_memory_and_then_a_smaller_batch(sim, tmp_path, kind, when):
    scene = Scene(DEVICE, STORES[kind].format(tmp_path))
    small = plain_gradients(TOKENS // 4)
    calls = iter(range(10))

    def fill_the_device(*_):
        if next(calls) == ["forward", "recompute"].index(when):
            torch.accelerator.synchronize()
            simdevice.enable(memory=simdevice.stats().live_bytes + BOUNDARY)

    handle = scene.model[2].up.register_forward_pre_hook(fill_the_device)  # runs in forward and in recompute
    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        train_step(scene.model)
    handle.remove()
    assert eventually(lambda: scene.store.bytes_used == 0)
    simdevice.enable(memory=simdevice.Settings().memory)
    assert_same(train_step(scene.model, TOKENS // 4), small)
    scene.assert_recovers()
    scene.close()


def plain_gradients(tokens):
    return train_step(build(DEVICE), tokens)


STORES_CODE = str(Path(lowtide.__file__).parent / "stores")


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line that the stores run in this thread, as a signal could."""

    def __init__(self, line: int) -> None:
        self.line, self.seen = line, 0

    def __call__(self, frame, event, _argument):
        if not frame.f_code.co_filename.startswith(STORES_CODE) or in_destructor(frame):
            return None
        if event == "line" and not is_with(frame):
            self.seen += 1
            if self.seen == self.line:
                raise KeyboardInterrupt
        return self

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


def is_with(frame) -> bool:
    """Between the end of a `with` block and its `__exit__` a tracer can raise, and a signal cannot."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def in_destructor(frame) -> bool:
    """There Python itself swallows what is raised."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@everywhere
def test_a_keyboard_interrupt_at_any_line_of_a_store(sim, tmp_path, device, kind):
    scene = Scene(device, STORES[kind].format(tmp_path))
    with Interrupter(line=-1) as count:
        train_step(scene.model)
    assert count.seen > 100
    for line in range(1, count.seen, max(1, count.seen // 120)):
        scene.model.zero_grad()
        with Interrupter(line), contextlib.suppress(KeyboardInterrupt):  # a run may have fewer lines
            train_step(scene.model)
        end_of_failed_backward()
        assert eventually(lambda: scene.store.bytes_used == 0), f"interrupted at line {line}"
    scene.assert_recovers()
    scene.close()


@pytest.mark.parametrize("device", DEVICES)
def test_two_models_with_two_policies(sim, tmp_path, device):
    scenes = [Scene(device, on_disk(tmp_path)), Scene(device, on_disk(tmp_path, verify=True))]
    scenes.append(Scene(device, "recompute"))
    losses = [forward(scene.model) for scene in scenes]
    for scene, loss in zip(scenes, losses, strict=True):
        scene.model.zero_grad()
        loss.backward()
        assert_same([parameter.grad.cpu() for parameter in scene.model.parameters()], scene.expected)
    assert scenes[0].store is not scenes[1].store
    assert [scene.store.usage().disk.verify for scene in scenes[:2]] == [False, True]
    del losses, loss
    for scene in scenes[:2]:
        scene.assert_recovers()
    for scene in scenes:
        scene.applied.remove()
        del scene.applied
    scene = Scene(device, on_disk(tmp_path))
    scene.threads = 0
    scene.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shared", ["store", "schedule"])
def test_threads_share_a_store(fresh_device, tmp_path, device, shared):
    disk = lowtide.DiskStore(tmp_path, tmpfs=True, block=4096, verify=True)
    schedule, errors = lowtide.Schedule(disk), []

    def gradient(offload, number):
        x = torch.full((64, 32), float(number)).to(device).requires_grad_()
        y = x * 1
        for power in range(6):
            y = lowtide.checkpoint(lambda a, power=power: (a / (power + 1)).sin(), y, offload=offload)
        y.sum().backward()
        return x.grad.cpu()

    expected = [gradient(None, number) for number in range(4)]

    def run(number):
        try:
            for _ in range(20):
                assert torch.equal(gradient(disk if shared == "store" else schedule, number), expected[number])
        except BaseException as error:  # noqa: BLE001  (shown by the test)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert eventually(lambda: disk.bytes_used == 0)
    assert disk.peak_bytes > 0
