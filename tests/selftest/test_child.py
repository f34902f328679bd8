"""Processes that the self-test starts: whatever happens, they and all that they started are gone, with their files."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lowtide.errors import LowtideError
from lowtide.selftest import child
from lowtide.selftest.child import output_of

WITH_A_GRANDCHILD = """
import pathlib, signal, subprocess, sys, tempfile, time
{first}
made = tempfile.mkdtemp(prefix="torchelastic_")
worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
grandchild = subprocess.Popen([sys.executable, "-c", worker], start_new_session=True)
pathlib.Path(made, "pid").write_text(str(grandchild.pid))
{then}
"""


def is_running(folder: Path) -> bool:
    """Whether the grandchild runs that noted its number there. A dead one whose number nobody asked for does not."""
    (path,) = folder.glob("torchelastic_*/pid")
    try:
        return psutil.Process(int(path.read_text())).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_child_that_fails_says_why(tmp_path):
    with pytest.raises(LowtideError, match="exit code 1: ValueError: because"):
        output_of(["-c", "raise ValueError('because')"], timeout=60, folder=tmp_path)
    with pytest.raises(LowtideError, match="no answer within 0 s"):
        output_of(["-c", "import time; time.sleep(60)"], timeout=0.2, folder=tmp_path)
    assert output_of(["-c", "print(1); print(2)"], timeout=60, folder=tmp_path) == "2"


class Clock:
    """A clock that stands still until the grandchild runs. Then all time is up."""

    def __init__(self, folder: Path):
        self.folder = folder

    def monotonic(self) -> float:
        return 1e9 if any(path.read_text() for path in self.folder.glob("torchelastic_*/pid")) else 0.0


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ("", "time.sleep(60)", "no answer within"),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "time.sleep(60)", "no answer within"),
        ("", "time.sleep(1); raise ValueError('because')", "ValueError: because"),
    ],
    ids=["a timeout", "a child that does not listen", "a child that fails"],
)
def test_a_grandchild_in_a_session_of_its_own_ends_too(tmp_path, monkeypatch, first, then, said):
    """As a worker of torchrun, which no signal to torchrun's group reaches."""
    monkeypatch.setattr(child, "_GRACE", 0.5)
    monkeypatch.setattr(child, "_LOOK", 0.2)
    monkeypatch.setattr(child, "time", Clock(tmp_path) if "sleep(60)" in then else time)
    with pytest.raises(LowtideError, match=said):
        output_of(["-c", WITH_A_GRANDCHILD.format(first=first, then=then)], timeout=100, folder=tmp_path)
    assert not is_running(tmp_path)


def test_an_interrupt_ends_the_grandchild(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "_LOOK", 0.2)
    looks: list[str] = []

    def look(self):
        real(self)
        if not looks and list(tmp_path.glob("torchelastic_*/pid")):
            looks.append("the first since the grandchild runs")
            raise KeyboardInterrupt

    real = child._Family.look
    monkeypatch.setattr(child._Family, "look", look)
    with pytest.raises(KeyboardInterrupt):
        output_of(["-c", WITH_A_GRANDCHILD.format(first="", then="time.sleep(60)")], timeout=60, folder=tmp_path)
    assert not is_running(tmp_path)


CLI = """
import os, subprocess, sys, tempfile, time, pathlib
from lowtide.cli import app
from lowtide.selftest import runner
from lowtide.selftest.child import output_of

def stage(bench):
    pathlib.Path(sys.argv[1]).write_text(str(bench.folder))
    output_of(["-c", "import time; time.sleep(60)"], timeout=60, folder=bench.folder)

runner.STAGES["right"] = stage
app(["selftest", "--device", "cpu", "-o", sys.argv[2]])
"""


def test_a_request_to_end_leaves_nothing_behind(tmp_path):
    note = tmp_path / "folder"
    with subprocess.Popen([sys.executable, "-c", CLI, str(note), str(tmp_path / "r.json")]) as process:
        try:
            until = time.monotonic() + 120
            while not (note.exists() and note.read_text() and psutil.Process(process.pid).children()):
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.1)
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 130
        finally:
            process.kill()
    assert not Path(note.read_text()).exists()
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children)
