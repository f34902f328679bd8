"""Pages and drawings of the docs that programs write: they are what the programs make of the data beside them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tiny_models import IS_4

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def _program(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_zoo_page_shows_the_records():
    assert (DOCS / "zoo.md").read_text() == _program("zoo_page").from_records()


def test_the_plan_tables_show_the_plans():
    assert (DOCS / "plan_tables.md").read_text() == _program("plan_tables").page(
        json.loads((DOCS / "plans.json").read_text())
    )


def test_the_reasons_count_the_records():
    why = (DOCS / "why.md").read_text()
    assert "| architectures audited |" in why
    assert why == _program("zoo_page").with_table(why)


def test_the_drawings_of_a_step_show_the_samples():
    program = _program("step_drawings")
    drawn = program.drawings(json.loads(program.DATA.read_text()))
    assert drawn == {name: (program.IMAGES / name).read_text() for name in drawn}


@pytest.mark.slow
@pytest.mark.skipif(IS_4, reason="plans of transformers models need transformers 5")
def test_the_samples_of_a_step_are_those_of_a_plan():
    program = _program("step_drawings")
    (kept,) = (step for step in json.loads(program.DATA.read_text()) if step["policy"] == "recompute")
    again = program.measured("recompute")
    assert (again["peak_bytes"], again["host_bytes"]) == (kept["peak_bytes"], kept["host_bytes"])
    assert [sample[1:] for sample in again["samples"]] == [sample[1:] for sample in kept["samples"]]
    assert max(sum(sample[2:]) for sample in kept["samples"]) == kept["peak_bytes"]


def test_no_architecture_fails_with_our_engine():
    (data,) = (DOCS / "zoo").glob("lowtide-on-transformers-*.json")
    records = json.loads(data.read_text())["records"]
    by_status: dict[str, int] = {}
    for record in records:
        by_status[record["status"]] = by_status.get(record["status"], 0) + 1
        assert not record["failures"], record["model_type"]
        assert record["status"] == "audited" or record["why"], record["model_type"]
    assert set(by_status) == {"audited", "refused", "not built"}
    assert by_status["audited"] >= 560
