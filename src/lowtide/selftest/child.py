"""Runs a part of the self-test in a separate process, and ends it with all that it started if this one stops.

A child may start processes in sessions of their own, as torchrun does with its workers, which no signal to the child's
group reaches. So its descendants are looked up while it runs. They are asked to end first, and then made to. Whatever
they write to the temporary directory goes to a folder that the caller removes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil

from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_GRACE = 5.0
"""Seconds in which a child can end by itself once it was asked to."""
_LOOK = 1.0
"""Seconds between two looks at what a child has started."""


def output_of(arguments: Sequence[str], *, timeout: float, folder: Path) -> str:
    """Return the last line that `python -m ...` prints. Whatever happens, the process and all that it started end."""
    with subprocess.Popen(  # noqa: S603  (our own modules)
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends the child in order
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TMPDIR": str(folder),
        },
    ) as process:
        family = _Family(process)
        try:
            out, err = _communicate(process, family, timeout)
        finally:
            family.end()
    lines = [line for line in out.splitlines() if line.strip()]
    if process.returncode != 0 or not lines:
        reasons = [line for line in err.splitlines() if "Error" in line] or ["it said nothing"]
        raise LowtideError(f"ended with exit code {process.returncode}: {reasons[-1].strip()}")
    return lines[-1]


def _communicate(process: subprocess.Popen[str], family: _Family, timeout: float) -> tuple[str, str]:
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            return process.communicate(timeout=max(0.0, min(_LOOK, left)))
        except subprocess.TimeoutExpired as error:
            if left <= 0:
                raise LowtideError(f"no answer within {timeout:.0f} s") from error
            family.look()
            if process.poll() is not None:  # what it left running keeps its output open
                family.end()


class _Family:
    """A child and its descendants, those included that its end made orphans."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._members: set[psutil.Process] = set()

    def look(self) -> None:
        """Note what the child has started by now; if it has ended, what its orphans have started."""
        roots = list(self._members)
        with contextlib.suppress(psutil.Error):
            roots = [psutil.Process(self._process.pid)] if self._process.poll() is None else roots
        for root in roots:
            with contextlib.suppress(psutil.Error):
                self._members.update([root, *root.children(recursive=True)])

    def end(self) -> None:
        """Ask the child to end, which may end its own children in order; then kill whoever is left."""
        self.look()
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE)
            self.look()
        finally:
            for member in self._members:
                with contextlib.suppress(psutil.Error):
                    member.kill()
            psutil.wait_procs(self._members, timeout=_GRACE)
