r"""Writes the report for CI systems: as JUnit XML and as workflow commands of GitHub Actions.

JUnit has one test case for each check, in one suite. A failure has its grade as its type, and carries evidence and
remedy as its text. What proved nothing (inconclusive, not applicable), and a failure that does not count (too mild for
the report's `fail_on`, or known), is skipped with the reason, so that it is counted and never looks like a pass.
XML 1.0 cannot hold control characters, not even escaped; an error message may (a terminal's colours), so they are
written as `\x1b`.

GitHub turns workflow commands that a job prints into annotations. Failures that count are errors, other failures and
inconclusive checks are warnings, known failures are notices, and one more notice sums up. GitHub shows ten errors and
ten warnings for each step; the rest is in its log, and the last notice counts all of them.

Both formats hold plain text, so evidence is written as indented lines with one value each.
"""

from __future__ import annotations

import collections
import json
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from lowtide.auditing.grades import Grade
from lowtide.auditing.result import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.auditing.report import AuditReport
    from lowtide.auditing.result import CheckResult

_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_INDENT = "  "


def as_junit(report: AuditReport) -> str:
    """Write the report as JUnit XML."""
    suite = ET.Element(
        "testsuite",
        name=f"lowtide audit of {report.model}",
        tests=str(len(report.checks)),
        failures=str(len(report.counted)),
        errors="0",
        skipped=str(sum(_is_skipped(report, check) for check in report.checks)),
    )
    properties = ET.SubElement(suite, "properties")
    ET.SubElement(properties, "property", name="seed", value=str(report.seed))
    ET.SubElement(properties, "property", name="conclusion", value=_xml_text(report.conclusion))
    suite.extend([_test_case(report, check) for check in report.checks])
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _test_case(report: AuditReport, check: CheckResult) -> ET.Element:
    case = ET.Element("testcase", classname=_xml_text(f"{report.model}.{check.mode}"), name=_xml_text(check.name))
    if report.counts(check):
        failure = ET.SubElement(case, "failure", message=_xml_text(check.summary), type=check.label)
        failure.text = _xml_text(details(check))
    elif _is_skipped(report, check):
        known = "known, " if check.known else ""
        ET.SubElement(case, "skipped", message=_xml_text(f"{known}{check.label}: {check.summary}"))
    lines = evidence_lines(check.evidence)
    if lines:
        ET.SubElement(case, "system-out").text = _xml_text("\n".join(lines))
    return case


def _is_skipped(report: AuditReport, check: CheckResult) -> bool:
    return check.verdict is not Verdict.PASS and not report.counts(check)


def _xml_text(text: str) -> str:
    return _NOT_IN_XML.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def as_github(report: AuditReport) -> str:
    """Write the report as workflow commands: a line for each failed or inconclusive check, and a notice."""
    shown = (Verdict.FAIL, Verdict.INCONCLUSIVE)
    lines = [_annotation(report, check) for check in report.checks if check.verdict in shown]
    return "\n".join([*lines, _notice(report)])


def _annotation(report: AuditReport, check: CheckResult) -> str:
    command = "error" if report.counts(check) else "notice" if check.known else "warning"
    known = "known, " if check.known else ""
    title = f"{report.model} [{check.mode}] {check.name} ({known}{check.label})"
    message = f"{check.summary}\n{details(check)}".rstrip()
    return _command(command, title, message)


def _notice(report: AuditReport) -> str:
    counts = collections.Counter(check.label for check in report.checks)
    words = [*map(str, reversed(Grade)), *map(str, Verdict)]
    labels = ", ".join(f"{counts[word]} {word}" for word in words if counts[word])
    state = "ok" if report.ok else "not ok"
    message = f"{state}: {report.conclusion} ({labels or 'no check was run'})"
    return _command("notice", f"lowtide audit of {report.model}", message)


def _command(name: str, title: str, message: str) -> str:
    return f"::{name} title={_escape_property(title)}::{_escape_data(message)}"


def _escape_data(text: str) -> str:
    """Escape what would end a command's line. The percent sign goes first, because it starts the escapes."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")


def as_markdown(report: AuditReport) -> str:
    """Write the report as a comment on a pull request: the sentence, and a table of what is not as it should be."""
    shown = [check for check in report.checks if check.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)]
    lines = [f"**{'ok' if report.ok else 'not ok'}**: `{report.model}`: {report.conclusion}."]
    if shown:
        lines += ["", "| grade | mode | check | what was found |", "|---|---|---|---|"]
    for check in shown:
        words = f"{check.label}{' (known)' if check.known else ''}"
        lines.append(f"| {words} | {_cell(check.mode)} | {check.name} | {_cell(check.summary)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def as_badge(report: AuditReport) -> str:
    """Write what shields.io's endpoint badges read."""
    grades = [check.grade for check in report.failures if check.grade is not None and not check.known]
    message, colour = "not proven", "lightgrey"
    if grades:
        message, colour = str(max(grades, key=list(Grade).index)), "yellow" if report.ok else "red"
    elif report.ok:
        message, colour = "gradients right", "brightgreen"
    return json.dumps({"schemaVersion": 1, "label": "lowtide audit", "message": message, "color": colour})


def details(check: CheckResult) -> str:
    """Write everything below a check's summary: the evidence, and the remedy if there is one."""
    lines = evidence_lines(check.evidence)
    if check.remedy:
        lines.append(f"remedy: {check.remedy}")
    return "\n".join(lines)


def evidence_lines(evidence: dict[str, Any]) -> list[str]:
    """Write one value per line: a list of names is a heading with a line for each name; an empty one says "none"."""
    return list(_mapping_lines(evidence, ""))


def _mapping_lines(mapping: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in mapping.items():
        if _is_nested(value):
            yield f"{indent}{key}:"
            yield from _nested_lines(value, indent + _INDENT)
        else:
            yield f"{indent}{key}: {_one_line(value)}"


def _nested_lines(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, dict):
        yield from _mapping_lines(value, indent)
        return
    for item in value:
        if _is_nested(item):
            first, *rest = _nested_lines(item, indent + _INDENT)
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{indent}- {_one_line(item)}"


def _is_nested(value: Any) -> bool:
    """Return whether a value needs several lines. A list of numbers does not: it reads better in one."""
    if isinstance(value, dict):
        return bool(value)
    return isinstance(value, list | tuple) and any(not isinstance(item, int | float) for item in value)


def _one_line(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        return ", ".join(map(str, value)) or "none"
    return str(value)
