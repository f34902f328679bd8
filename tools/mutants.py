"""Breaks the engine on purpose and counts how often a test notices: `make mutants SEED=1 COUNT=10`.

A seed puts all mutants of the engine (`tools/mutation.py`) in an order, and the first `COUNT` of it are judged: each is
applied to a temporary copy of the package, and the tests that belong to its module run against the copy until one
fails. Tests of the module come first, those of its room next, and wider ones last, so most mutants cost seconds. A
mutant that makes the tests hang counts as noticed.

The record (`docs/mutants.json`) holds every verdict. A mutant in it is not judged again, so a run can be interrupted
and continued; the order does not depend on the rest of the source, so it can be continued after a change, too. A
survivor needs a test that notices it (`--again` then judges it anew), or a reason why nothing can:
`"verdict": "equivalent"` and `"why"`, written into the record by hand. `--tidy` marks mutants of code that is gone.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import json
import os
import py_compile
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mutation import Mutant, find_mutants

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
RECORD = ROOT / "docs" / "mutants.json"
PAGE = ROOT / "CONTRIBUTING.md"
SCORE = re.compile(r"noticed \d+ of \d+")
FIRST = re.compile(r"\d+ of \d+ were noticed")
ENGINE = [
    "checkpointing/*.py",
    "stores/*.py",
    "tiling/*.py",
    "losses/*.py",
    "attributes.py",
    "buffers.py",
    "tensor_tree.py",
    "weights.py",
    "randomness.py",
    "applying/guard.py",
    "applying/*runtime.py",
    "auditing/comparison.py",
]
NEAR = {
    "checkpointing": ["tests/checkpointing"],
    "stores": ["tests/stores"],
    "tiling": ["tests/tiling"],
    "losses": ["tests/losses"],
    "attributes": ["tests/checkpointing"],
    "buffers": ["tests/test_buffers.py", "tests/checkpointing"],
    "tensor_tree": ["tests/test_tensor_tree.py", "tests/checkpointing"],
    "weights": ["tests/test_weights.py", "tests/checkpointing", "tests/tiling"],
    "randomness": ["tests/test_randomness.py", "tests/tiling"],
    "applying": ["tests/applying"],
    "auditing": ["tests/auditing/test_comparison.py", "tests/auditing"],
}
"""The tests of a room. The module's own file (`tests/stores/test_disk.py`) comes before them."""
WIDER = {
    "checkpointing": ["tests/test_torch_patch.py", "tests/applying"],
    "stores": ["tests/faults/test_disk_faults.py", "tests/checkpointing", "tests/applying"],
    "tiling": ["tests/distributed/test_tile_fsdp2.py", "tests/losses", "tests/applying"],
    "losses": ["tests/tiling", "tests/applying"],
    "attributes": ["tests/tiling", "tests/applying"],
    "buffers": ["tests/tiling", "tests/applying"],
    "tensor_tree": ["tests/tiling", "tests/applying"],
    "weights": ["tests/applying", "tests/distributed/test_tile_fsdp2.py"],
    "randomness": ["tests/checkpointing", "tests/auditing"],
    "applying": ["tests/checkpointing", "tests/integrations/test_transformers.py"],
    "auditing": ["tests/distributed/test_audit_ddp.py"],
}
"""Tests that use a room from outside, for what its own tests let through: two minutes at most."""
TEST_SECONDS = 60
"""A test that takes longer hangs. A module's tests are ended as a whole if not even that ends them:"""
SLOWEST = 900
MEMORY = 24 * 2**30
FILE_SIZE = 8 * 2**30
"""A mutant may compute a wrong size, and should not take the machine with it."""
NOTICED = ("killed", "timeout")


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # with the tests that are running, and their files
    mutants = {mutant.name: mutant for mutant in all_mutants()}
    record = read_record()
    record["verdicts"] = tidy(record["verdicts"], mutants)
    if options.again:
        names = [known["name"] for known in record["verdicts"] if known["verdict"] == "survived" and is_there(known)]
        judge_all([mutants[name] for name in names], record, near=options.near)
    elif not options.tidy:
        chosen = sample(list(mutants.values()), options.seed, options.count, options.room)
        note_sample(record, options.seed, options.count, options.room)
        judged = {known["name"] for known in record["verdicts"]}
        judge_all([mutant for mutant in chosen if mutant.name not in judged], record, near=options.near)
        names = [mutant.name for mutant in chosen]
        print_verdicts([known for known in record["verdicts"] if known["name"] in names])
    write_record(record)
    PAGE.write_text(with_score(PAGE.read_text(), record["summary"]))
    print(json.dumps(record["summary"]))
    return 0


