"""Host first, disk past its limit: the oldest moves on, for backward needs it last."""

from __future__ import annotations

import errno
import threading

import pytest
import torch

import lowtide
from lowtide import simdevice
from lowtide.errors import InvalidValueError, OffloadError, StoreError
from lowtide.stores import DiskStore, HostStore, TieredStore
from support import eventually
from support.devices import DEVICE

NBYTES = 16384
ROOM = 3


def tiers(directory, limit=ROOM * NBYTES, **settings) -> TieredStore:
    return TieredStore(HostStore(limit), DiskStore(directory, tmpfs=True, **settings))


def tensor(number):
    return torch.full((NBYTES // 4,), float(number)).to(DEVICE)


def fill(store, count):
    held = []
    for number in range(count):
        held.append(store.put(tensor(number)))
        assert held[-1].start()
        held[-1].release()
    return held


def places(held):
    return ["disk" if stored.is_spilled else "host" for stored in held]


def test_what_is_needed_first_stays_nearest(device, tmp_path):
    store = tiers(tmp_path)
    held = fill(store, 8)
    assert places(held) == ["disk"] * 5 + ["host"] * 3
    assert all(stored.is_away for stored in held)
    assert store.host.bytes_used == ROOM * NBYTES
    written = store.disk.usage().disk.written_bytes
    assert 5 * NBYTES <= written <= 6 * NBYTES, "what does not fit, and room for the next one"
    for number, stored in reversed(list(enumerate(held))):
        if number:
            held[number - 1].prefetch()
        assert stored.get().eq(number).all().item()
        assert stored.take_fetched() == NBYTES
    del held, stored
    assert eventually(lambda: store.bytes_used == 0)
    assert store.peak_bytes <= ROOM * NBYTES + 6 * NBYTES


def test_a_tensor_larger_than_the_host_goes_straight_to_disk(device, tmp_path):
    store = tiers(tmp_path, limit=NBYTES // 2)
    (stored,) = fill(store, 1)
    assert (places([stored]), stored.is_away, store.host.bytes_used) == (["disk"], True, 0)
    assert stored.get().eq(0).all().item()


def test_both_tiers_full_is_said(device, tmp_path):
    store = tiers(tmp_path, limit=2 * NBYTES + 1)
    store.disk.resources.file.limit = 2 * NBYTES
    held = [store.put(tensor(number)) for number in range(6)]
    fits = []
    for stored in held:
        fits.append(stored.start())
        stored.release()
    assert fits == [True] * 4 + [False] * 2
    assert [stored.get().eq(number).all().item() for number, stored in enumerate(held)] == [True] * 6


def test_a_disk_that_fails_costs_the_step_and_no_tensor(device, tmp_path, faulty):
    store = tiers(tmp_path)
    held = fill(store, 2)
    faulty.fail_writes(0, errno.EIO)
    held.append(store.put(tensor(2)))
    held[-1].start()
    held[-1].release()
    extra = store.put(tensor(3))
    with pytest.raises(StoreError, match="the disk fails"):
        extra.start()
    assert [stored.get().eq(number).all().item() for number, stored in enumerate(held)] == [True] * 3
    faulty.heal()
    assert extra.start()
    extra.release()
    assert places([*held, extra]) == ["disk", "host", "host", "host"]
    assert held[0].get().eq(0).all().item()


def test_threads_read_what_others_push_to_the_disk(device, tmp_path, faulty):
    """A reader must never find the host's memory given back under it."""
    store, errors = tiers(tmp_path), []
    faulty.delay = 0.001

    def churn(base):
        try:
            for round_ in range(10):
                held = fill(store, 4)
                right = [stored.get().eq(number).all().item() for number, stored in reversed(list(enumerate(held)))]
                assert all(right), (base, round_, right)
        except BaseException as error:  # noqa: BLE001  (shown by the test)
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(base,)) for base in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert eventually(lambda: store.bytes_used == 0)


def test_under_a_policy(sim, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(8)))
    model.to(sim)
    x = torch.randn(128, 32).to(sim)

    def step():
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.cpu() for p in model.parameters()]

    expected = step()
    simdevice.reset()
    with lowtide.apply(model, f"recompute+offload(host={ROOM * NBYTES}, disk={tmp_path}, tmpfs, verify)") as applied:
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
        report = applied.report()
    assert [region.packed_bytes for region in report.regions] == [2 * NBYTES] * 7 + [0]
    assert [region.restored_bytes for region in report.regions] == [2 * NBYTES] * 7 + [0]
    assert 8 * NBYTES <= report.disk.written_bytes <= 12 * NBYTES
    assert report.disk.bytes == 0


def test_it_is_refused_where_it_would_do_nothing(tmp_path):
    with pytest.raises(InvalidValueError, match=r"never spills anything.*offload\(host=8GiB, disk=/scratch\)"):
        TieredStore(HostStore(), DiskStore(tmp_path, tmpfs=True))
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64)) for _ in range(2)))
    with (
        lowtide.apply(layers, f"recompute+offload(host=1MiB, disk={tmp_path}, tmpfs)"),
        pytest.raises(OffloadError, match="in host memory already"),
    ):
        layers(torch.ones(64, 64))
