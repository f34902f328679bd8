"""Runs a script as `python script.py` would, without the seconds that importing torch and transformers takes.

The process is forked from the server that ranks are forked from, too, which has imported them and done nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from typing import TYPE_CHECKING

from support.launcher import PRELOAD

if TYPE_CHECKING:
    from pathlib import Path


def run_script(script: Path, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Run a script in its own directory, and return its exit code and what it printed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    out, err = script.with_suffix(".out"), script.with_suffix(".err")
    process = context.Process(target=_run, args=(script, out, err))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    code = process.exitcode
    process.close()
    return subprocess.CompletedProcess([str(script)], 1 if code is None else code, out.read_text(), err.read_text())


def _run(script: Path, out: Path, err: Path) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
    os.chdir(script.parent)
    sys.argv, sys.path[0] = [str(script)], str(script.parent)
    runpy.run_path(str(script), run_name="__main__")
