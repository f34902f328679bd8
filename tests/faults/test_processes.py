"""Processes that fork, end or die while a store is in use."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback

import pytest
import torch

from lowtide.errors import StoreError
from models.trained import Scene, on_disk
from support import run_python


def in_fork(function) -> str:
    """What a forked child has to say; it must come in bounded time."""
    with pytest.warns(DeprecationWarning, match="fork") if sys.version_info >= (3, 12) else _nothing():
        receive, send = multiprocessing.Pipe(duplex=False)
        child = os.fork()
    if child == 0:
        try:
            send.send(function() or "fine")
        except BaseException:  # noqa: BLE001  (whatever it was, the parent shows it)
            send.send(traceback.format_exc())
        os._exit(0)
    answer = receive.recv() if receive.poll(60) else "no answer"
    if answer == "no answer":
        os.kill(child, 9)
    os.waitpid(child, 0)
    return answer


def _nothing():
    import contextlib

    return contextlib.nullcontext()


FORK = """
import os, torch
from torch import nn
import lowtide
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
def gradients(loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]
x = torch.randn(256, 64)
expected = gradients(model(x).sum())
applied = lowtide.apply(model, {policy!r})
loss = model(x).sum()  # on disk, and the last region's input still in memory
used = applied.store.bytes_used
child = os.fork()
if child == 0:
    assert applied.store.bytes_used == 0, "the child has a file of its own"
    assert all(map(torch.equal, gradients(model(x).sum()), expected))
    assert applied.report().disk.read_bytes > 0
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
assert applied.store.bytes_used == used
assert all(map(torch.equal, gradients(loss), expected)), "the child has not written to its parent's file"
print("fine")
"""


def test_a_forked_child_trains_with_a_file_of_its_own(tmp_path):
    """In a process without an accelerator: torch itself refuses a backward in a fork beside one."""
    done = run_python(FORK.format(policy=on_disk(tmp_path, verify=True)))
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


def test_a_forked_child_cannot_run_its_parents_backward(tmp_path):
    scene = Scene("cpu", on_disk(tmp_path))
    stored = scene.store.put(torch.ones(4096))
    stored.start()
    stored.release()

    def child():
        with pytest.raises(StoreError, match=r"saved by process .*forked.*forward and backward in the same process"):
            stored.get()

    assert in_fork(child) == "fine"
    assert stored.get().eq(1).all()


SHUTDOWN = """
import os, sys, time, torch
from torch import nn
import lowtide
{more}
write = os.pwritev
def slow(*args):
    time.sleep(0.05)
    return write(*args)
os.pwritev = slow
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))).to("{device}")
applied = lowtide.apply(model, {policy!r})
loss = model(torch.ones(256, 64, device="{device}")).sum()
stored = [applied.store.put(torch.ones(100_000)) for _ in range(8)]
for one in stored:
    one.start()
{end}
"""


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("end", ["", "sys.exit(0)", "applied.remove(); del applied, model, loss, stored"])
def test_the_interpreter_ends_with_copies_in_flight(tmp_path, device, end):
    more = "from lowtide import simdevice; simdevice.enable()" if device == "sim" else ""
    code = SHUTDOWN.format(more=more, device=device, policy=on_disk(tmp_path), end=end)
    start = time.monotonic()
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - start < 60
    assert list(tmp_path.iterdir()) == []


def test_an_error_at_the_end_is_still_the_users(tmp_path):
    code = SHUTDOWN.format(more="", device="cpu", policy=on_disk(tmp_path), end="raise ZeroDivisionError")
    done = run_python(code)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError"


def test_no_thread_is_started_before_there_is_something_to_move(tmp_path):
    before = threading.active_count()
    scene = Scene("cpu", on_disk(tmp_path))
    assert threading.active_count() == before
    scene.close()
