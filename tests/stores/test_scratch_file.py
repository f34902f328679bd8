"""Extents of a file: they never overlap, the limit holds, an interrupted cut loses nothing, and all bytes move."""

from __future__ import annotations

import errno
import itertools
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.errors import StoreError
from lowtide.stores import host_memory as ranges
from lowtide.stores.files import ScratchFile
from lowtide.stores.host_memory import PAGE, FreeRanges, buffer_of, page_aligned

LIMIT = 64 * PAGE


def file(directory, limit=LIMIT) -> ScratchFile:
    return ScratchFile(directory, limit, tmpfs=True)


@pytest.fixture(scope="module")
def one_directory(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


requests = st.lists(st.one_of(st.integers(1, 9 * PAGE), st.integers(-5, -1)), max_size=40)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=requests, interrupts=st.sets(st.integers(0, 39), max_size=3))
def test_extents_never_overlap_and_interrupted_cuts_lose_nothing(one_directory, requests, interrupts):
    """A positive number takes as many bytes, a negative one drops an older request; some takes are interrupted."""
    taken, held = file(one_directory), []
    for number, request in enumerate(requests):
        if request < 0:
            if len(held) >= -request:
                held.pop(request)
        elif number in interrupts:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ranges, "Extent", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    taken.allocate([request, request])
        elif (extents := taken.allocate([request])) is not None:
            held.append(extents)
            del extents
        spans = sorted((extent.start, extent.end) for extents in held for extent in extents)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert taken.used == sum(end - start for start, end in spans) <= LIMIT
    held.clear()
    assert taken.used == 0
    everything = taken.allocate([LIMIT])
    assert everything is not None, "no byte was lost"


def interrupted(*_):
    raise KeyboardInterrupt


def test_ranges_merge_with_both_neighbours():
    free = FreeRanges((0, 10))
    assert [free.allocate(2) for _ in range(6)] == [0, 2, 4, 6, 8, None]
    for start in (4, 0, 8, 2):
        free.free(start, start + 2)
    assert free.ranges == [(0, 6), (8, 10)]
    free.free(6, 8)
    assert free.ranges == [(0, 10)]


def pages(count, fill=None):
    memory = page_aligned(count * PAGE)
    memory.copy_(torch.randint(0, 255, (count * PAGE,), dtype=torch.uint8) if fill is None else torch.tensor(fill))
    return memory


@pytest.mark.parametrize("at_most", [PAGE, PAGE + 100, 3 * PAGE - 1])
def test_short_writes_and_reads_go_on_where_they_stopped(tmp_path, faulty, at_most):
    taken = file(tmp_path)
    (extent,) = taken.allocate([8 * PAGE])
    source, target = pages(8), pages(8, fill=0)
    faulty.at_most = at_most
    faulty.calls.clear()
    taken.write(extent, buffer_of(source))
    taken.read(extent, buffer_of(target))
    assert torch.equal(source, target)
    assert len(faulty.calls) >= 6
    assert (taken.written, taken.read_back) == (8 * PAGE, 8 * PAGE)


@pytest.mark.parametrize("at_most", [0, 100])
def test_a_disk_that_moves_nothing_is_an_error_and_no_endless_loop(tmp_path, faulty, at_most):
    taken = file(tmp_path)
    taken.direct = True
    (extent,) = taken.allocate([2 * PAGE])
    faulty.at_most = at_most
    with pytest.raises(StoreError, match="could not write 8 KiB at 0: only 0 B could be moved"):
        taken.write(extent, buffer_of(pages(2)))


def test_a_file_cut_short_is_an_error(tmp_path):
    taken = file(tmp_path)
    (extent,) = taken.allocate([4 * PAGE])
    taken.write(extent, buffer_of(pages(4)))
    os.ftruncate(taken._handle, 2 * PAGE)
    with pytest.raises(StoreError, match=r"could not read 16 KiB at 0: only 8 KiB could be moved.*cut short"):
        taken.read(extent, buffer_of(pages(4)))


def test_an_error_names_place_bytes_and_remedy_though_the_directory_is_gone(tmp_path, faulty):
    place = tmp_path / "gone"
    place.mkdir()
    taken = file(place)
    (extent,) = taken.allocate([4 * PAGE])
    place.rmdir()
    faulty.fail_writes(0, errno.ENOSPC)
    with pytest.raises(
        StoreError,
        match=f"disk store in {place}: could not write 16 KiB at 0: No space left on device .16 KiB in use of at most "
        "256 KiB, an unknown amount free on the disk.*Remedy: free some space there",
    ):
        taken.write(extent, buffer_of(pages(4)))
    faulty.heal()
    taken.write(extent, buffer_of(pages(4)))
