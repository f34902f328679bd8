"""Runs the tests with another torch and writes down how that went: `make test-torch TORCH=2.15.0`.

The record (`docs/versions.json`) is what README's table and `lowtide doctor` are held to by a test: a version that is
said to work is one that ran. Called by the interpreter of an environment that has that torch. Arguments are handed to
pytest; with a selection among them nothing is recorded, because a part of the tests proves a part. Left out are the
checks of the repository's own files and pages (`tests/repository`), which are about the pinned versions.

`python tools/torch_versions.py --table` writes README's table from the record.
"""

from __future__ import annotations

import datetime as dt
import json
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "versions.json"
README = ROOT / "README.md"
TABLE = re.compile(r"(?<=<!-- versions of torch: written by tools/torch_versions.py -->\n).*?(?=\n\n)", re.DOTALL)
SETTINGS = re.compile(r"-n\b|--dist\b|-o\b|\d+$|load\w+$|timeout=\d+$|-q$|-v$|--tb=")
"""Arguments of pytest that select no tests."""


def main(arguments: list[str]) -> int:
    if arguments == ["--table"]:
        README.write_text(with_table(README.read_text(), read_records()))
        return 0
    build_emulated_device()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "--ignore=tests/repository", f"--junitxml={results}", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if not results.exists():
            return code
        record = read_results(results)
    if all(SETTINGS.match(argument) for argument in arguments):
        write_record(record)
        README.write_text(with_table(README.read_text(), read_records()))
        print(f"docs/versions.json: torch {record['torch']}, {record['passed']} passed, {record['failed']} failed")
    else:
        print("Nothing is recorded: these arguments select some of the tests.")
    return code


def build_emulated_device() -> None:
    """Compile it now: its first build can take longer than a test's time limit."""
    print("Building the emulated device for this torch (once, a minute or two)", flush=True)
    subprocess.run([sys.executable, "-c", "from lowtide import simdevice; simdevice.enable()"], cwd=ROOT, check=True)


def read_results(path: Path) -> dict[str, Any]:
    cases = list(ET.parse(path).getroot().iter("testcase"))  # noqa: S314  (written by our own pytest)
    failures = [f"{case.get('classname')}::{case.get('name')}" for case in cases if _has(case, "failure", "error")]
    skipped = sum(_has(case, "skipped") for case in cases)
    return {
        "torch": str(Version(metadata.version("torch")).public),
        "python": platform.python_version(),
        "transformers": metadata.version("transformers"),
        "lowtide": metadata.version("lowtide"),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "passed": len(cases) - skipped - len(failures),
        "failed": len(failures),
        "skipped": skipped,
        "failures": sorted(failures),
    }


def _has(case: ET.Element, *kinds: str) -> bool:
    return any(case.find(kind) is not None for kind in kinds)


def read_records() -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(RECORDS.read_text()) if RECORDS.exists() else []
    return records


def write_record(record: dict[str, Any]) -> None:
    """Put a record in the place of an older one of the same torch."""
    others = [known for known in read_records() if known["torch"] != record["torch"]]
    records = sorted([*others, record], key=lambda known: Version(known["torch"]))
    RECORDS.write_text(json.dumps(records, indent=2) + "\n")


def with_table(text: str, records: list[dict[str, Any]]) -> str:
    """Return README's text with the table of these records."""
    rows = [
        f"| {record['torch']} | {record['passed']} | {record['failed']} | {record['skipped']} |"
        for record in sorted(records, key=lambda known: Version(known["torch"]), reverse=True)
    ]
    table = "\n".join(["| torch | passed | failed | skipped |", "|---|---|---|---|", *rows])
    if not TABLE.search(text):
        raise SystemExit("README.md has no place for the table of torch versions")
    return TABLE.sub(lambda _: table, text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
