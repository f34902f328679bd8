"""Other packages' tests with Lowtide in the place of theirs: the record of `make test-foreign`, and the tool."""

from __future__ import annotations

import importlib
import json
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = json.loads((ROOT / "docs" / "foreign.json").read_text())
RAN = [record for record in RECORDS if "left_out" not in record]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("foreign_tests")


def test_the_record_is_of_all_suites(tool):
    assert [record["package"] for record in RECORDS] == [suite.package for suite in tool.SUITES]
    assert all(len(record["left_out"].split()) > 3 for record in RECORDS if record not in RAN)


@pytest.mark.parametrize("record", RAN, ids=lambda record: record["package"])
def test_nothing_fails_that_is_no_known_difference(tool, record):
    assert tool.complaints(record) == []
    assert record["passed"] > 0
    assert sum(record["skips"].values()) == record["skipped"]


def test_they_were_run_in_the_pinned_versions():
    names = ("constraints.txt", "constraints-foreign.txt")
    lines = [line for name in names for line in (ROOT / name).read_text().splitlines() if "==" in line]
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {record["package"]: record["version"] for record in RAN} == {r["package"]: pins[r["package"]] for r in RAN}


def test_most_checks_are_those_of_transformers_and_liger():
    passed = {record["package"]: record["passed"] for record in RAN}
    assert passed["transformers"] >= 100
    assert passed["liger-kernel"] >= 30


def record(**changes):
    empty = {"package": "a", "failures": [], "differences": {}, "calls": 1}
    return empty | changes


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (record(), []),
        (record(failures=["t::one"]), ["a: t::one fails"]),
        (record(failures=["t::one"], differences={"one": "on purpose"}), []),
        (record(differences={"one": "on purpose"}), ["a: one does not fail any more: it is no known difference"]),
        (record(calls=0), ["a: nothing of Lowtide was called, so nothing was tested"]),
    ],
)
def test_what_is_wrong_with_a_record(tool, given, words):
    assert tool.complaints(given) == words


def test_results_are_counted(tool, tmp_path):
    results = tmp_path / "results.xml"
    results.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/><testcase classname="a" name="bad"><error/>'
        '</testcase><testcase classname="b" name="out"><skipped message="no GPU"/></testcase></testsuite></testsuites>'
    )
    counts = tool.read_results(results)
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (1, 1, 1)
    assert counts["failures"] == ["a::bad"]
    assert counts["skips"] == {"no GPU": 1}


def test_what_is_fetched_is_not_kept():
    assert ".foreign/" in (ROOT / ".gitignore").read_text().splitlines()
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert not any("foreign" in package for package in wheel["packages"])
