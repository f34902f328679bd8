"""Measures one peer in this process, which it may patch: `python -m lowtide.selftest.peer NAME DEVICE`. Prints JSON."""

from __future__ import annotations

import dataclasses
import json
import sys

from lowtide.selftest.bench import open_bench
from lowtide.selftest.peers import PEERS, measure


def main(name: str, device: str) -> None:
    with open_bench(device) as bench:
        memory, seconds = measure(bench, PEERS[name].enter)
    sys.stdout.write("\n" + json.dumps([dataclasses.asdict(memory), seconds]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
