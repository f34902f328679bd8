"""Random put, start, settle, prefetch, get, drop and faults against a model: right bytes or an error, and no leaks."""

from __future__ import annotations

import errno
import shutil
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lowtide import simdevice
from lowtide.errors import StoreError
from lowtide.stores import DiskStore, HostStore, TieredStore
from support import eventually
from support.faulty_disk import FaultyDisk

BLOCK, LIMIT = 8192, 256 * 1024
places = st.integers(0, 20)

STEPS = ["start", "release", "prefetch", "get"]


class StoreMachine(RuleBasedStateMachine):
    """The model: what each stored tensor must hold. Whatever fails, it either comes back as it was or raises."""

    device = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.disk = FaultyDisk(self.patch)
        self.directory = tempfile.mkdtemp()
        self.store = self.make(self.directory)
        self.value = 0
        self.held = []
        simdevice.reset()

    def make(self, directory):
        return DiskStore(directory, limit=LIMIT, block=BLOCK, verify=True, tmpfs=True)

    @rule(pages=st.integers(1, 12), odd=st.integers(0, 3))
    def put(self, pages, odd):
        self.value += 1
        expected = torch.arange(pages * 1024 + odd, dtype=torch.float32) + self.value
        self.held.append((self.store.put(expected.to(self.device)), expected))

    @precondition(lambda self: self.held)
    @rule(which=places, steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=4))
    def use(self, which, steps):
        stored, expected = self.held[which % len(self.held)]
        for step in steps:
            result = self.attempt(getattr(stored, step))
            if step == "get" and result is not None:
                assert torch.equal(result.cpu(), expected), "never a wrong byte"

    @precondition(lambda self: self.held)
    @rule(which=places)
    def drop(self, which):
        self.held.pop(which % len(self.held))

    @rule(number=st.integers(0, 3), error=st.sampled_from([errno.ENOSPC, errno.EIO]))
    def writes_fail(self, number, error):
        self.disk.fail_writes(number, error)

    @rule(number=st.integers(0, 3))
    def reads_fail(self, number):
        self.disk.fail_reads(number, errno.EIO)

    @rule(at_most=st.sampled_from([0, 100, 4096, 5000]))
    def calls_are_short(self, at_most):
        self.disk.at_most = at_most

    @rule()
    def heal(self):
        self.disk.heal()

    def attempt(self, action):
        """An error is allowed only while the disk is, or was, faulty; it names the directory and a remedy."""
        try:
            return action()
        except StoreError as error:
            message = str(error)
        assert self.directory in message
        assert "Remedy" in message
        return None

    @invariant()
    def the_limit_holds(self):
        assert self.store.usage().disk.peak_bytes <= LIMIT

    def teardown(self):
        try:
            self.disk.heal()
            self.held.clear()
            assert eventually(lambda: self.store.bytes_used == 0), "what nobody holds takes no room"
            again, expected = self.store.put(torch.ones(5000).to(self.device)), torch.ones(5000)
            assert again.start()
            again.release()
            assert torch.equal(again.get().cpu(), expected), "and the store works"
            assert simdevice.violations() == []
            del again, self.store
            assert eventually(lambda: simdevice.stats().pinned_bytes == 0)
        finally:
            self.patch.undo()
            shutil.rmtree(self.directory)


class OnSim(StoreMachine):
    device = "sim"


class Tiered(StoreMachine):
    device = "sim"

    def make(self, directory):
        return TieredStore(HostStore("64KiB"), super().make(directory))


limits = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
for machine in (StoreMachine, OnSim, Tiered):
    machine.TestCase.settings = limits

TestOnTheCpu, TestOnSim, TestTiered = StoreMachine.TestCase, OnSim.TestCase, Tiered.TestCase
