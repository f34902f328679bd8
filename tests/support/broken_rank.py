"""Runs a rank of the self-test with an engine that is wrong on all ranks but the first: `-m support.broken_rank sim`.

A process by itself is rank 0, so no stage of one process can see it.
"""

from __future__ import annotations

import os
import sys

import torch

from lowtide.selftest import rank
from lowtide.tiling import assembly

real = assembly._Output.split_gradient


def split(output, gradient):
    *parts, last = real(output, gradient)
    return [*parts, last if os.environ.get("RANK", "0") == "0" else torch.zeros_like(last)]


if __name__ == "__main__":
    assembly._Output.split_gradient = split
    rank.main(*sys.argv[1:])