def judge_all(mutants: list[Mutant], record: dict[str, Any], *, near: bool) -> None:
    """Judge mutants, and write each verdict down as soon as it is known."""
    with Judge(near=near) as judge:
        for mutant in mutants:
            verdict = judge.verdict(mutant)
            (before,) = [known for known in record["verdicts"] if known["name"] == mutant.name] or [verdict]
            verdict["at_first"] = before.get("at_first", verdict["verdict"])
            others = [known for known in record["verdicts"] if known["name"] != mutant.name]
            record["verdicts"] = [*others, verdict]
            write_record(record)
            print(
                f"{verdict['verdict']}: {mutant.file}:{mutant.line} {mutant.operator} ({verdict['seconds']} s)",
                flush=True,
            )


def note_sample(record: dict[str, Any], seed: int, count: int, room: str | None) -> None:
    """Write down which part of a seed's order is judged."""
    others = [known for known in record["samples"] if (known["seed"], known["room"]) != (seed, room)]
    larger = max([count, *(known["count"] for known in record["samples"] if known not in others)])
    record["samples"] = [*others, {"seed": seed, "room": room, "count": larger}]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Counts how many faults of the engine the tests notice.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--room", choices=sorted(NEAR), help="mutants of one room only")
    parser.add_argument("--near", action="store_true", help="run only the tests of a mutant's own room")
    parser.add_argument("--again", action="store_true", help="judge the survivors of the record again, instead")
    parser.add_argument(
        "--tidy", action="store_true", help="judge nothing; bring the record up to date with the source"
    )
    return parser.parse_args(arguments)


def print_verdicts(verdicts: list[dict[str, Any]]) -> None:
    """Show the survivors of a sample, and its figures."""
    for known in verdicts:
        if known["verdict"] == "survived":
            print(f"\nnobody noticed {known['name']}, {known['file']}:{known['line']} in {known['function']}")
            print(f"  - {known['before']}\n  + {known['after']}")
    print(f"\nthis sample: {json.dumps(summary(verdicts))}")


def all_mutants() -> list[Mutant]:
    """List the mutants of the engine."""
    paths = sorted({path for pattern in ENGINE for path in (SOURCE / "lowtide").glob(pattern)})
    return [mutant for path in paths for mutant in find_mutants(path.read_text(), str(path.relative_to(SOURCE)))]


def sample(mutants: list[Mutant], seed: int, count: int, room: str | None = None) -> list[Mutant]:
    """Return the first mutants in a seed's order. It holds for the others when one appears or goes."""
    among = [mutant for mutant in mutants if room in (None, room_of(mutant.file))]
    return sorted(among, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest())[:count]


def room_of(file: str) -> str:
    return Path(file).parts[1].removesuffix(".py")


def tests_of(file: str) -> list[list[str]]:
    """Return the tests for a module in two portions, each in its order: those of its room, and wider ones."""
    room = room_of(file)
    own = f"tests/{room}/test_{Path(file).stem}.py"
    near = [own, *NEAR[room]] if (ROOT / own).exists() else NEAR[room]
    return [list(dict.fromkeys(near)), WIDER[room]]


