"""Pages and drawings of the docs that programs write: they are what the programs make of the data beside them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

import lowtide
import lowtide.auditing
import lowtide.hardware
import lowtide.planning
import lowtide.simdevice
from bench import longest_sequences, plan_tables, planner_page
from lowtide.hardware.accelerators import load_table
from lowtide.planning import server
from lowtide.targets.target import known_models
from lowtide.units import parse_tokens
from models.tiny import IS_4
from support.browser import needs_browser, show

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def _program(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_zoo_page_shows_the_records():
    assert (DOCS / "zoo.md").read_text() == _program("zoo_page").from_records()


def test_the_plan_tables_show_the_plans():
    plans, longest = (json.loads((DOCS / name).read_text()) for name in ("plans.json", "longest.json"))
    assert (DOCS / "plan_tables.md").read_text() == plan_tables.page(plans, longest)


class TestThePlanner:
    """docs/planner.html, which `bench/planner_page.py` writes, and re-renders with `--again`."""

    PAGE = (DOCS / "planner.html").read_text()
    PLANS = planner_page.plans_of(PAGE)

    def test_it_is_what_the_program_makes_of_its_plans(self):
        pytest.importorskip("jinja2", reason="the html extra is not installed")
        assert server.planner_page(self.PLANS) == self.PAGE
        assert len(self.PAGE) < 1_500_000

    def test_every_model_has_every_length(self):
        found = [(plan["model"], plan["tokens"]) for plan in self.PLANS]
        wanted = itertools.product(planner_page.MODELS, map(parse_tokens, planner_page.TOKENS))
        assert found == list(wanted)
        assert {plan["device"] for plan in self.PLANS} == {planner_page.DEVICE}

    def test_its_rows_agree_with_what_it_recommends(self):
        for plan in self.PLANS:
            rows = {row["policy"]: row for row in plan["rows"]}
            assert len(rows) > 10
            assert plan["timeline"]
            assert plan["shown"] == plan["recommended"][0]["policy"]
            fastest = rows[plan["recommended"][-1]["policy"]]
            for row in rows.values():
                has_room = row["device_bytes"] <= (1 - plan["headroom"]) * plan["budget"]
                fits = has_room and row["host_bytes"] <= plan["host_budget"]
                assert not fits or row["seconds"] >= fastest["seconds"]
                assert row["code"] == f'lowtide.apply(model, "{row["policy"]}")'
            most = max(sum(point["bytes"].values()) for point in plan["timeline"])
            assert most <= rows[plan["shown"]]["device_bytes"] <= 1.5 * most

    @needs_browser
    def test_a_browser_shows_it(self, tmp_path: Path):
        probe = """
          const rows = () => document.querySelectorAll("#rows tbody tr").length, before = rows();
          const slider = document.querySelector("[name=tokens]"), first = document.getElementById("status").textContent;
          slider.value = 1;
          slider.dispatchEvent(new Event("input", { bubbles: true }));
          return { before, after: rows(), first, then: document.getElementById("status").textContent, max: slider.max,
                   paste: document.querySelector("pre.paste code").textContent };
        """
        shown = show(self.PAGE, tmp_path, probe=probe)
        short, long = self.PLANS[:2]
        assert shown.console == []
        assert (shown.answer["before"], shown.answer["after"]) == (len(short["rows"]), len(long["rows"]))
        assert shown.answer["first"] == f"{short['title']}. Seconds are of the {short['device']}"
        assert shown.answer["then"] == f"{long['title']}. Seconds are of the {long['device']}"
        assert shown.answer["max"] == "1", "the slider has the lengths of the plans alone"
        assert shown.answer["paste"].startswith("lowtide.apply(model, ")

    def test_the_docs_lead_to_it(self):
        assert "planner.html" in (ROOT / "mkdocs.yml").read_text()
        assert all("(planner.html)" in (DOCS / name).read_text() for name in ("plan.md", "plan_tables.md"))


def test_every_longest_sequence_of_the_tables_is_known():
    longest = json.loads((DOCS / "longest.json").read_text())
    assert [row["case"] for row in longest] == longest_sequences.CASES
    assert all([fit["policy"] for fit in row["rows"]] == list(longest_sequences.POLICIES) for row in longest)


def _tiled_mlps_and_blocks(model: str, tokens: str) -> list[dict[str, Any]]:
    plans = json.loads((DOCS / "plans.json").read_text())
    (plan,) = (plan for plan in plans if (plan["case"]["model"], plan["case"]["tokens"]) == (model, tokens))
    by_policy = {candidate["policy"]: candidate for candidate in plan["candidates"]}
    return [by_policy[policy] for policy in longest_sequences.POLICIES]


@pytest.mark.parametrize(
    ("model", "gib", "share_of_mlps"), [("Qwen3-VL-4B", 15.2, 0.52), ("Llama-3.1-8B", 25, 0.67), ("Qwen3-8B", 25, 0.6)]
)
def test_blocks_in_tiles_need_that_little_memory_and_time(model, gib, share_of_mlps):
    mlps, blocks = _tiled_mlps_and_blocks(model, "128k")
    assert blocks["device_bytes"] <= min(gib * 2**30, share_of_mlps * mlps["device_bytes"])
    assert blocks["seconds"] <= (1.04 if model == "Qwen3-VL-4B" else 1.06) * mlps["seconds"]


def test_attention_that_is_kept_makes_blocks_in_tiles_faster_than_tiled_mlps():
    """A step of Qwen3-VL-4B at 128K tokens took 167 s before blocks ran in tiles."""
    plans = json.loads((DOCS / "plans.json").read_text())
    (plan,) = (p for p in plans if (p["case"]["model"], p["case"]["tokens"]) == ("Qwen3-VL-4B", "128k"))
    seconds = {candidate["policy"]: candidate["seconds"] for candidate in plan["candidates"]}
    assert seconds["recompute(keep=attention)+offload+tile"] < min(167, seconds["recompute+offload+tile(mlp, loss)"])


def test_the_zoo_runs_blocks_in_tiles_and_none_is_wrong():
    records = json.loads(_program("zoo_page").record_files()[1].read_text())["records"]
    tiled = [record for record in records if record["tiled_blocks"]]
    assert len({record["model_type"] for record in tiled}) >= 420
    assert [record["model_type"] for record in tiled if record["failures"]] == []
    in_tiles = ("recompute+tile(tokens=8, loss_tokens=8)", "recompute+tile(attention, mlp, tokens=8)")
    assert all(any(policy in record["verdicts"] for policy in in_tiles) for record in tiled), "each was audited so"


def test_blocks_in_tiles_allow_sequences_that_much_longer():
    for row in json.loads((DOCS / "longest.json").read_text()):
        mlps, blocks = row["rows"]
        assert blocks["tokens"] >= (2.5 if "base" not in row["case"] else 2.4) * mlps["tokens"], row["case"]


def test_the_page_about_plans_names_all_that_is_known():
    page = (DOCS / "plan.md").read_text()
    for what, names in {"GPUs": [row.name for row in load_table()], "models": list(known_models())}.items():
        assert f"Known {what}: {', '.join(names)}" in page


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


def test_the_architecture_page_names_the_modules_that_there_are():
    rows = [line for line in (DOCS / "architecture.md").read_text().splitlines() if line.startswith("| `")]
    rows = [line.strip("| ").split(" | ") for line in rows if ".cpp" not in line and ".h`" not in line]
    named = {name: text for names, text in rows for name in re.findall(r"`(\w+)`", names)}
    package = ROOT / "src" / "lowtide"
    there = {path.stem for path in package.iterdir() if not path.name.startswith("_") and path.suffix in ("", ".py")}
    assert named.keys() == there
    for module, text in named.items():
        inside = {path.stem for path in (package / module).glob("*") if not path.name.startswith("_")}
        unknown = set(re.findall(r"`(\w+)`", text)) - inside - {"lowtide", *lowtide.__all__}
        assert not unknown, module


def test_the_architecture_page_names_the_sources_of_the_device():
    sources = {path.name for path in (ROOT / "src" / "lowtide" / "simdevice" / "csrc").iterdir()}
    named = set(re.findall(r"`(\w+\.(?:cpp|h))`", (DOCS / "architecture.md").read_text()))
    assert named <= sources
    assert {name for name in sources if name.endswith(".cpp")} <= named


def test_the_reference_names_all_that_is_public():
    page = (DOCS / "reference.md").read_text()
    for package in (lowtide, lowtide.planning, lowtide.hardware, lowtide.auditing, lowtide.simdevice):
        missing = {name for name in package.__all__ if not re.search(rf"\b{name}\b", page)}
        assert not missing, package.__name__


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md\b", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
