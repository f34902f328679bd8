"""Run under torchrun by `test_torchrun.py`: a script on this rank, and then an end without the interpreter's.

A gloo thread that still holds a finished collective's tensors while the interpreter ends aborts the process ("terminate
called without an active exception"), which a busy machine makes likely. `destroy_process_group` prevents it unless
somebody keeps the group, as DeepSpeed does. It says nothing about the script, which is over; its errors are raised.

Ranks with DeepSpeed meet through gloo: its exchange through shared memory compiles for minutes at first use.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    del sys.argv[0]  # the script's arguments are its own
    sys.path[0] = str(Path(sys.argv[0]).parent)
    if "deepspeed" in Path(sys.argv[0]).read_text():
        from deepspeed.ops import __compatible_ops__ as compatible

        compatible["deepspeed_shm_comm"] = False
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
