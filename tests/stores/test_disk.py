"""The disk store: bytes come back bit by bit, on the CPU and through an accelerator, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide import simdevice
from lowtide.errors import InvalidValueError, StoreError
from lowtide.stores import DiskStore
from support import eventually
from support.devices import DEVICE

BLOCK = 16384


def store(directory, **settings) -> DiskStore:
    return DiskStore(directory, **{"tmpfs": True, "block": BLOCK, **settings})


def random(device, count=10_000, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(count).to(dtype).to(device)


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lowtide-disk")]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def away(stored):
    assert stored.start()
    stored.release()
    assert stored.is_away
    return stored


@pytest.mark.parametrize("device", ["cpu", DEVICE])
@pytest.mark.parametrize("count", [1024, BLOCK // 4, 10_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_what_was_put_comes_back(fresh_device, tmp_path, device, count, dtype):
    disk, raw = store(tmp_path, verify=True), random(device, count, dtype)
    expected = raw.cpu().clone()
    stored = away(disk.put(raw))
    del raw
    stored.prefetch()
    assert torch.equal(stored.get().cpu(), expected)
    again = stored.get()
    assert torch.equal(again.cpu(), expected), "as often as it is asked for"
    assert again.dtype == dtype


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_the_memory_is_given_back_when_it_is_written_and_no_sooner(fresh_device, tmp_path, device, faulty):
    disk, raw = store(tmp_path), random(device)
    gone = weakref.ref(raw.untyped_storage())
    stored = disk.put(raw)
    faulty.delay = 0.05
    faulty.calls.clear()  # the page that was tried when the file was opened
    began = time.perf_counter()
    stored.start()
    del raw
    assert not stored.is_away
    assert gone() is not None
    stored.release()
    assert gone() is None, "no task holds the tensor when settle returns"
    assert 0.04 < disk.seconds_waited <= time.perf_counter() - began
    assert sum(size for verb, size in faulty.calls if verb == "write") == disk.usage().disk.written_bytes == 40_960


def test_views_of_one_tensor_are_read_once(device, tmp_path):
    stored = away(store(tmp_path).put(random("cpu")))
    first, second = stored.get(), stored.get()
    assert first.data_ptr() == second.data_ptr()
    assert stored.take_fetched() == first.nbytes
    assert stored.take_fetched() == 0


@pytest.mark.parametrize("views", [1, 2])
def test_memory_that_another_stream_uses_is_not_handed_out_meanwhile(sim, tmp_path, views):
    """It was allocated on one stream and is read on another, by whoever asks first and by whoever asks next."""
    simdevice.enable(bandwidth=1e6, on_violation="raise")
    stored = away(store(tmp_path).put(random(sim)))
    if views > 1:
        held = stored.get()  # on this stream; the next one gets the same memory
    else:
        stored.prefetch()
    side = torch.Stream(device=sim)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = (raw := stored.get()).sum()
    if views > 1:
        del held
    del raw
    torch.zeros(10_000, device=sim)  # must not lie where the other stream still reads
    torch.accelerator.synchronize()
    assert torch.equal(total.cpu(), random("cpu").sum())


def test_the_file_is_used_again_and_empty_when_all_is_dropped(tmp_path):
    disk = store(tmp_path)
    for _ in range(5):
        held = [away(disk.put(random("cpu"))) for _ in range(3)]
        assert disk.bytes_used == 3 * 40_960
        del held
        assert disk.bytes_used == 0
    assert disk.peak_bytes == 3 * 40_960
    assert os.fstat(disk.resources.file._handle).st_size == 3 * 40_960


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_host_memory_is_bounded_however_much_is_queued(sim, tmp_path, device, faulty):
    disk = store(tmp_path, threads=2)
    faulty.delay = 0.002
    stored = [disk.put(random(device)) for _ in range(20)]
    for one in stored:
        one.start()
    for one in stored:
        one.release()
    assert disk.usage().peak_host_bytes <= 2 * BLOCK
    assert simdevice.stats().peak_pinned_bytes == (disk.usage().peak_host_bytes if device == DEVICE else 0)


def test_its_buffers_are_small_beside_what_passes_through_them(tmp_path):
    disk = DiskStore(tmp_path, tmpfs=True)
    stored = disk.put(torch.ones(16 * 2**20))
    stored.start()
    stored.release()
    assert disk.usage().peak_host_bytes <= stored.nbytes // 8


def test_files_threads_and_pinned_memory_go_with_the_store(sim, tmp_path):
    files = open_files()
    disk = store(tmp_path)
    stored = away(disk.put(random(DEVICE)))
    assert open_files() == files + 1
    assert our_threads()
    assert simdevice.stats().pinned_bytes > 0
    del stored, disk
    assert eventually(lambda: not our_threads())
    assert open_files() == files
    assert simdevice.stats().pinned_bytes == 0


def test_a_limit_is_kept_and_said(tmp_path):
    disk = store(tmp_path, limit=2 * 40_960)
    held = [disk.put(random("cpu")) for _ in range(3)]
    assert [one.start() for one in held] == [True, True, False]
    for one in held:
        one.release()
    assert [one.is_away for one in held] == [True, True, False]
    assert torch.equal(held[2].get(), random("cpu")), "what stays is still there"
    del held[0]
    assert held[1].start()
    assert disk.peak_bytes == 2 * 40_960


def test_ranks_share_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr("lowtide.stores.disk.free_bytes", lambda _: 8 * 1024**3)
    assert store(tmp_path).usage().disk.limit == 8 * 1024**3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert store(tmp_path).usage().disk.limit == 2 * 1024**3
    assert store(tmp_path, limit="1GiB").usage().disk.limit == 1024**3
    with pytest.raises(StoreError, match=r"3 GiB for each of 4 processes on this node .* 8 GiB that are free in"):
        store(tmp_path, limit="3GiB")


@pytest.mark.parametrize("device", ["cpu", DEVICE])
@pytest.mark.parametrize("place", [0, 20_000, 39_999])
def test_a_flipped_byte_is_an_error_and_no_gradient(fresh_device, tmp_path, device, place):
    disk = store(tmp_path, verify=True)
    stored = away(disk.put(random(device)))
    handle = os.dup(disk.resources.file._handle)
    path = f"/proc/self/fd/{handle}"
    with Path(path).open("r+b") as file:  # buffered: the page cache keeps both views of it the same
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 4]))
    os.close(handle)
    with pytest.raises(StoreError, match=f"{tmp_path}.*checksum differs.*Remedy"):
        stored.get()


def test_without_verify_nothing_is_compared(tmp_path):
    disk = store(tmp_path)
    stored = away(disk.put(random("cpu")))
    assert [block.checksum for block in stored._blocks] == [None] * 3


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_a_dropped_tensor_frees_its_bytes_though_a_task_is_under_way(sim, tmp_path, device, faulty):
    disk = store(tmp_path)
    faulty.delay = 0.05
    faulty.calls.clear()
    stored = [disk.put(random(device)) for _ in range(4)]
    for one in stored:
        one.start()
    del stored, one
    assert eventually(lambda: disk.bytes_used == 0)
    assert len(faulty.calls) < 12, "what had not begun was not written"
    torch.accelerator.synchronize()
    if device == DEVICE:
        gc.collect()
        assert eventually(lambda: simdevice.stats().live_bytes == 0)


def test_a_file_system_without_direct_io_is_said(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    disk = store(tmp_path)
    stored = away(disk.put(random("cpu")))
    assert torch.equal(stored.get(), random("cpu"))
    assert disk.usage().disk.direct is False


def test_settings_are_checked(tmp_path):
    for bad in ({"threads": 0}, {"block": 100}, {"block": "5KiB"}):
        with pytest.raises(InvalidValueError, match="at least 1 thread, and a block size that is a multiple of 4096"):
            store(tmp_path, **bad)
    with pytest.raises(InvalidValueError, match="not be negative"):
        store(tmp_path, limit=-1)
    with pytest.raises(TypeError, match="pickle the policy"):
        pickle.dumps(store(tmp_path))


class TestUnderAPolicy:
    def model(self, device):
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))] * 1
        layers += [
            torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)) for _ in "123"
        ]
        return torch.nn.Sequential(*layers).to(device)

    def step(self, model):
        model.zero_grad()
        device = next(model.parameters()).device
        torch.manual_seed(1)
        model(torch.randn(128, 32).to(device)).square().mean().backward()
        return [p.grad.cpu() for p in model.parameters()]

    @pytest.mark.parametrize("device", ["cpu", DEVICE])
    @pytest.mark.parametrize("policy", ["recompute+offload", "offload"])
    def test_gradients_are_bit_identical_and_bytes_are_counted(self, fresh_device, tmp_path, device, policy):
        model = self.model(device)
        expected = self.step(model)
        with lowtide.apply(model, f"{policy}(disk={tmp_path}, tmpfs, verify)") as applied:
            for _ in range(2):
                assert all(torch.equal(a, b) for a, b in zip(self.step(model), expected, strict=True))
            report = applied.report()
        moved = sum(region.packed_bytes for region in report.regions)
        assert moved == sum(region.restored_bytes for region in report.regions) > 0
        assert report.disk.written_bytes >= moved
        assert (report.disk.bytes, report.disk.verify) == (0, True)
        assert f"disk {tmp_path}: 0 B now, " in str(report)
        assert report.figures()["peak_disk_bytes"] == report.disk.peak_bytes > 0
        if policy == "recompute+offload":
            assert [region.packed_bytes for region in report.regions] == [2 * 128 * 32 * 4] * 3 + [0]

    def test_a_directory_is_asked_for(self):
        with pytest.raises(InvalidValueError, match=r"does not say where.*offload\(disk=/scratch\)"):
            lowtide.apply(self.model("cpu"), "recompute+offload(disk)")
        with pytest.raises(InvalidValueError, match="DiskStore"):
            lowtide.checkpoint(torch.tanh, torch.ones(4, requires_grad=True), offload="disk")

    def test_a_full_disk_tier_is_said(self, tmp_path):
        model = self.model("cpu")
        expected = self.step(model)
        with lowtide.apply(model, f"recompute+offload(disk={tmp_path}, tmpfs, limit=20KiB)") as applied:
            assert all(torch.equal(a, b) for a, b in zip(self.step(model), expected, strict=True))
        assert applied.report().disk.peak_bytes == 16384
        assert "32 KiB found no room in the disk (limit 20 KiB)" in str(applied.report())

    def test_the_parts_take_a_store(self, tmp_path):
        disk = store(tmp_path)
        x = torch.randn(64, 64, requires_grad=True)
        y = x
        for _ in range(3):
            y = lowtide.checkpoint(torch.tanh, y, offload=disk)
        y.sum().backward()
        assert disk.peak_bytes == 2 * x.nbytes, "a leaf is data that somebody else holds, and is moved all the same"
        with lowtide.offload(disk) as context:
            z = x
            for _ in range(8):
                z = z.sin()
        z.sum().backward()
        assert context.ledger.restored_bytes == context.ledger.packed_bytes > 0
