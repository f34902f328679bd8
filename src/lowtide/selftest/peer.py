"""Measures one peer in this process, which it may patch: `python -m lowtide.selftest.peer NAME DEVICE WORK`.

The work is that of the process that asks, as JSON: by the memory that is free here, it might be another one. What was
measured is printed as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from lowtide.selftest.bench import open_bench, read_work
from lowtide.selftest.peers import PEERS, measure


def main(name: str, device: str, work: str) -> None:
    with open_bench(device) as bench:
        memory, seconds = measure(dataclasses.replace(bench, work=read_work(work)), PEERS[name].enter)
    sys.stdout.write("\n" + json.dumps([dataclasses.asdict(memory), seconds]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