class Judge:
    """Runs tests against mutated copies of the package, one after the other, in a temporary folder."""

    def __init__(self, *, near: bool = False) -> None:
        self._portions = 1 if near else 2

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self._package = self._folder / "src"
        self._sound: set[str] = set()
        """Tests that pass without a mutant."""
        shutil.copytree(SOURCE, self._package, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        # By hash: a mutant may have the size and the second of the one before it.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self._package, quiet=1, invalidation_mode=mode)
        (self._folder / "tmp").mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)

    def verdict(self, mutant: Mutant) -> dict[str, Any]:
        """Run the tests of a mutant's module against it."""
        began = time.monotonic()
        verdict = {"verdict": "survived"}
        for tests in tests_of(mutant.file)[: self._portions]:
            with self._applied(mutant):
                code, output = self._run(tests)
            if code != 0:
                by = _first_failure(output) or tests[0]
                is_hanging = code is None or "Failed: Timeout" in output
                verdict = {"verdict": "timeout" if is_hanging else "killed", "by": by}
                self._require_sound(by)
                break
        return entry(mutant) | verdict | {"seconds": round(time.monotonic() - began)}

    def _require_sound(self, test: str) -> None:
        """Make sure that a test passes without a mutant: otherwise a verdict by it means nothing."""
        if test in self._sound:
            return
        code, output = self._run([test])
        if code != 0:
            raise SystemExit(f"{test} fails without a mutant\n{output[-3000:]}")
        self._sound.add(test)

    @contextlib.contextmanager
    def _applied(self, mutant: Mutant) -> Iterator[None]:
        path = self._package / mutant.file
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            yield
        finally:
            path.write_text(source)

    def _run(self, tests: list[str]) -> tuple[int | None, str]:
        """Run tests until one fails. Return the exit code, or None if they had to be ended."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += [f"--basetemp={self._folder / 'basetemp'}", "-o", f"timeout={TEST_SECONDS}", *tests]
        with (self._folder / "output").open("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
            try:
                code = process.wait(SLOWEST)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):  # it ended, and so did all that it started
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return code, output.read()

    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": str(self._package),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self._folder / "tmp"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._folder / "hypothesis"),
            "OMP_NUM_THREADS": "1",
        }


def _first_failure(output: str) -> str | None:
    """Return the test that failed, or the file that could not be collected."""
    found = re.search(r"^(?:FAILED|ERROR) (tests/[^\s\[]+(?:\[.*?\])?)(?= - |$)", output, re.MULTILINE)
    return found[1] if found else None


def entry(mutant: Mutant) -> dict[str, Any]:
    """Return what the record says of a mutant before it is judged."""
    fields = ("name", "file", "line", "function", "operator", "before", "after", "number")
    return {field: getattr(mutant, field) for field in fields}


def is_there(known: dict[str, Any]) -> bool:
    """Return whether the code that a record is about is still in the source."""
    return not known.get("obsolete", False)


def tidy(record: list[dict[str, Any]], mutants: dict[str, Mutant]) -> list[dict[str, Any]]:
    """Bring lines up to date, and mark mutants of code that is gone."""
    tidied = []
    for known in record:
        kept = {key: value for key, value in known.items() if key != "obsolete"}
        mutant = mutants.get(known["name"])
        tidied.append(kept | ({"obsolete": True} if mutant is None else {"line": mutant.line}))
    return tidied


def summary(record: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the verdicts of a record. The score leaves out what nothing can notice, and code that is gone.

    Tests are written for survivors, so the score of a record rises towards one. How many of all were noticed when they
    were judged first says more about faults that nobody has thought of.
    """
    counted = [known for known in record if is_there(known) or known["verdict"] in NOTICED]
    counts = {
        verdict: sum(known["verdict"] == verdict for known in counted)
        for verdict in (*NOTICED, "survived", "equivalent")
    }
    noticed = sum(counts[verdict] for verdict in NOTICED)
    judged = noticed + counts["survived"]
    at_first = {"judged": len(record), "noticed": sum(known["at_first"] in NOTICED for known in record)}
    return {
        "mutants": len(counted),
        **counts,
        "score": round(noticed / judged, 4) if judged else None,
        "at_first": at_first,
    }


def with_score(text: str, counts: dict[str, Any]) -> str:
    """Return the text of the page for contributors with the figures of a summary."""
    noticed = sum(counts[verdict] for verdict in NOTICED)
    first = counts["at_first"]
    text = SCORE.sub(f"noticed {noticed} of {noticed + counts['survived']}", text)
    return FIRST.sub(f"{first['noticed']} of {first['judged']} were noticed", text)


def read_record() -> dict[str, Any]:
    if not RECORD.exists():
        return {"samples": [], "summary": {}, "verdicts": []}
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def write_record(record: dict[str, Any]) -> None:
    record["summary"] = summary(record["verdicts"])
    record["verdicts"].sort(key=lambda known: (known["file"], known["function"], known["name"]))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
