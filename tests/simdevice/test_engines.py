"""Whole offload engines on a small transformer: correct ones run clean, each injected bug is caught.

The engine is the usual one: saved tensors are copied to pinned memory on one side stream and back on another, while
the compute stream goes on. Every bug is one that some real engine has had.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from lowtide import simdevice
from models.attending import Block

BUGS = {
    "no wait before D2H": {"read-race"},
    "no wait after H2D": {"read-race"},
    "freed too early": {"use-after-free"},
    "prefetched tensor freed too early": {"use-after-free"},
    "host read too early": {"host-read"},
    "wrong stream": {"read-race"},
    "stale stream": {"read-race", "use-after-free", "write-race"},
}

MIN_BYTES = 4096


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Asynchronous offload of saved tensors, correct unless told otherwise.

    `keep` says how device memory outlives the copies: by `record_stream`, or by references and events.
    """

    def __init__(self, *, keep: str = "references", bug: str | None = None) -> None:
        self.bug = bug
        self.keep = keep
        self.to_host, self.to_device = torch.Stream(device="sim"), torch.Stream(device="sim")
        self.stale = torch.accelerator.current_stream()
        self.in_flight: list[tuple[torch.Event, torch.Tensor]] = []
        self.borrowed: list[tuple[torch.Event, torch.Tensor]] = []
        super().__init__(self.pack, self.unpack)

    def compute(self) -> torch.Stream:
        return self.stale if self.bug == "stale stream" else torch.accelerator.current_stream()

    def pack(self, tensor: torch.Tensor):
        if tensor.device.type != "sim" or isinstance(tensor, nn.Parameter) or tensor.nbytes < MIN_BYTES:
            return tensor
        tensor = tensor.detach().contiguous()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        if self.bug == "wrong stream":
            self.to_device.wait_stream(self.compute())
        elif self.bug != "no wait before D2H":
            self.to_host.wait_stream(self.compute())
        with self.to_host:
            host.copy_(tensor, non_blocking=True)
        copied = self.to_host.record_event()
        if self.bug == "host read too early":
            assert host.shape == tensor.shape
            host.sum()
        if self.keep == "record_stream":
            tensor.record_stream(self.to_host)
        elif self.bug != "freed too early":
            self.in_flight.append((copied, tensor))
            while len(self.in_flight) > 4:
                oldest, kept = self.in_flight.pop(0)
                self.compute().wait_event(oldest)
                del kept  # only now: the other way round was a real bug, which the device found
        return copied, host

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        copied, host = packed
        self.return_borrowed()
        self.to_device.wait_event(copied)
        with self.to_device:
            tensor = host.to("sim", non_blocking=True)
        if self.bug != "no wait after H2D":
            self.compute().wait_stream(self.to_device)
        if self.keep == "record_stream":
            tensor.record_stream(self.compute())
        elif self.bug != "prefetched tensor freed too early":
            self.borrowed.append((self.compute(), tensor))
        return tensor

    def return_borrowed(self) -> None:
        """Give tensors back to the pool of their stream once that stream waits for whoever used them."""
        while len(self.borrowed) > 4:
            user, tensor = self.borrowed.pop(0)
            self.to_device.wait_stream(user)
            del tensor

    def finish(self) -> None:
        torch.accelerator.synchronize()
        self.in_flight.clear()
        self.borrowed.clear()


def gradients(hooks: Offload | None, *, stream: torch.Stream | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(3))).to("sim")
    x = torch.randn(2, 64, 32).to("sim")
    torch.accelerator.synchronize()
    with stream or torch.accelerator.current_stream():
        if hooks is None:
            loss = model(x).square().mean()
        else:
            with hooks:
                loss = model(x).square().mean()
        loss.backward()
    if hooks is not None:
        hooks.finish()
    torch.accelerator.synchronize()
    return [p.grad.cpu() for p in model.parameters()]


@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("keep", ["references", "record_stream"])
def test_correct_engines_run_clean_and_exact(sim, keep, side_stream):
    stream = torch.Stream(device=sim) if side_stream else None
    expected = gradients(None, stream=stream)
    simdevice.reset()
    ours = gradients(Offload(keep=keep), stream=stream)
    assert simdevice.stats().d2h_bytes > 3 * 64 * 32 * 4, "something was offloaded"
    assert simdevice.violations() == []
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


def test_pinned_memory_returns_to_zero(sim):
    before = simdevice.stats().pinned_bytes
    gradients(Offload())
    assert simdevice.stats().pinned_bytes == before


@pytest.mark.parametrize("bug", BUGS)
def test_injected_bugs_are_reported(sim, bug):
    """A bug only shows where it can bite: a stale stream, when the model runs on another one than at construction."""
    stream = torch.Stream(device=sim) if bug == "stale stream" else None
    gradients(Offload(bug=bug), stream=stream)
    found = {v.kind for v in simdevice.violations()}
    simdevice.reset()
    assert found, "nothing was reported"
    assert found <= BUGS[bug]


def test_the_stale_stream_engine_is_right_on_its_own_stream(sim):
    """What makes the bug hard to find: without a switch of streams there is nothing to see."""
    gradients(Offload(bug="stale stream"))
    assert simdevice.violations() == []


@pytest.mark.parametrize("bug", ["no wait after H2D", "freed too early"])
def test_wrong_data_is_visible_as_nan(sim, bug):
    grads = gradients(Offload(bug=bug))
    assert any(g.isnan().any() for g in grads)
    simdevice.reset()


def test_two_runs_of_an_asynchronous_engine_take_the_same_virtual_time(sim):
    runs = []
    for _ in range(2):
        simdevice.reset()
        gradients(Offload())
        runs.append(simdevice.stats())
    assert runs[0] == runs[1]


def forward_time(hooks: contextlib.AbstractContextManager) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(3))).to("sim")
    x = torch.randn(2, 64, 32).to("sim")
    simdevice.reset()
    with hooks:
        model(x)
    torch.accelerator.synchronize()
    return simdevice.stats().time


def test_overlap_shows_in_the_clock(sim):
    """Asynchronous copies hide behind compute; synchronous ones add up. Launch costs would blur the comparison."""
    simdevice.enable(flops=1e9, bandwidth=1e15, h2d=2e8, d2h=2e8, launch=0)
    plain = forward_time(contextlib.nullcontext())
    asynchronous = forward_time(Offload())
    synchronous = forward_time(torch.autograd.graph.save_on_cpu(device_type=sim))
    assert plain < asynchronous < 1.1 * plain
    assert synchronous > 1.3 * plain
