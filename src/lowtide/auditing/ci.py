"""Evidence as indented lines, one value each, for formats that hold plain text.

The report as JUnit XML, which every CI system shows: one test case per check, in one suite.

A failure carries evidence and remedy as its text. What proved nothing (inconclusive, not applicable) is skipped with
the reason, so that it is counted and never looks like a pass. XML 1.0 cannot hold control characters, not even escaped;
an error message may (colours of a terminal), so they are written as `\x1b`.

The report as workflow commands of GitHub Actions: printed in a job, they become annotations of its run.

Failures are errors, what could not be told is a warning, and one notice sums up. GitHub shows ten errors and ten
warnings of a step as annotations; the others stand in its log, and the notice counts all of them.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from lowtide.auditing.report import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.auditing.report import AuditReport, CheckResult

_STEP = "  "


def as_lines(evidence: dict[str, Any]) -> list[str]:
    """`lost: 2 names` as a heading with a line per name under it; what has no content says so."""
    return list(_of_mapping(evidence, ""))


def details(check: CheckResult) -> str:
    """Everything below a check's summary: the evidence, and the remedy if there is one."""
    lines = as_lines(check.evidence)
    if check.remedy:
        lines.append(f"remedy: {check.remedy}")
    return "\n".join(lines)


def _of_mapping(mapping: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in mapping.items():
        if _is_nested(value):
            yield f"{indent}{key}:"
            yield from _of(value, indent + _STEP)
        else:
            yield f"{indent}{key}: {_flat(value)}"


def _of(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, dict):
        yield from _of_mapping(value, indent)
        return
    for item in value:
        if _is_nested(item):
            first, *rest = _of(item, indent + _STEP)
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{indent}- {_flat(item)}"


def _is_nested(value: Any) -> bool:
    """A list of numbers reads better in one line."""
    if isinstance(value, dict):
        return bool(value)
    return isinstance(value, list | tuple) and any(not isinstance(item, int | float) for item in value)


def _flat(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        return ", ".join(map(str, value)) or "none"
    return str(value)


_SKIPPED = (Verdict.INCONCLUSIVE, Verdict.NOT_APPLICABLE)

_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def as_junit(report: AuditReport) -> str:
    suite = ET.Element(
        "testsuite",
        name=f"lowtide audit of {report.model}",
        tests=str(len(report.checks)),
        failures=str(len(report.failures)),
        errors="0",
        skipped=str(sum(check.verdict in _SKIPPED for check in report.checks)),
    )
    properties = ET.SubElement(suite, "properties")
    ET.SubElement(properties, "property", name="seed", value=str(report.seed))
    suite.extend([_case(report, check) for check in report.checks])
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(report: AuditReport, check: CheckResult) -> ET.Element:
    case = ET.Element("testcase", classname=_text(f"{report.model}.{check.mode}"), name=_text(check.name))
    if check.verdict is Verdict.FAIL:
        failure = ET.SubElement(case, "failure", message=_text(check.summary), type="lowtide.audit")
        failure.text = _text(details(check))
    elif check.verdict in _SKIPPED:
        ET.SubElement(case, "skipped", message=_text(f"{check.verdict}: {check.summary}"))
    lines = as_lines(check.evidence)
    if lines:
        ET.SubElement(case, "system-out").text = _text("\n".join(lines))
    return case


def _text(text: str) -> str:
    return _NOT_IN_XML.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


_COMMANDS = {Verdict.FAIL: "error", Verdict.INCONCLUSIVE: "warning"}


def as_github(report: AuditReport) -> str:
    lines = [_annotation(report, check) for check in report.checks if check.verdict in _COMMANDS]
    return "\n".join([*lines, _summary(report)])


def _annotation(report: AuditReport, check: CheckResult) -> str:
    title = f"{report.model} [{check.mode}] {check.name}"
    message = f"{check.summary}\n{details(check)}".rstrip()
    return _command(_COMMANDS[check.verdict], title, message)


def _summary(report: AuditReport) -> str:
    counts = collections.Counter(check.verdict for check in report.checks)
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    state = "ok" if report.ok else "not ok"
    return _command("notice", f"lowtide audit of {report.model}", f"{state}: {verdicts or 'no check was run'}")


def _command(name: str, title: str, message: str) -> str:
    return f"::{name} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    """A command is one line; the percent sign comes first, because it starts the escapes."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
