"""Runs a part of the self-test in a separate process, and ends it with all that it started if this one stops."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from collections.abc import Sequence


def output_of(arguments: Sequence[str], *, timeout: float) -> str:
    """Return the last line that `python -m ...` prints; end its whole process group on a timeout or an interrupt."""
    with subprocess.Popen(  # noqa: S603  (our own modules)
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise LowtideError(f"no answer within {timeout:.0f} s") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in out.splitlines() if line.strip()]
    if process.returncode != 0 or not lines:
        reasons = [line for line in err.splitlines() if "Error" in line] or ["it said nothing"]
        raise LowtideError(f"ended with exit code {process.returncode}: {reasons[-1].strip()}")
    return lines[-1]
