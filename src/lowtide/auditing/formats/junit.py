"""The report as JUnit XML, which every CI system shows: one test case per check, in one suite.

A failure carries evidence and remedy as its text. What proved nothing (inconclusive, not applicable) is skipped with
the reason, so that it is counted and never looks like a pass. XML 1.0 cannot hold control characters, not even escaped;
an error message may (colours of a terminal), so they are written as `\\x1b`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from lowtide.auditing.formats.evidence import as_lines, details
from lowtide.auditing.verdicts import Verdict

if TYPE_CHECKING:
    from lowtide.auditing.verdicts import AuditReport, Check

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


def _case(report: AuditReport, check: Check) -> ET.Element:
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
