"""The report for machines: JUnit and GitHub's workflow commands."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

import pytest

from lowtide.auditing import AuditReport, Grade, Verdict
from lowtide.auditing.ci import as_badge, as_github, as_junit, as_markdown, evidence_lines
from support.sample_reports import check, report


def one(**known) -> AuditReport:
    return AuditReport(model="M", seed=0, blocks={}, checks=[check("outputs", **known)])


def test_evidence_is_one_value_per_line():
    evidence = {"count": 2, "lost": ["a.b", "c.d"], "pairs": {"x": [1, 2], "y": []}, "stacks": [{"name": "s", "of": 3}]}
    assert evidence_lines(evidence) == [
        "count: 2",
        "lost:",
        "  - a.b",
        "  - c.d",
        "pairs:",
        "  x: 1, 2",
        "  y: none",
        "stacks:",
        "  - name: s",
        "    of: 3",
    ]


@pytest.fixture
def suite() -> ET.Element:
    (found,) = ET.fromstring(as_junit(report())).iter("testsuite")  # noqa: S314  (our own)
    return found


def test_junit_has_a_case_for_each_check(suite: ET.Element):
    cases = [(case.get("classname"), case.get("name")) for case in suite.iter("testcase")]
    assert cases == [
        ("TinyModel.default", "gradient values"),
        ("TinyModel.default", "gradients present"),
        ("TinyModel.default", "experts"),
        ("TinyModel.default", "memory"),
        ("TinyModel.reentrant", "outputs"),
    ]
    counts = {name: suite.get(name) for name in ("tests", "failures", "skipped", "errors")}
    assert counts == {"tests": "5", "failures": "1", "skipped": "2", "errors": "0"}


def test_junit_failures_carry_evidence_and_remedy(suite: ET.Element):
    (failure,) = suite.iter("failure")
    assert failure.get("message") == "2 of 9 parameters <b>lost</b> 50% & more: a, b"
    assert "  - layers.1.weight" in failure.text
    assert "remedy: use_reentrant=False,\nor another engine" in failure.text


def test_junit_what_proved_nothing_is_skipped_with_the_reason(suite: ET.Element):
    skipped = [element.get("message") for element in suite.iter("skipped")]
    assert skipped == ["not applicable: no mixture of experts", "inconclusive: nothing held"]


def test_junit_evidence_is_the_output_of_every_case_that_has_some(suite: ET.Element):
    outputs = {case.get("name"): case.findtext("system-out") for case in suite.iter("testcase")}
    assert outputs["gradient values"] == "identical: True\nlargest_error: 0.0"
    assert outputs["memory"] == "plain_bytes: 2048"
    assert outputs["experts"] is None


@pytest.mark.parametrize(("raw", "written"), [("\x1b[31mred", "\\x1b[31mred"), ("a\x00b", "a\\x00b"), ("é ∂", "é ∂")])
def test_junit_writes_what_xml_cannot_hold(raw: str, written: str):
    text = as_junit(one(verdict=Verdict.FAIL, summary=raw, evidence={"error": raw}))
    (failure,) = ET.fromstring(text).iter("failure")  # noqa: S314  (our own)
    assert failure.get("message") == written
    assert written in failure.text


def commands(text: str) -> list[tuple[str, str, str]]:
    """As a runner reads them: a line each, properties and message unescaped."""
    pattern = re.compile(r"::(?P<name>\w+) title=(?P<title>[^:,]*)::(?P<message>.*)")
    matches = [pattern.fullmatch(line) for line in text.splitlines()]
    assert all(matches), text
    return [(match["name"], unescaped(match["title"]), unescaped(match["message"])) for match in matches]


def unescaped(text: str) -> str:
    for code, character in {"%0A": "\n", "%0D": "\r", "%3A": ":", "%2C": ",", "%25": "%"}.items():
        text = text.replace(code, character)
    return text


def test_github_errors_warnings_and_a_notice():
    found = commands(as_github(report()))
    assert [name for name, _, _ in found] == ["error", "warning", "notice"]
    assert found[0][1] == "TinyModel [default] gradients present (wrong)"
    assert found[1][1:] == ("TinyModel [default] memory (inconclusive)", "nothing held\nplain_bytes: 2048")
    assert found[2][1:] == (
        "lowtide audit of TinyModel",
        "not ok: Parameters lose their gradient (default) (1 wrong, 2 pass, 1 inconclusive, 1 not applicable)",
    )


def test_github_messages_hold_evidence_and_remedy_in_one_line():
    message = commands(as_github(report()))[0][2]
    assert message.startswith("2 of 9 parameters <b>lost</b> 50% & more: a, b\nlost:\n  - layers.0.weight\n")
    assert message.endswith("remedy: use_reentrant=False,\nor another engine")


def test_github_escapes_what_ends_a_property_or_a_line():
    text = as_github(one(verdict=Verdict.FAIL, mode="tile(tokens=8, loss: 4)", summary="100%\r\n::error::no"))
    assert text.splitlines()[0] == (
        "::error title=M [tile(tokens=8%2C loss%3A 4)] outputs (wrong)::100%25%0D%0A::error::no"
    )


def test_github_a_passing_report_is_one_notice():
    assert commands(as_github(one(verdict=Verdict.PASS))) == [
        ("notice", "lowtide audit of M", "ok: No check failed (1 pass)")
    ]


def test_github_nothing_proven_is_not_ok():
    (notice,) = commands(as_github(one(verdict=Verdict.NOT_APPLICABLE)))
    assert notice[2] == "not ok: No check passed: nothing is proven (1 not applicable)"
    empty = AuditReport(model="M", seed=0, blocks={}, checks=[])
    assert commands(as_github(empty))[0][2] == "not ok: No check passed: nothing is proven (no check was run)"


def mild() -> AuditReport:
    """Nothing of which counts: one failure is untidy, and the other is known."""
    checks = [
        check("gradient values", Verdict.PASS),
        check("idempotent", Verdict.FAIL),
        check("memory", Verdict.FAIL, known=True),
    ]
    return AuditReport(model="M", seed=0, blocks={}, checks=checks)


def test_junit_failures_that_do_not_count_are_skipped_with_their_grade():
    (suite,) = ET.fromstring(as_junit(mild())).iter("testsuite")  # noqa: S314  (our own)
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "2")
    skipped = [element.get("message") for element in suite.iter("skipped")]
    assert skipped == ["untidy: what idempotent found", "known, no-effect: what memory found"]
    (failure,) = ET.fromstring(as_junit(report())).iter("failure")  # noqa: S314  (our own)
    assert failure.get("type") == "wrong"


def test_github_failures_that_do_not_count_are_no_errors():
    found = commands(as_github(mild()))
    assert [(name, title) for name, title, _ in found] == [
        ("warning", "M [default] idempotent (untidy)"),
        ("notice", "M [default] memory (known, no-effect)"),
        ("notice", "lowtide audit of M"),
    ]
    assert found[-1][2].startswith("ok: Gradients are right; untidy: switched on twice, it adds up; 1 known failure (")


def test_markdown_is_a_sentence_and_a_table_of_what_is_not_right():
    lines = as_markdown(report()).splitlines()
    assert lines[0] == "**not ok**: `TinyModel`: Parameters lose their gradient (default)."
    assert lines[4:] == [
        "| wrong | default | gradients present | 2 of 9 parameters &lt;b>lost&lt;/b> 50% & more: a, b |",
        "| inconclusive | default | memory | nothing held |",
    ]
    assert "| no-effect (known) | default | memory |" in as_markdown(mild())


@pytest.mark.parametrize(
    ("made", "message", "colour"),
    [
        (report(), "wrong", "red"),
        (mild(), "untidy", "yellow"),
        (one(verdict=Verdict.PASS), "gradients right", "brightgreen"),
        (one(verdict=Verdict.NOT_APPLICABLE), "not proven", "lightgrey"),
    ],
)
def test_a_badge_says_the_worst_grade(made: AuditReport, message: str, colour: str):
    badge = json.loads(as_badge(made))
    assert (badge["schemaVersion"], badge["message"], badge["color"]) == (1, message, colour)


@pytest.mark.parametrize("made", [report(), mild(), one(verdict=Verdict.FAIL, escalated=Grade.UNTIDY)])
def test_a_report_is_read_back(made: AuditReport):
    assert AuditReport.from_json(made.to_json()) == made
