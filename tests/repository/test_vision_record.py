"""docs/frameworks/diffusion.md: its tables are what the records of `make test-vision` say."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest

from lowtide.units import format_bytes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/frameworks/diffusion.md").read_text()
RECORD = json.loads((ROOT / "docs/vision.json").read_text())
PLANS = json.loads((ROOT / "docs/video_plans.json").read_text())
COLUMNS = {
    "recompute": "test_recompute_is_bit_identical",
    "keep=attention": "test_kept_attention_is_bit_identical",
    "tile(mlp)": "test_mlps_in_tiles",
}
"""By column: the test of which a model in that column has passed, if it is said to be tested."""


def cells(header: str) -> list[list[str]]:
    """The rows of the table that begins with this header."""
    lines = PAGE.partition(f"| {header} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_nothing_failed_and_nothing_was_skipped():
    assert set(RECORD["tests"].values()) == {"passed"}
    assert len(RECORD["tests"]) > 60


@pytest.mark.parametrize("record", [RECORD, PLANS], ids=["tests", "plans"])
def test_the_records_are_of_the_pinned_versions(record):
    files = ("constraints.txt", "constraints-vision.txt")
    lines = [line for name in files for line in (ROOT / name).read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    ran = {name: version.partition("+")[0] for name, version in record["packages"].items()}
    assert ran == {name: pins[name] for name in ran}
    assert importlib.metadata.version("torch").partition("+")[0] == ran["torch"] or pytest.skip("another torch")


def test_each_cell_is_what_was_tested():
    rows = cells("model")
    assert len(rows) == 14
    for name, *words in rows:
        tested = [f"test_vision_models.py::{test}[{name}]" in RECORD["tests"] for test in COLUMNS.values()]
        assert words == [*("tested" if one else "refused" for one in tested), "refused", "refused"], name
        refused = f"test_vision_models.py::test_tiles_of_attention_and_of_the_loss_are_refused_by_name[{name}]"
        assert refused in RECORD["tests"], name


def test_every_model_that_was_tested_is_on_the_page():
    test = COLUMNS["recompute"]
    found = [re.fullmatch(rf".*::{test}\[(.*)\]", name) for name in RECORD["tests"]]
    assert [match[1] for match in found if match] == [name for name, *_ in cells("model")]


def test_the_plans_on_the_page_are_those_stored():
    rows = cells("plan")
    assert {name for name, *_ in rows} == {f"`{name}`" for name in PLANS["plans"]}
    for factory, policy, *shown in rows:
        plans = PLANS["plans"][factory.strip("`")]
        (stored,) = (plan for plan in plans if plan["policy"] == policy.strip("`"))
        host = format_bytes(stored["host_bytes"]) if stored["host_bytes"] else ""
        verdict = "fits" if stored["fits"] else "no"
        assert shown == [verdict, format_bytes(stored["device_bytes"]), host, f"{stored['seconds']:.0f} s"], policy
