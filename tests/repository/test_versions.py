"""A torch release that is said to work is one that ran: README, metadata and doctor against `docs/versions.json`."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from lowtide import compat

ROOT = Path(__file__).parents[2]
RECORDS = json.loads((ROOT / "docs" / "versions.json").read_text())
SUPPORTED = [record for record in RECORDS if Version(record["torch"]) >= compat.MINIMUM["torch"]]
OLDER = [record for record in RECORDS if record not in SUPPORTED]
VERSIONS = [Version(record["torch"]) for record in SUPPORTED]


def _tool():
    spec = importlib.util.spec_from_file_location("torch_versions", ROOT / "tools" / "torch_versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_in_the_readme_is_the_record():
    text = (ROOT / "README.md").read_text()
    assert _tool().with_table(text, RECORDS) == text
    assert all(f"| {record['torch']} | {record['passed']} |" in text for record in RECORDS)


@pytest.mark.parametrize("record", SUPPORTED, ids=lambda record: record["torch"])
def test_nothing_fails_with_a_supported_release(record):
    assert record["failures"] == []
    assert record["failed"] == 0
    assert record["passed"] > 2800
    assert record["skipped"] < record["passed"] / 20


def test_a_release_that_passes_is_not_left_out():
    assert all(record["failed"] > 0 for record in OLDER), "lower the minimum"


def test_the_range_is_the_one_that_ran():
    assert compat.tested_torch() == (min(VERSIONS), max(VERSIONS))
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    torch = next(Requirement(line) for line in dependencies if Requirement(line).name == "torch")
    lowest = re.fullmatch(r">=([\d.]+)", str(torch.specifier))
    assert lowest is not None
    assert Version(lowest[1]) == compat.MINIMUM["torch"] == Version(f"{min(VERSIONS).major}.{min(VERSIONS).minor}")
    assert min(VERSIONS) <= compat.TESTED["torch"] <= max(VERSIONS)


def test_results_become_a_record(tmp_path):
    results = tmp_path / "results.xml"
    results.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/><testcase classname="a" name="bad"><failure/>'
        '</testcase><testcase classname="b" name="left out"><skipped/></testcase></testsuite></testsuites>'
    )
    record = _tool().read_results(results)
    assert (record["passed"], record["failed"], record["skipped"]) == (1, 1, 1)
    assert record["failures"] == ["a::bad"]


@pytest.mark.parametrize(
    ("arguments", "is_whole"),
    [
        (["-n", "2", "--dist", "loadfile"], True),
        (["-n", "2", "-o", "timeout=900"], True),
        (["tests/stores"], False),
        (["-k", "disk"], False),
        (["--deselect", "tests/stores/test_disk.py"], False),
        (["-x"], False),
    ],
)
def test_a_part_of_the_tests_is_not_recorded(arguments, is_whole):
    tool = _tool()
    assert all(tool.SETTINGS.match(argument) for argument in arguments) is is_whole
