"""The page to plan in: over HTTP, as a browser asks it, and as a file without a server."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from lowtide.errors import InvalidValueError
from lowtide.planning.server import PlannerServer, Run, answer_of, planner_page, read_question, serving
from lowtide.units import format_seconds
from support.browser import needs_browser, show, visit, with_probe
from support.sample_plans import GIB, make_plan

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("jinja2", reason="the html extra is not installed")

QUESTION = {"model": "Llama-3.1-8B", "tokens": "8192", "device": "L40S", "ranks": "2", "lora": ""}


class Planner:
    """Stands for `lowtide.plan`: tells one row, waits until it is let go, and ends."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.go_on = threading.Event()

    def __call__(self, *, suggest: bool, progress: Any, on_candidate: Any, **asked: Any) -> Any:
        assert suggest
        self.asked.append(asked)
        found = make_plan(20 * GIB)
        on_candidate(found.candidates[0])
        while not self.go_on.wait(0.01):
            progress("simulating", 1, 2)
        return found


def get(address: str, path: str, **headers: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers)) as answer:  # noqa: S310  (our own)
        text = answer.read().decode()
    return json.loads(text) if path else text


def post(address: str, question: object, kind: str = "application/json") -> Any:
    request = urllib.request.Request(  # noqa: S310
        address + "plan", data=json.dumps(question).encode(), headers={"Content-Type": kind}
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return json.loads(answer.read())


def wait_for(address: str, name: str) -> dict[str, Any]:
    for _ in range(200):
        state = get(address, "plan")
        if state.get(name):
            return state
        time.sleep(0.01)
    raise AssertionError(state)


def test_rows_arrive_while_the_plan_is_made():
    planner = Planner()
    with serving(PlannerServer(make_plan=planner)) as address:
        assert "Will it fit" in get(address, "")
        assert post(address, QUESTION) == {"asked": True}
        early = wait_for(address, "rows")
        assert [row["policy"] for row in early["rows"]] == ["none"]
        assert not early["finished"]
        assert get(address, "plan?after=1")["rows"] == [], "what the page has is not sent again"
        planner.go_on.set()
        plan = wait_for(address, "finished")["plan"]
        assert [row["policy"] for row in plan["rows"]] == ["none", "recompute; *.0: none"]
        assert plan["recommended"][0]["policy"] == "recompute; *.0: none"
    assert planner.asked == [{"model": "Llama-3.1-8B", "tokens": "8192", "device": "L40S", "ranks": 2}]


def test_a_new_question_ends_the_last_plan():
    planner = Planner()
    server = PlannerServer(make_plan=planner)
    with serving(server) as address:
        post(address, QUESTION)
        wait_for(address, "rows")
        first = server.run
        post(address, QUESTION)
        first._thread.join(5)
        assert "ended" in first.state(0)["error"]


def test_whatever_ends_a_plan_is_told_to_the_page(caplog: pytest.LogCaptureFixture):
    def fail(**_: Any) -> Any:
        raise ZeroDivisionError("by nothing")

    with caplog.at_level("DEBUG", "lowtide"), serving(PlannerServer(make_plan=fail)) as address:
        post(address, QUESTION)
        state = wait_for(address, "finished")
    assert state["error"] == "the plan failed: ZeroDivisionError: by nothing (lowtide -v shows where)"
    assert "ZeroDivisionError" in caplog.text


WATCH = """
  window.seen = [];
  setInterval(() => seen.push(document.querySelectorAll("#rows tbody tr").length), 50);
</script><script>
"""


class TestTheServedPageInABrowser:
    @needs_browser
    def test_rows_a_timeline_and_the_line_to_paste(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        planner, state = Planner(), Run.state

        def state_then_go_on(run: Run, after: int) -> dict[str, Any]:
            """Let the plan end as soon as the page was told of its first row: its time is not ours."""
            found = state(run, after)
            if found["rows"]:
                planner.go_on.set()
                run._thread.join(5)
            return found

        monkeypatch.setattr(Run, "state", state_then_go_on)
        server = PlannerServer(make_plan=planner, model="Llama-3.1-8B", tokens=48 * 1024, device="L40S", lora=16)
        server.page = with_probe(
            server.page,
            """return {
              seen, tokens: document.getElementById("tokens-shown").textContent,
              status: document.getElementById("status").textContent,
              rows: [...document.querySelectorAll("#rows tbody tr")].map(row => row.textContent),
              paste: [...document.querySelectorAll("pre.paste")].map(line => line.textContent),
              areas: document.querySelectorAll("#timeline polygon").length,
              loaded: performance.getEntriesByType("resource").map(entry => new URL(entry.name).host),
            }""",
        ).replace("<script>\nconst plans", f"<script>{WATCH}\nconst plans")
        with serving(server) as address:
            shown = visit(address, tmp_path)
        answer = shown.answer
        assert shown.console == []
        assert planner.asked == [
            {"model": "Llama-3.1-8B", "tokens": "49152", "device": "L40S", "ranks": 1, "lora": 16, "base": "plain"}
            | {"optimizer": "adamw", "batch_size": 1}
        ], "a length that is no power of two is asked for as it is"
        assert answer["tokens"] == "49,152"
        assert {0, 1, 2} >= set(answer["seen"]) >= {1, 2}, "the first row was there before the last"
        assert answer["status"].startswith("tiny, full fine-tuning, 1 x 4096 tokens")
        assert len(answer["rows"]) == 2
        assert "30.49 GiB" in answer["rows"][0]
        assert answer["paste"] == ['copylowtide.apply(model, "none")'], "judged for the memory of the slider"
        assert answer["areas"] == 2
        assert set(answer["loaded"]) == {address.split("/")[2]}, "nothing comes from elsewhere"

    @needs_browser
    def test_a_plan_that_fails_does_not_leave_it_waiting(self, tmp_path: Path):
        def fail(**_: Any) -> Any:
            raise ZeroDivisionError("by nothing")

        server = PlannerServer(make_plan=fail, model="Llama-3.1-8B")
        server.page = with_probe(server.page, 'return document.getElementById("status").textContent')
        with serving(server) as address:
            assert "the plan failed: ZeroDivisionError: by nothing" in visit(address, tmp_path).answer


def test_the_slider_has_the_usual_lengths_the_asked_one_and_those_of_plans():
    def lengths(page: str) -> list[int]:
        return json.loads(page.partition("lengths = ")[2].partition(";")[0])

    usual = lengths(planner_page())
    assert usual == [2**power for power in range(10, 21)]
    assert lengths(planner_page(tokens=48 * 1024)) == sorted([*usual, 48 * 1024])
    plans = [{**answer_of(make_plan(20 * GIB)), "model": "tiny", "device": "L40S", "tokens": n} for n in (12288, 8192)]
    assert lengths(planner_page(plans)) == [8192, 12288]


def test_only_pages_of_this_machine_are_answered():
    server = PlannerServer(make_plan=Planner())
    assert server.server_address[0] == "127.0.0.1"
    with serving(server) as address:
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(address, "", Host="example.org:80")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(address, QUESTION, kind="text/plain")
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            post(address, {"model": "os:getcwd"})
        assert "plan it on the command line" in json.loads(refused.value.read())["error"]
        assert server.run is None


def test_a_question_has_known_settings_of_known_types():
    for question, message in (
        ([], "an object of settings"),
        ({"model": ""}, "name a model"),
        ({"model": "x", "calibration": "/etc/passwd"}, "not a setting of this page"),
        ({"model": "x", "ranks": "two"}, "cannot read 'two'"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            read_question(question)


@needs_browser
def test_a_page_with_plans_judges_them_again_for_another_memory(tmp_path: Path):
    plan = make_plan(20 * GIB)
    answer = {**answer_of(plan), "model": "tiny", "tokens": 8192, "device": "L40S"}
    probe = """
      const verdicts = () => [...document.querySelectorAll("#rows tbody tr")].map(row => row.className);
      const before = verdicts(), slider = document.querySelector("[name=budget]");
      slider.value = 50;
      slider.dispatchEvent(new Event("input", { bubbles: true }));
      return { before, after: verdicts(), paste: document.querySelector("pre.paste code").textContent,
               areas: document.querySelectorAll("#timeline polygon").length,
               status: document.getElementById("status").textContent,
               durations: [4.5e-5, 0.0123, 1.95, 599, 1950, 123456].map(duration),
               loaded: performance.getEntriesByType("resource").length };
    """
    page = planner_page([answer])
    shown = show(page, tmp_path, probe=probe)
    assert shown.console == []
    assert shown.answer["before"] == ["fits", "fits"]
    assert shown.answer["after"] == ["no", "fits"]
    assert shown.answer["paste"] == 'lowtide.apply(model, "recompute; *.0: none")'
    assert shown.answer["areas"] == 2
    assert shown.answer["durations"] == [*map(format_seconds, (4.5e-5, 0.0123, 1.95, 599, 1950, 123456))]
    assert shown.answer["status"].endswith("Seconds are of the L40S")
    assert shown.answer["loaded"] == 0
