"""The records of devices: each fits the schema, and the page is written from them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import fastjsonschema
import pytest

from lowtide.auditing.result import Verdict
from lowtide.selftest import STAGES, Record, Row, StageResult
from lowtide.selftest.bench import DEVICES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "hardware"
SCHEMA = json.loads((FOLDER / "schema.json").read_text())
RECORDS = [path for path in sorted(FOLDER.glob("*.json")) if path.stem != "schema"]

_spec = importlib.util.spec_from_file_location("hardware_page", ROOT / "bench" / "hardware_page.py")
page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(page)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_fits_the_schema(path: Path):
    fastjsonschema.compile(SCHEMA)(json.loads(path.read_text()))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_names_no_path(path: Path):
    assert re.findall(r"(?<![\w:/])/(?:home|root|tmp|usr|work|Users)\b", path.read_text()) == []


def test_a_record_that_lacks_something_does_not_fit():
    fits = fastjsonschema.compile(SCHEMA)
    for key in SCHEMA["required"]:
        data = json.loads(RECORDS[0].read_text())
        del data[key]
        with pytest.raises(fastjsonschema.JsonSchemaException):
            fits(data)
    data = json.loads(RECORDS[0].read_text()) | {"hostname": "mine"}
    with pytest.raises(fastjsonschema.JsonSchemaException):
        fits(data)


def test_the_schema_knows_the_stages_and_the_devices():
    stages = SCHEMA["properties"]["stages"]
    assert stages["items"]["properties"]["name"]["enum"] == list(STAGES)
    assert stages["minItems"] == stages["maxItems"] == len(STAGES)
    kinds = SCHEMA["properties"]["environment"]["properties"]["device"]["properties"]["type"]["enum"]
    assert kinds == list(DEVICES)


def test_the_page_shows_the_records():
    assert (ROOT / "docs" / "hardware.md").read_text() == page.from_records()


def test_the_page_says_whether_there_is_a_gpu():
    types = {json.loads(path.read_text())["environment"]["device"]["type"] for path in RECORDS}
    said = "There is no record of a GPU yet" in (ROOT / "docs" / "hardware.md").read_text()
    assert said == (types <= {"sim", "cpu"})
    assert {"sim", "cpu"} <= types


def stage(name: str, *rows: Row) -> StageResult:
    return StageResult(name=name, rows=list(rows))


def right(name: str, verdict: str, **figures) -> Row:
    return Row(name=name, verdict=Verdict(verdict), summary="", figures=figures)


@pytest.mark.parametrize(
    ("rows", "cell"),
    [
        ([], "0 (tiles)"),
        ([right("llama, recompute+tile, fp32", "pass", identical=False)], "1 (tiles)"),
        ([right("llama, recompute, fp32", "pass", identical=False)], "1 (the plain model's own noise)"),
        (
            [right(f"llama, recompute{tiles}", "pass", identical=False) for tiles in ("", "+tile", "+tile(mlp)")],
            "2 (tiles), 1 (the plain model's own noise)",
        ),
        ([right("llama, recompute, fp32", "fail", identical=False)], "0 (tiles)"),
    ],
)
def test_what_is_not_identical_is_called_by_its_reason(rows, cell):
    record = Record(quick=True, date="", environment={}, stages=[stage("right", *rows)])
    assert page._gradients(record)[1] == cell


def test_the_page_says_how_far_planned_steps_are_off():
    figures = {"seconds": 1.0, "planned_seconds": 0.9}
    plain = right("none", "pass", **figures, planned_seconds_before_calibration=0.5)
    other = right("recompute", "pass", **figures | {"planned_seconds": 1.2}, planned_seconds_before_calibration=0.7)
    record = Record(quick=True, date="", environment={}, stages=[stage("plans", plain, other)])
    assert page._planned_seconds(record) == "-50%, +20%"
    unknown = Record(quick=True, date="", environment={}, stages=[stage("plans", right("none", "pass", **figures))])
    assert page._planned_seconds(unknown) == "no data sheet, -10%"
