"""Random training programs under every policy: the plain program's results or an error, never anything else.

`make fuzz MINUTES=10` runs new programs for that long. What is found is made as small as it can be and printed as a
`Program`, which can be put into `CORPUS` as it is.
"""

from __future__ import annotations

import collections
import gc
import os
import random
import time

import pytest
import torch

from lowtide import simdevice
from support.programs import (
    ATTENDING,
    ENGINES,
    PLAIN,
    Engine,
    Outcome,
    Program,
    minimised,
    outcome_of,
    random_program,
    verdict,
)

MINUTES = float(os.environ.get("LOWTIDE_FUZZ_MINUTES", "0"))

TRAINING = ("forward", "backward", "step", "forward", "backward", "step")
DROPOUT = (("dropout",), ("dropout",))
BARE = ((), ())


def in_between(*steps: str) -> tuple[str, ...]:
    """Steps between a forward and its backward, and a whole one afterwards."""
    return ("forward", *steps, "backward", "step", "forward", "backward")


CORPUS = {
    "other weights for one call": Program(BARE, ("functional", *TRAINING)),
    "meta-learning": Program(BARE, ("functional step", "step", *TRAINING)),
    "a step between two backwards": Program(BARE, ("forward", "backward of one loss", "step", "backward")),
    "a weight changed in place": Program(BARE, in_between("weight in place")),
    "a weight's data replaced": Program(BARE, in_between("weight .data replaced")),
    "a weight replaced": Program(BARE, in_between("weight replaced")),
    "a state loaded": Program(BARE, in_between("state loaded")),
    "a state assigned": Program(BARE, in_between("state assigned")),
    "a hook that looks around": Program((("hook looks around activation",),) * 2, TRAINING),
    "a gradient inside": Program((("mlp: gradient inside",),) * 2, TRAINING),
    "a gradient inside, and a hook": Program((("hook counts activation", "mlp: gradient inside"),) * 2, TRAINING),
    "a gradient inside, and a hook that looks around": Program(
        (("hook looks around activation", "mlp: gradient inside"),) * 2, TRAINING
    ),
    "old spectral norm": Program((("spectral norm, old",),) * 2, TRAINING),
    "cached parametrizations": Program((("weight norm",),) * 4, ("cached", "step", "cached")),
    "state through .data": Program((("buffer .data",),) * 3, TRAINING),
    "routing bias": Program((("mixture with bias",),) * 2, TRAINING),
    "a keyword changed": Program(BARE, in_between("keywords in place"), ("keyword",)),
    "a keyword changed that nobody reads": Program(
        BARE, in_between("keywords in place"), ("keyword that is not used",)
    ),
    "state in an argument": Program(BARE, TRAINING, ("state by keyword",)),
    "per-sample gradients": Program(BARE, ("per-sample gradients",)),
    "a forward-mode gradient": Program(BARE, ("forward-mode gradient",)),
    "a mask replaced": Program((("large mask",),) * 2, in_between("masks replaced")),
    "a mask changed": Program((("large mask",),) * 2, in_between("masks in place")),
    "a large tensor replaced": Program((("large tensor attribute",),) * 2, in_between("attribute tensors replaced")),
    "a large tensor changed": Program((("large tensor attribute",),) * 2, in_between("attribute tensors in place")),
    "other settings": Program((("settings",),) * 2, in_between("containers changed", "containers replaced")),
    "a hidden weight changed": Program((("hidden part",),) * 2, in_between("hidden weight in place")),
    "a part replaced": Program(BARE, in_between("part replaced", "part's forward replaced")),
    "hooks that are gone": Program(
        BARE, ("forward with a closure as a hook", "backward", "forward with a hook of all modules", "backward")
    ),
    "generators in attributes": Program((("generators of the host", "own generator"),) * 2, TRAINING),
    "Llama, other parts": Program((), in_between("part replaced", "attribute changed", "evaluation mode")),
    "flags": Program((("flags",),) * 2, TRAINING),
    "evaluation before backward": Program((("buffer", "dropout"), ()), in_between("evaluation mode")),
    "a copy with a policy of its own": Program(BARE, ("forward", "backward", "copy", "policy applied", *TRAINING)),
    "Llama": Program((), ("forward", "evaluation", "backward", "step", "forward", "forward", "backward of the oldest")),
}


@pytest.fixture(autouse=True)
def _nothing_stays():
    """Programs that fail in the middle of a step leave nothing on the device or in pinned memory once they are gone."""
    before = memory_in_use()
    yield
    assert memory_in_use() == before


def memory_in_use() -> tuple[int, int]:
    """Return bytes on the emulated device and in pinned memory.

    Errors are in cycles with the frames that they went through, copies may be under way, and the device's thread for
    backward lets go of one that failed a moment later than the program.
    """
    gc.collect()
    torch.ones(1, device="sim", requires_grad=True).sum().backward()
    torch.sim.synchronize()
    stats = simdevice.stats()
    return stats.live_bytes, stats.pinned_bytes


def check(program: Program, chosen: list[Engine], directory: str) -> dict[str, str]:
    """Run a program plain and with some engines, and return the verdicts; if one is wrong, a smallest program is."""
    suitable = [engine for engine in chosen if engine.suits(program)]
    plain = {name: outcome_of(program, PLAIN[name], directory) for name in {engine.device for engine in suitable}}
    found = {engine.name: judge(program, engine, directory, plain[engine.device]) for engine in suitable}
    for engine in suitable:
        if found[engine.name].startswith("WRONG"):
            smallest = minimised(program, lambda less: judge(less, engine, directory).startswith("WRONG"))  # noqa: B023
            pytest.fail(f"{engine.name}: {smallest}\n{judge(smallest, engine, directory)}\nfound as {program}")
    assert simdevice.violations() == [], program
    return found


def judge(program: Program, engine: Engine, directory: str, plain: Outcome | None = None) -> str:
    expected = plain or outcome_of(program, PLAIN[engine.device], directory)
    return verdict(expected, outcome_of(program, engine, directory), engine.tolerance(program))


@pytest.mark.parametrize("name", CORPUS)
def test_a_known_program(name, tmp_path):
    check(CORPUS[name], ENGINES, str(tmp_path))


def search(seed: int, count: int, directory: str) -> collections.Counter:
    """Run random programs, each with a third of the engines, and count the verdicts of every engine."""
    source, tally = random.Random(seed), collections.Counter()  # noqa: S311
    for number in range(count):
        tally.update(check(random_program(source), ENGINES[number % 3 :: 3], directory).items())
    return tally


@pytest.mark.parametrize("seed", range(4))
def test_random_programs(seed, tmp_path):
    tally = search(seed, 20, str(tmp_path))
    equal = {engine.name for engine in ENGINES if tally[engine.name, "equal"]}
    assert {engine.name for engine in ENGINES} - equal <= {*ATTENDING}, tally  # which a Llama needs, and they are few


if MINUTES:

    def test_new_programs(tmp_path):
        end = time.monotonic() + 60 * MINUTES
        while time.monotonic() < end:
            search(random.SystemRandom().getrandbits(32), 30, str(tmp_path))
