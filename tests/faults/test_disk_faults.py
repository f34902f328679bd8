"""A disk that fails ends a step with an error that says where and what to do, and the next step works."""

from __future__ import annotations

import errno
import os
import resource

import pytest

import lowtide
from lowtide.errors import StoreError
from lowtide.stores import host_memory as memory
from lowtide.stores.host_memory import buffer_of
from models.trained import BOUNDARY, DEVICES, LAYERS, Scene, assert_same, build, forward, on_disk, train_step
from support.devices import DEVICE

on_devices = pytest.mark.parametrize("device", DEVICES)


@on_devices
@pytest.mark.parametrize("number", range(LAYERS - 1))
@pytest.mark.parametrize(("error", "cure"), [(errno.ENOSPC, "free some space there"), (errno.EIO, "the disk fails")])
def test_a_write_fails(sim, tmp_path, faulty, device, number, error, cure):
    scene = Scene(device, on_disk(tmp_path))
    faulty.fail_writes(number, error)
    says = f"disk store in {tmp_path}: could not write 16 KiB at {number * BOUNDARY}: {os.strerror(error)}.*{cure}"
    scene.model.zero_grad()
    with pytest.raises(StoreError, match=says):
        forward(scene.model)
    assert all(parameter.grad is None for parameter in scene.model.parameters())
    faulty.heal()
    scene.assert_recovers()
    scene.close()


@on_devices
@pytest.mark.parametrize("number", range(LAYERS - 1))
def test_a_read_fails(sim, tmp_path, faulty, device, number):
    scene = Scene(device, on_disk(tmp_path))
    faulty.fail_reads(number, errno.EIO)
    place = (LAYERS - 2 - number) * BOUNDARY
    with pytest.raises(StoreError, match=f"{tmp_path}: could not read 16 KiB at {place}: Input/output error"):
        train_step(scene.model)
    faulty.heal()
    scene.assert_recovers()
    scene.close()


@on_devices
@pytest.mark.parametrize("at_most", [4096, 5000])
def test_calls_move_less_than_they_are_asked_for(sim, tmp_path, faulty, device, at_most):
    scene = Scene(device, on_disk(tmp_path))
    faulty.at_most = at_most
    assert_same(train_step(scene.model), scene.expected)
    scene.close()


@on_devices
def test_a_slow_disk_is_waited_for(sim, tmp_path, faulty, device):
    scene = Scene(device, on_disk(tmp_path))
    faulty.delay = 0.02
    assert_same(train_step(scene.model), scene.expected)
    assert scene.applied.report().seconds_waited > 0.02
    scene.close()


@on_devices
def test_the_file_is_cut_short_underneath(sim, tmp_path, device):
    scene = Scene(device, on_disk(tmp_path))
    loss = forward(scene.model)
    os.ftruncate(scene.store.resources.file._handle, BOUNDARY // 2)
    with pytest.raises(StoreError, match=r"could not read 16 KiB at .*cut short"):
        loss.backward()
    del loss
    scene.assert_recovers()
    scene.close()


@on_devices
def test_the_directory_is_removed(sim, tmp_path, device):
    place = tmp_path / "scratch"
    place.mkdir()
    scene = Scene(device, on_disk(place))
    place.rmdir()
    scene.assert_recovers()
    with pytest.raises(StoreError, match=f"{place} cannot be used: No such file or directory"):
        lowtide.apply(scene.model, on_disk(place, verify=True))
    scene.assert_recovers()
    scene.close()


def test_a_limit_that_does_not_fit_is_refused_before_anything_starts(tmp_path):
    model = build("cpu")
    with pytest.raises(StoreError, match=rf"limit of 900 TiB is more than the .* that are free in {tmp_path}"):
        lowtide.apply(model, on_disk(tmp_path, limit="900TiB"))
    assert "forward" not in model[0].__dict__


def test_out_of_file_descriptors(tmp_path):
    scene = Scene("cpu", on_disk(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)  # all below are in use
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(StoreError, match=r"Too many open files.*ulimit -n"):
            lowtide.apply(build("cpu"), on_disk(tmp_path))
        assert_same(train_step(scene.model), scene.expected)  # it has its file
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    scene.assert_recovers()
    scene.close()


@pytest.mark.parametrize("policy", ["recompute+offload", "recompute+offload(disk={}, tmpfs)"])
def test_no_pinned_memory_left(sim, tmp_path, monkeypatch, policy):
    def fail(size):
        raise RuntimeError(f"cannot pin {size} bytes")

    monkeypatch.setattr(memory, "pinned", fail)
    scene = Scene(DEVICE, policy.format(tmp_path))
    with pytest.warns(UserWarning, match=r"no pinned memory left for .* \(ulimit -l\)") as said:
        scene.assert_recovers()
    assert len(said) == 1
    report = scene.applied.report()
    assert report.pageable_bytes > 0
    assert "of host memory could not be pinned" in str(report)
    monkeypatch.undo()
    scene.close()


@on_devices
@pytest.mark.parametrize("verify", [False, True])
def test_a_byte_changed_underneath(sim, tmp_path, device, verify):
    scene = Scene(device, on_disk(tmp_path, verify=verify))
    loss = forward(scene.model)
    page = memory.page_aligned(4096)
    os.preadv(scene.store.resources.file._handle, [buffer_of(page)], 0)
    page[8] += 1
    os.pwritev(scene.store.resources.file._handle, [buffer_of(page)], 0)
    if verify:
        with pytest.raises(StoreError, match="checksum differs"):
            loss.backward()
    else:
        loss.backward()  # nobody asked for checksums
    del loss
    scene.assert_recovers()
    scene.close()
