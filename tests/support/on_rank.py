"""Run under torchrun by `test_torchrun.py`: a script on this rank, and then an end without the interpreter's.

A gloo thread that still holds a finished collective's tensors while the interpreter ends aborts the process ("terminate
called without an active exception"), which a busy machine makes likely. `destroy_process_group` prevents it unless
somebody keeps the group, as DeepSpeed does. It says nothing about the script, which is over; its errors are raised.

Torch's context parallelism gets the CPU's attention kernel.

Ranks with DeepSpeed meet through gloo: its exchange through shared memory compiles for minutes at first use.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    del sys.argv[0]  # the script's arguments are its own
    text = Path(sys.argv[0]).read_text()
    if "deepspeed" in text:
        from deepspeed.ops import __compatible_ops__ as compatible

        compatible["deepspeed_shm_comm"] = False
    surroundings: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if "import context_parallel" in text:
        from ring_attention import ring_attention

        surroundings = ring_attention(sums_in_float32=True)
    sys.path[0] = str(Path(sys.argv[0]).parent)
    with surroundings:
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
