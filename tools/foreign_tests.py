"""Runs other packages' tests with Lowtide's functions in the place of theirs: `make test-foreign`.

Nothing of them is kept here: the source distribution of each package, in the version that is installed, is fetched from
the package index into `.foreign/`, and its tests run from there. A pytest plugin (`tools/foreign/lowtide_in_place.py`)
replaces torch's checkpoint, or Liger's tiled MLP and fused loss, and counts the calls that it answered.

The record (`docs/foreign.json`) says what ran, and what could not and why. A failure that is not among the known
differences of a suite fails the run, and so does a known difference that has gone, or a suite that called nothing of
ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "foreign.json"
CACHE = ROOT / ".foreign"
PLUGINS = ROOT / "tools" / "foreign"


@dataclass(frozen=True)
class Suite:
    """A selection of a package's tests. Paths are inside its source distribution, unless `driver` runs its checks."""

    package: str
    replaces: Literal["checkpoint", "liger"] = "checkpoint"
    tests: tuple[str, ...] = ("tests",)
    keywords: str = "checkpointing"
    driver: str | None = None
    differences: dict[str, str] = field(default_factory=dict)
    """Tests that fail on purpose, by the end of their names, and why."""
    left_out: str | None = None
    """Why its tests cannot run here, if they cannot."""


SUITES = (
    Suite("transformers", tests=("tests/test_modeling_common.py",), driver="test_transformers.py"),
    Suite("timm", tests=("tests/test_models.py",), keywords="grad_checkpointing"),
    Suite("peft", tests=("tests/test_shadow.py",), keywords="gradient_checkpointing"),
    Suite(
        "liger-kernel",
        replaces="liger",
        tests=("test/transformers/test_tiled_mlp.py", "test/transformers/test_fused_linear_cross_entropy.py"),
        keywords="127-128-256 or 47-31-123",
    ),
    Suite("accelerate", left_out="its tests of activation checkpointing need CUDA"),
    Suite("trl"),
    Suite("deepspeed"),
    Suite("diffusers"),
    Suite("fairscale"),
    Suite("torch"),
)


def main() -> int:
    records = []
    for suite in SUITES:
        record = run(suite)
        records.append(record)
        print(f"{suite.package}: {record.get('left_out') or _figures(record)}", flush=True)
    RECORD.write_text(json.dumps(records, indent=2) + "\n")
    wrong = [line for record in records for line in complaints(record)]
    print("\n".join(wrong))
    return 1 if wrong else 0


def _figures(record: dict[str, Any]) -> str:
    counts = ", ".join(f"{record[key]} {key}" for key in ("passed", "failed", "skipped"))
    return f"{record['version']}, {counts}; {record['calls']} calls answered"


def complaints(record: dict[str, Any]) -> list[str]:
    """List what is wrong with a record."""
    if "left_out" in record:
        return []
    package, known = record["package"], record["differences"]
    new = [name for name in record["failures"] if not any(name.endswith(end) for end in known)]
    gone = [end for end in known if not any(name.endswith(end) for name in record["failures"])]
    wrong = [f"{package}: {name} fails" for name in new]
    wrong += [f"{package}: {end} does not fail any more: it is no known difference" for end in gone]
    if not record["calls"]:
        wrong.append(f"{package}: nothing of Lowtide was called, so nothing was tested")
    return wrong


def run(suite: Suite) -> dict[str, Any]:
    """Fetch a suite and run it. Return its record, or the reason why it did not run."""
    if suite.left_out is not None:
        return {"package": suite.package, "left_out": suite.left_out}
    version = installed(suite.package)
    folder = fetch(suite.package, version)
    if folder is None:
        return {"package": suite.package, "left_out": "the package index has no source distribution"}
    if not any(found for path in suite.tests for found in _test_files(folder / path)):
        return {"package": suite.package, "left_out": f"the source distribution of {folder.name} has no tests"}
    if version is None:
        return {"package": suite.package, "left_out": "it is not installed beside Lowtide"}
    return {"package": suite.package, "version": version} | run_tests(suite, folder)


def _test_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))


def installed(package: str) -> str | None:
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def fetch(package: str, version: str | None) -> Path | None:
    """Return the folder of an unpacked source distribution, or None if the index has none."""
    CACHE.mkdir(exist_ok=True)
    wanted = f"{package}=={version}" if version else package
    with tempfile.TemporaryDirectory(dir=CACHE) as downloads:
        place = CACHE / wanted.replace("==", "-").replace("-", "_")
        if not place.exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            command += ["--disable-pip-version-check", "-d", downloads, wanted]
            if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode:
                return None
            (archive,) = Path(downloads).glob("*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(place, filter="data")
        (folder,) = place.iterdir()
    return folder


def run_tests(suite: Suite, folder: Path) -> dict[str, Any]:
    """Run a suite's tests in its folder, and count."""
    for path in suite.tests:  # relative imports in the tests need a package
        (folder / path).parent.joinpath("__init__.py").touch()
    with tempfile.TemporaryDirectory() as outcome:
        results, calls = Path(outcome) / "results.xml", Path(outcome) / "calls"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "lowtide_in_place", "-c", os.devnull, "-W", "ignore"]
        command += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={folder}", f"--junitxml={results}"]
        command += ["-k", suite.keywords, *([str(PLUGINS / suite.driver)] if suite.driver else suite.tests)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
            "LOWTIDE_REPLACES": suite.replaces,
            "LOWTIDE_CALLS": str(calls),
            "LOWTIDE_FOREIGN": str(folder),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if not results.exists():
            raise SystemExit(f"{suite.package}: the tests could not be started\n{done.stdout}{done.stderr}")
        counts = read_results(results)
        answered = int(calls.read_text())
    return {
        "replaces": suite.replaces,
        "tests": list(suite.tests),
        "keywords": suite.keywords,
        **counts,
        "calls": answered,
        "differences": suite.differences,
    }


def read_results(path: Path) -> dict[str, Any]:
    """Count the outcomes in a results file of pytest, and list failures and the reasons of skips."""
    cases = list(ET.parse(path).getroot().iter("testcase"))  # noqa: S314  (written by our own pytest)
    failures = sorted(
        {f"{case.get('classname')}::{case.get('name')}" for case in cases if _has(case, "failure", "error")}
    )
    skips = [skip.get("message", "") for case in cases for skip in case.iter("skipped")]
    return {
        "passed": sum(not _has(case, "failure", "error", "skipped") for case in cases),
        "failed": len(failures),
        "skipped": len(skips),
        "failures": failures,
        "skips": {reason: skips.count(reason) for reason in sorted(set(skips))},
    }


def _has(case: ET.Element, *kinds: str) -> bool:
    return any(case.find(kind) is not None for kind in kinds)


if __name__ == "__main__":
    sys.exit(main())
